"""Accept lengths and speed-ups: what is counted, what is skipped, and the command from end to end on a tiny target."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
from pathlib import Path

import accept_report
import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import shipped
from jaxspec.benchmarking import accept
from jaxspec.benchmarking.accept import PromptSet, Row, Settings
from jaxspec.config import ConfigError
from jaxspec.conversion import store
from jaxspec.training.data import Data
from tests import tiny

ROOT = Path(__file__).parents[2]
target = functools.partial(tiny.target, layers=1)


def script():
    spec = importlib.util.spec_from_file_location("accept_lengths", ROOT / "benchmarks" / "accept_lengths.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "text, tree",
    [("eagle3 5/4/8", (5, 4, 8)), ("ngram 12", (None, None, 12)), ("dflash", (None,) * 3), ("uno -/1/8", (None, 1, 8))],
)
def test_rows_are_read_as_they_are_written(text, tree):
    row = Row.parse(text)
    assert (row.head, row.tree, row.name) == (text.split()[0], tree, text)


@pytest.mark.parametrize("text", ["eagle3 5/4", "eagle3 a/b/c", "eagle3 1/2/3/4", "ngram twelve"])
def test_rows_that_say_nothing(text):
    with pytest.raises(ConfigError, match="must read"):
        Row.parse(text)


def test_every_batch_has_all_temperatures_and_the_same_size():
    sets = [PromptSet("x", tuple((i,) for i in range(5)))]
    requests = accept.requests_of(sets, (0.0, 1.0), 5)
    groups = accept.batched(requests, 4, (0.0, 1.0))
    assert [len(g) for g in groups] == [4, 4, 4]
    assert all({r.temperature for r in g} == {0.0, 1.0} for g in groups)
    assert [r for g in groups for r in g][:10] == requests
    assert [len(g) for g in accept.batched(requests, 64, (0.0, 1.0))] == [10]


def with_drafts(**drafts) -> jaxspec.ModelParams:
    return jaxspec.ModelParams(target().tree, target().config, target().tokenizer, drafts)


SAME = Row("same", 3, 1, 4)
SETS = [PromptSet("a", ((3, 4, 5), (7, 8))), PromptSet("b", ((9,), (10, 11, 12, 13)))]
SETTINGS = Settings(timed_temperatures=(0.0,), new_tokens=12, batch=4, timed=1, repeats=2, prompts=2, threads=2)


@pytest.fixture(scope="module")
def figures():
    """The target as its own draft."""
    params = with_drafts(same=target())
    lines: list[str] = []
    rows = [Row.parse("same 3/1/4"), Row.parse("nobody 3/1/4")]
    return accept.Group(params, rows, SETS, SETTINGS, lines.append).measure(), lines


def test_figures(figures):
    found, _ = figures
    assert set(found) == {(SAME, s, t) for s in "ab" for t in (0.0, 1.0)}
    best = found[SAME, "a", 0.0]
    # 11 tokens behind the prefill's: rounds of 4, 4 and, cut by the limit, 3.
    assert (best["prompts"], best["completion_tokens"], best["rounds"]) == (2, 24, 6)
    assert best["accept_length"] == pytest.approx(22 / 6) == best["tokens_per_pass"] == best["accept_length_by_prompt_mean"]
    assert best["accept_by_depth"] == [1, 1, 1]
    assert best["algorithm"] == "STANDALONE" and best["resolved"] == [3, 1, 4]
    assert best["same_tokens"] == best["timed_prompts"] == 1 and best["repeats"] == 2
    assert best["timed_accept_length"] == pytest.approx(11 / 3)
    assert "speedup" not in found[SAME, "a", 1.0] and found[SAME, "a", 1.0]["prompts"] == 2
    for row in (found[SAME, s, 0.0] for s in "ab"):
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / row["plain_tokens_per_second"])
        assert row["median_speedup"] > 0 and row["round_ms"] > 0
        json.dumps(row)


def test_a_row_that_fails_costs_only_itself(figures):
    _, lines = figures
    assert any("nobody 3/1/4" in line and "no such head; the model has same" in line for line in lines)


def test_a_group_gives_what_generate_gives(figures):
    """Neither the neighbours of a batch nor the room of its rows change an answer; sampled rows follow their seeds."""
    found, _ = figures
    params = with_drafts(same=target())
    for temperature in (0.0, 1.0):
        results = [
            jaxspec.generate(
                params,
                list(ids),
                draft=params.drafts["same"],
                num_steps=3,
                topk=1,
                num_draft_tokens=4,
                max_new_tokens=12,
                temperature=temperature,
                seed=accept.FIRST_SEED + i,
            )
            for i, ids in enumerate(SETS[0].prompts)
        ]
        row = found[SAME, "a", temperature]
        assert row["rounds"] == sum(r.stats.rounds for r in results)
        assert row["accept_length"] == pytest.approx(sum(len(r.tokens) - 1 for r in results) / row["rounds"])


def test_without_batches_the_timed_answers_count():
    params = with_drafts(same=target())
    settings = dataclasses.replace(SETTINGS, prompts=0, temperatures=(0.0,))
    found = accept.Group(params, [SAME], SETS, settings, lambda _: None).measure()
    assert found[SAME, "b", 0.0]["accept_length"] == pytest.approx(11 / 3)
    assert found[SAME, "b", 0.0]["prompts"] == 1


def test_stopped_early_all_sets_have_been_timed_alike():
    params, saved = with_drafts(same=target()), []
    settings = dataclasses.replace(SETTINGS, prompts=0, timed=2, repeats=1, temperatures=(0.0,))
    group = accept.Group(params, [SAME], SETS, settings, lambda _: None)
    assert [(r.set, r.index) for r in group.timed] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    found = group.measure(saved.append, until=0.0)
    assert set(found) == {(SAME, "a", 0.0)} and found[SAME, "a", 0.0]["timed_prompts"] == 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny target with a tokenizer, two heads in a folder like ``checkpoints/``, and prompt files."""
    for name, count in (("mt_bench", 4), ("gsm8k", 3)):
        lines = [json.dumps({"turns": [f"PROMPT {name.upper().replace('_', ' ')} {i}", "SECOND"]}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    heads = tmp_path / "heads"
    heads.mkdir()
    store.write_folder(heads / "tiny-standalone", tiny.small_draft().config, tiny.small_draft().tree, {}, quantize="int8")
    monkeypatch.setattr(jaxspec, "load", lambda *_, **__: with_drafts())
    return tmp_path


def test_the_command(folder, capsys):
    run, out = script().main, folder / "out.json"
    arguments = [
        "--data",
        str(folder),
        "--sets",
        "mt_bench",
        "gsm8k",
        "--target",
        "tiny",
        "--checkpoints",
        str(folder / "heads"),
        "--rows",
        "ngram 4",
        "standalone 2/1/3",
        "--prompts",
        "0",
        "--timed-prompts",
        "2",
        "--new-tokens",
        "6",
        "--batch",
        "4",
        "--temperature",
        "0",
        "--group",
        "1",
        "--json",
        str(out),
    ]
    assert run([*arguments, "--algorithms", "ngram"]) == 0
    assert run([*arguments, "--budget", "0"]) == 0
    assert "1 of 1 rows were not begun" in capsys.readouterr().out
    rows = accept_report.read(out)
    assert {r["row"] for r in rows} == {"ngram 4"} and len(rows) == 2
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert "ngram 4: there already" in shown and "| `standalone 2/1/3` |" in shown
    rows = accept_report.read(out)
    assert [(r["row"], r["set"]) for r in rows] == [
        (row, s) for row in ("ngram 4", "standalone 2/1/3") for s in ("mt_bench", "gsm8k")
    ]
    ngram, small = rows[0], rows[2]
    assert ngram["head_id"] == "" and len(small["head_id"]) == 12 and small["head"] == "standalone"
    assert small["platform"] == jax.default_backend() and small["dtype"] == "float32" and small["num_steps"] == 2
    assert '--rows "ngram 4" "standalone 2/1/3"' in small["command"] and small["prompts"] == 2
    assert run(arguments) == 0 and accept_report.read(out) == rows, "nothing is measured twice"
    assert run(["--table", str(out)]) == 0
    table = capsys.readouterr().out
    assert "| draft | MT-Bench, greedy | GSM8K, greedy |" in table
    assert f"| `standalone 2/1/3` | {small['accept_length']:.2f}, {small['speedup']:.2f}× |" in table
    readme = folder / "README.md"
    readme.write_text(f"before\n{accept_report.BEGIN}\nold\n{accept_report.END}\nafter\n")
    assert run(["--table", str(out), "--readme", str(readme)]) == 0
    expected = ["before", accept_report.BEGIN, *capsys.readouterr().out.splitlines(), accept_report.END, "after"]
    assert readme.read_text().splitlines() == expected

    measured = folder / "heads" / "measured.json"
    assert run(["--write-measured", str(measured), str(out)]) == 0
    (entry,) = json.loads(measured.read_text())["rows"]
    assert (entry["model"], entry["head"], entry["topk"]) == ("tiny", "standalone", 1)
    draft = shipped.drafts_for("tiny", with_drafts(), "float32", folder / "heads")["standalone"]
    assert draft.measured[0].speedup == small["speedup"]


def test_shares_of_the_prompts_joined_are_the_whole(folder):
    run, whole = script().main, folder / "whole.json"
    arguments = [
        "--data",
        str(folder),
        "--sets",
        "mt_bench",
        "gsm8k",
        "--target",
        "tiny",
        "--checkpoints",
        str(folder / "heads"),
        "--rows",
        "standalone 2/1/3",
        "--prompts",
        "4",
        "--timed-prompts",
        "3",
        "--new-tokens",
        "6",
        "--batch",
        "4",
    ]
    assert run([*arguments, "--json", str(whole)]) == 0
    files = [folder / f"share{i}.json" for i in range(2)]
    for i, file in enumerate(files):
        own = ["--share", str(i), "2", "--turns", str(folder / "lock"), "--budget", "100"]
        assert run([*arguments, *own, "--json", str(file)]) == 0
    out = folder / "joined.json"
    assert run(["--join", str(out), *map(str, files)]) == 0
    rows, expected = accept_report.read(out), accept_report.read(whole)
    assert len(rows) == len(expected) == 4
    for row, one in zip(rows, expected, strict=True):
        assert accept_report.key(row) == accept_report.key(one)
        assert set(row) - {"shares"} == set(one) and "--share I 2" in row["command"]
        for name in ("prompts", "timed_prompts", "rounds", "completion_tokens", "same_tokens", "repeats"):
            assert row[name] == one[name], name
        for name in (
            "accept_length",
            "tokens_per_pass",
            "accept_length_by_prompt_mean",
            "timed_accept_length",
            "accept_by_depth",
        ):
            assert row[name] == pytest.approx(one[name]), name
        parts = row["shares"]
        assert [p["timed_prompts"] for p in parts] == [2, 1]
        assert min(p["speedup"] for p in parts) <= row["speedup"] <= max(p["speedup"] for p in parts)
    assert run(["--join", str(out), *map(str, files)]) == 0 and accept_report.read(out) == rows, "added once"
    with pytest.raises(ConfigError, match="the first number must be 0 to 1"):
        run([*arguments, "--share", "2", "2"])
    (first, *_), (second, *_) = map(accept_report.read, files)
    with pytest.raises(ConfigError, match=r"shares of \[2, 3\] processes cannot be joined"):
        accept_report.joined([first, {**second, "share": [1, 3]}])


def test_speeds_of_a_run_complete_the_lengths_of_another(folder):
    run, files = script().main, [folder / f"{name}.json" for name in ("lengths", "speeds")]
    arguments = [
        "--data",
        str(folder),
        "--sets",
        "mt_bench",
        "--target",
        "tiny",
        "--checkpoints",
        str(folder / "heads"),
        "--rows",
        "standalone 2/1/3",
        "--new-tokens",
        "6",
        "--batch",
        "4",
        "--temperature",
        "0",
    ]
    assert run([*arguments, "--prompts", "4", "--timed-prompts", "0", "--json", str(files[0])]) == 0
    assert run([*arguments, "--prompts", "0", "--timed-prompts", "2", "--json", str(files[1])]) == 0
    out = folder / "out.json"
    assert run(["--join", str(out), *map(str, files)]) == 0
    (row,), (lengths,), (speeds,) = map(accept_report.read, (out, *files))
    assert row["prompts"] == 4 and row["accept_length"] == lengths["accept_length"]
    assert row["timed_prompts"] == 2 and row["speedup"] == speeds["speedup"] and row["asked_timed"] == 2
    assert row["command"] == lengths["command"] and row["timed_command"] == speeds["command"]
    assert "--data DATA" in row["command"] and str(folder / "lengths.json") not in row["command"]
    assert run(["--join", str(out), str(files[0])]) == 0
    assert accept_report.read(out) == [row], "lengths measured again leave the speed"


def test_overlap_with_training_rows(folder, monkeypatch, capsys):
    text = tiny.CharTokenizer().encode("SOMETHING ELSE ENTIRELY, OF SOME LENGTH")
    prompt = tiny.CharTokenizer().encode("XX PROMPT MT BENCH 2 AND MORE OF IT.....")
    monkeypatch.setattr(tiny.CharTokenizer, "encode", lambda self, text, add_special_tokens=True: [self.vocab[c] for c in text])
    rows = np.array([row[:39] for row in (text, prompt)], np.int32)
    for name, kept in (("clean", rows[:1]), ("mixed", rows)):
        Data(kept, np.ones(kept.shape, bool), np.zeros(len(kept), np.float32), {}).save(folder / f"{name}.npz")
    arguments = ["--data", str(folder), "--sets", "mt_bench", "--target", "tiny", "--overlap"]
    assert script().main([*arguments, str(folder / "clean.npz")]) == 0
    assert script().main([*arguments, str(folder / "clean.npz"), str(folder / "mixed.npz")]) == 1
    shown = capsys.readouterr().out
    assert "clean.npz: 0 of 1 rows (39 tokens)" in shown and "mixed.npz: 1 of 2 rows" in shown


def test_the_readme_shows_what_was_measured():
    files = [ROOT / "benchmarks" / "results" / f"accept_lengths_{name}.json" for name in ("h200", "cpu")]
    table = accept_report.table([row for file in files for row in accept_report.read(file)])
    assert f"{accept_report.BEGIN}\n{table}\n{accept_report.END}" in (ROOT / "README.md").read_text()


def test_files_of_another_kind_are_refused(tmp_path):
    assert accept_report.read(tmp_path / "absent.json") == []
    (tmp_path / "x.json").write_text('{"rows": [{}]}')
    with pytest.raises(ConfigError, match="is not a file of accept lengths"):
        accept_report.read(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="no head was timed"):
        accept_report.measured([])
