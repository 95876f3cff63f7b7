"""The command `python -m jaxspec.train`: its words, its rows, and what it leaves behind. Training itself: tests/training."""

import json

import numpy as np
import pytest

import jaxspec
from jaxspec import train as command
from jaxspec.config import ConfigError
from jaxspec.training import data as rows
from jaxspec.training.data import Data
from jaxspec.training.loop import train
from tests import tiny

TARGET = "tests/fixtures/target_llama"


@pytest.mark.parametrize(
    "line, head, out",
    [
        ("eagle3 --target t --out o --draft-vocab 64", "eagle3", "o"),
        ("--target t --out o --draft-vocab 64 eagle3", "eagle3", "o"),
        ("--target t --out eagle eagle3 --draft-vocab 64", "eagle3", "eagle"),
        ("--out uno --quiet dspark --target t --no-confidence", "dspark", "uno"),
        ("eagle --out eagle3 --target t --passes 2", "eagle", "eagle3"),
        ("--target data --data data data", "data", None),
        ("--out=mtp --target t uno --rank 4", "uno", "mtp"),
    ],
)
def test_the_head_is_found_wherever_it_stands(line, head, out):
    args = command.parse(line.split())
    assert (args.head, args.out) == (head, out)


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("--target t --out eagle", "HEAD"),
        ("--target t", "HEAD"),
        ("eagle3 --target t --out o --rank 4", "--rank"),
        ("eagle3 --target t --out eagle --lr fast", "fast"),
        ("eagle3 --target t --out o --store-dtype int8", "bfloat16"),
    ],
)
def test_a_line_that_says_something_wrong(line, complaint, capsys):
    with pytest.raises(SystemExit) as left:
        command.parse(line.split())
    assert left.value.code == 2 and complaint in capsys.readouterr().err


def test_the_help_states_the_heads_own_defaults(capsys):
    from jaxspec.training import eagle3, heads

    other = next(m for m in map(heads.head_module, heads.modules()) if getattr(m, "WEIGHT_DECAY", 0.0))
    for module in (eagle3, other):
        with pytest.raises(SystemExit):
            command.parse([next(k for k, v in heads.modules().items() if v == module.__name__), "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert f"AdamW's peak (default: {module.LEARNING_RATE})" in text
        assert f"AdamW's (default: {getattr(module, 'WEIGHT_DECAY', 0.0)})" in text


def stored(file, **about):
    """A file of rows as `synthesise` would have made them."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, tiny.VOCAB, (6, 32)).astype(np.int32)
    made = {"target": "tiny target 0", "seed": 0, "temperatures": [0.0, 1.0], "options": {"tokens": 192, "length": 32}, **about}
    data = Data(tokens, np.ones((6, 32), bool), np.zeros(6, np.float32), made)
    data.save(file)
    return data


def get_data(line, notes=None, work=None):
    return command.get_data(command.parse(line.split()), tiny.target(), (notes if notes is not None else []).append, work)


def test_options_that_would_do_nothing_are_named(tmp_path):
    made = stored(tmp_path / "rows.npz")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "A"}\n')
    plain = f"eagle3 --target t --out o --data {tmp_path}/rows.npz"
    np.testing.assert_array_equal(get_data(plain).tokens, made.tokens)
    get_data(f"{plain} --tokens 192 --length 32 --temperatures 0 1")  # a run that goes on is asked for the same again
    with pytest.raises(ConfigError, match="--length, --temperatures, --opener-share, --prompts would do nothing"):
        get_data(f"{plain} --tokens 192 --length 33 --temperatures 0.5 --opener-share 0.1 --prompts {tmp_path}/prompts.jsonl")


def test_rows_of_another_target_are_remarked(tmp_path):
    notes = []
    stored(tmp_path / "rows.npz", target="somebody")
    get_data(f"eagle3 --target t --out o --data {tmp_path}/rows.npz", notes)
    assert any(note.startswith("warning") and "somebody" in note and "tiny target 0" in note for note in notes)
    notes.clear()
    stored(tmp_path / "rows.npz")
    get_data(f"eagle3 --target t --out o --data {tmp_path}/rows.npz", notes)
    assert not any(note.startswith("warning") for note in notes)


@pytest.mark.parametrize("head", ["data", "eagle3 --out o"])
def test_excluded_rows_leave_the_file_when_only_data_is_asked_for(tmp_path, head):
    made = stored(tmp_path / "rows.npz", rows_dropped_for_overlap=2)
    text = tiny.CharTokenizer().decode(made.tokens[2, 5:25])
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": text}) + "\n")
    kept = get_data(f"{head} --target t --data {tmp_path}/rows.npz --exclude {tmp_path}/prompts.jsonl")
    np.testing.assert_array_equal(kept.tokens, made.tokens[[0, 1, 3, 4, 5]])
    file = rows.load(tmp_path / "rows.npz")
    assert len(file.tokens) == (5 if head == "data" else 6)
    assert file.about["rows_dropped_for_overlap"] == (3 if head == "data" else 2)


def test_data_may_lie_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    made = stored(tmp_path / "rows.npz")
    np.testing.assert_array_equal(get_data("data --target t --data ~/rows.npz").tokens, made.tokens)


def test_rows_outlive_an_interruption(tmp_path, monkeypatch, capsys):
    """Without --data, too: the run that goes on reads what the first one wrote, and the folder goes when all is done."""
    from jaxspec.training import loop, synthesis

    arguments = [
        "eagle3",
        "--target",
        TARGET,
        "--steps",
        "6",
        "--tokens",
        "1000",
        "--length",
        "24",
        "--rows",
        "48",
        "--batch",
        "4",
        "--held-out",
        "4",
        "--draft-vocab",
        "64",
        "--steps-ahead",
        "2",
        "--store-dtype",
        "float32",
        "--quantize",
        "int8",
        "--quiet",
    ]
    seen = []

    def watched(*args, **options):
        seen.append(train(*args, **options))
        return seen[-1]

    stored_as, as_stored = [], loop.as_stored
    monkeypatch.setattr(loop, "as_stored", lambda *args: stored_as.append(args[1:]) or as_stored(*args))
    monkeypatch.setattr(loop, "train", watched)
    assert command.main([*arguments, "--out", str(tmp_path / "whole")]) == 0
    assert command.main([*arguments, "--out", str(tmp_path / "head"), "--stop-after", "3"]) == 0
    kept = [p.name for p in (tmp_path / ".head-training").iterdir()]
    assert len([name for name in kept if name.startswith("data-") and name.endswith(".npz")]) == 1
    monkeypatch.setattr(synthesis, "synthesise", lambda *args, **options: pytest.fail("rows were written anew"))
    assert command.main([*arguments, "--out", str(tmp_path / "head")]) == 0
    assert stored_as == [("int8", "float32")] * 2  # at the end of the first and of the third run
    assert seen[2].losses == seen[0].losses and seen[1].losses == seen[0].losses[:3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head", "whole"]
    assert "data: read from" in capsys.readouterr().err


def test_a_target_in_float16_is_refused_before_rows_are_written(tmp_path, monkeypatch):
    from jaxspec.training import synthesis

    monkeypatch.setattr(synthesis, "synthesise", lambda *args, **options: pytest.fail("rows were written"))
    with pytest.raises(ConfigError, match="dtype=float16 has no range for gradients"):
        command.main(["eagle3", "--target", TARGET, "--dtype", "float16", "--out", str(tmp_path / "head")])


def test_a_student_of_any_source_gets_its_tokenizer(tmp_path):
    from tests.conversion.gguf_files import write_gguf
    from tests.tokenizer.test_tokenizer import sentencepiece_meta

    meta = {k: v for k, v in sentencepiece_meta().items() if "bos_token_id" not in k and "eos_token_id" not in k}
    file = tmp_path / "m.gguf"
    write_gguf("target_llama_smallvocab", file, metadata=meta)
    jaxspec.convert(file, tmp_path / "converted", progress=False)
    for source in (file, tmp_path / "converted"):
        found = command.tokenizer_files(source)
        assert "tokenizer.json" in found.files and found.load().encode("abc") == jaxspec.load(source).tokenizer.encode("abc")
