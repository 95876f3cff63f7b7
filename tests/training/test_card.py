"""A head's card says what its files say, and only results of that very head."""

import importlib.util
import json
from pathlib import Path

import jax
import pytest

from jaxspec.benchmarking.records import write_rows
from jaxspec.conversion import ConversionError, store
from jaxspec.training import card
from tests.drafters.eagle_cases import random_head

ROOT = Path(__file__).parents[2]
TRAINING = {
    "steps": 30,
    "tokens": 737280,
    "learning_rate": 0.001,
    "device": "some device",
    "seconds": 61.5,
    "data": {"target": "smollm2-135m", "temperatures": [0.0, 0.7], "rows_dropped_for_overlap": 3, "seed": 4},
}


def script():
    spec = importlib.util.spec_from_file_location("head_card", ROOT / "benchmarks" / "head_card.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path):
    head = random_head("deepspec")
    made = tmp_path / "smollm2-135m-eagle3"
    store.write_folder(made, head.config, head.tree, {"training": TRAINING}, quantize="int8")
    points = [
        {"step": i, "tokens": 1000 * i, "seconds": float(i), "loss": 2.0 - i / 50, "accept_length": 1 + i / 30}
        for i in range(31)
    ]
    del points[0]["loss"]
    (made / "training.jsonl").write_text("".join(json.dumps(p) + "\n" for p in points))
    return made


def result(head_id, accept_length):
    return {
        "model": "smollm2-135m",
        "row": "eagle3 3/1/4",
        "head": "eagle3",
        "head_id": head_id,
        "set": "mt_bench",
        "temperature": 0.0,
        "platform": "cpu",
        "device": "a CPU",
        "dtype": "float32",
        "new_tokens": 256,
        "asked_prompts": 80,
        "asked_timed": 8,
        "prompts": 80,
        "timed_prompts": 8,
        "accept_length": accept_length,
        "tokens_per_pass": accept_length,
        "speedup": 1.5,
        "command": "python benchmarks/accept_lengths.py --data D",
    }


def test_the_card_says_what_the_files_say(folder, tmp_path):
    results = tmp_path / "results.json"
    write_rows(results, [result(card.digest(folder), 2.345), result("another", 9.87)])
    run = script().main
    arguments = [str(folder), "--results", str(results), "--command", "python -m jaxspec.train eagle3"]
    assert run([*arguments, "--check"]) == 1 and not (folder / "README.md").exists()
    digest, bytes_before = card.digest(folder), card.size(folder)
    assert run(arguments) == 0 and run([*arguments, "--check"]) == 0
    assert (card.digest(folder), card.size(folder)) == (digest, bytes_before), "the card is not part of the head"
    text = (folder / "README.md").read_text()
    count = sum(x.size for x in jax.tree.leaves(random_head("deepspec").tree))
    for expected in (
        "# smollm2-135m-eagle3",
        "A draft for smollm2-135m: algorithm `eagle3`",
        f"{count:,} parameters, stored as int8",
        "- steps: 30\n",
        "- tokens: 737,280\n",
        "- learning rate: 0.001\n",
        "- temperatures: 0, 0.7\n",
        "- rows dropped for overlap: 3\n",
        "python -m jaxspec.train eagle3\n",
        "| 0 | – | 1.00 | 0 |",
        "| 30,000 | 1.4000 | 2.00 | 30 |",
        "| `eagle3 3/1/4` | 2.35, 1.50× |",
        "python benchmarks/accept_lengths.py --data D",
        f"`{digest}`",
    ):
        assert expected in text, text
    assert run([*arguments[:-2], "--check"]) == 0, "the command of the card that is there stays"
    assert "9.87" not in text and text.count("\n| ") <= card.CURVE_POINTS + 6


def test_another_head_has_another_digest(folder, tmp_path):
    head = random_head("deepspec", 2)
    store.write_folder(tmp_path / "other", head.config, head.tree, {"training": TRAINING}, quantize="int8")
    assert card.digest(folder) != card.digest(tmp_path / "other")


def test_folders_that_were_not_trained_have_no_card(tmp_path):
    head = random_head("deepspec")
    store.write_folder(tmp_path / "x", head.config, head.tree, {})
    with pytest.raises(ConversionError, match="does not say how it was trained"):
        card.card(tmp_path / "x")


def test_an_objective_is_shown_by_its_own_options():
    new = card.objective_line("UnoObjective", {"block": 8, "curriculum_steps": 1500, "taps": [1, 2]})
    assert new == "UnoObjective; block 8; curriculum steps 1,500; taps 1, 2"
    old = "UnoObjective(target=ModelConfig(windows=(None,), rope=RopeConfig(theta=1.0)), config=C(rank=5), block=8, ce=0.3)"
    assert card.objective_line(old, {}) == "UnoObjective; block 8; ce 0.3"
    assert card.objective_line("UnoObjective(target=<a model>, block=8)", {}) == "UnoObjective"


def test_the_code_of_a_card_runs_wherever_the_head_lies(folder, tmp_path):
    text = card.card(folder)
    assert 'load("smollm2-135m")' in text and 'algorithm="eagle3"' in text and "load_draft" not in text
    other = folder.rename(tmp_path / "head")
    text = card.card(other)
    assert 'load("smollm2-135m")' in text and 'load_draft("head", params)' in text and "draft=draft" in text
