"""`python -m jaxspec.bench` from end to end on the tiny shape."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxspec import bench
from jaxspec.benchmarking import decode, shapes, shares, suites, sweep
from jaxspec.benchmarking.bandwidth import Bandwidth, measure_bandwidth
from jaxspec.benchmarking.parts import PARTS
from jaxspec.benchmarking.records import read_rows, write_rows
from jaxspec.benchmarking.rounds import RoundCase, RoundResult
from jaxspec.config import ConfigError, SpecConfig

KEYS = {"name", "batch", "context", "ms", "floor_ms", "copy_tbps", "parts"}


def test_a_round_by_parts_as_json(tmp_path, capsys):
    path = tmp_path / "round.json"
    status = bench.main(
        [
            "round",
            "--suite",
            "peer",
            "--rows",
            "eagle3 3/1/4",
            "--target",
            "tiny",
            "--batch",
            "8",
            "--context",
            "512",
            "--rounds",
            "1",
            "3",
            "--repeats",
            "1",
            "--bandwidth-bytes",
            "1048576",
            "--json",
            str(path),
        ]
    )
    assert status == 0
    (row,) = read_rows(path)
    assert set(row) >= KEYS
    assert (row["name"], row["batch"], row["context"]) == ("eagle3 3/1/4", 8, 512)
    assert row["accept_length"] == 3.0
    assert row["copy_tbps"] > 0
    total = sum(part["bytes"] for part in row["parts"].values())
    assert row["floor_ms"] == pytest.approx(total / row["copy_tbps"] / 1e9)
    assert list(row["parts"]) == [p for p in (*PARTS, "gaps") if p in row["parts"]]
    assert {"draft", "attention", "products", "head", "accept", "commit", "extend", "gaps"} <= set(row["parts"])
    assert sum(part["ms"] for part in row["parts"].values()) == pytest.approx(row["ms"])
    assert all(part["ms"] > 0 for name, part in row["parts"].items() if name != "gaps")
    shown = capsys.readouterr().out
    assert "floor" in shown
    assert "eagle3 3/1/4" in shown


def test_gpus_share_a_suite(tmp_path, capfd, monkeypatch):
    """Two processes, each with half of the rows; what the file holds is not measured again."""
    path = tmp_path / "round.json"
    held = {"name": "plain", "batch": 8, "context": 8192, "ms": 1.5, "floor_ms": 1.0, "copy_tbps": 4.0, "parts": {}}
    write_rows(path, [held])
    command = [
        "round",
        "--suite",
        "peer",
        "--rows",
        "plain",
        "--target",
        "tiny",
        "--context",
        "512",
        "--rounds",
        "1",
        "3",
        "--repeats",
        "1",
        "--bandwidth-bytes",
        "1048576",
        "--no-parts",
        "--resume",
        "--json",
        str(path),
        "--gpus=2",
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match="may use 1: 3"):
        bench.main(command)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(shares.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="may use 0: none"):
        bench.main(command)
    assert read_rows(path) == [held]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert bench.main(command) == 0
    rows = {(row["batch"], row["context"]): row["ms"] for row in read_rows(path)}
    assert set(rows) == {(1, 512), (4, 512), (8, 512), (32, 512), (8, 8192)}
    assert rows[8, 8192] == 1.5
    assert list(tmp_path.glob(".*")) == []
    capfd.readouterr()
    with pytest.raises(ConfigError, match="--gpus 2"):
        bench.main(["round", "--target", "tiny", "--gpus", "2"])
    assert shares.without(["a", "--gpus", "2", "--json=x", "--share", "b"], "--gpus", "--json") == ["a", "--share", "b"]


def test_compare_finds_equal_tokens(tmp_path, capsys):
    path = tmp_path / "compare.json"
    status = bench.main(
        [
            "compare",
            "--target",
            "tiny",
            "--algorithm",
            "ngram",
            "--num-draft-tokens",
            "4",
            "--prompt-length",
            "12",
            "--limit",
            "3",
            "--max-new-tokens",
            "8",
            "--batch",
            "2",
            "--json",
            str(path),
        ]
    )
    assert status == 0
    shown = capsys.readouterr().out
    assert "same tokens: 3 of 3 prompts" in shown
    off, on = read_rows(path)
    assert off["algorithm"] == "NONE"
    assert on["algorithm"] == "NGRAM 4"
    assert off["completion_tokens"] == on["completion_tokens"] == 4 * 8
    assert off["accept_length"] == 1.0 <= on["accept_length"]


def test_a_sweep_writes_its_table_and_names_the_best_setting(tmp_path, capsys):
    path = tmp_path / "sweep.csv"
    arguments = [
        "sweep",
        "--target",
        "tiny",
        "--draft",
        "eagle3",
        "--csv",
        str(path),
        "--steps",
        "0",
        "--topk",
        "0",
        "--num-draft-tokens",
        "0",
        "--prompt-length",
        "12",
        "--limit",
        "3",
        "--max-new-tokens",
        "8",
        "--batch",
        "2",
    ]
    assert bench.main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["2", "0/0/0", "1.00"]
    (row,) = sweep.read_rows(path)
    assert row["acc_length"] == 1.0
    assert row["completion_tokens"] == 4 * 8
    assert bench.main(arguments) == 0
    assert sweep.read_rows(path) == [row]


def test_prefill_reports_each_length(capsys, tmp_path):
    options = ["--lengths", "9", "140", "--repeats", "1", "--attention", "auto", "xla", "--json", str(tmp_path / "rows.json")]
    assert bench.main(["prefill", "--target", "tiny", *options]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [[line[0], line[2]] for line in lines] == [["9", "paged"], ["140", "paged"], ["9", "paged"], ["140", "xla"]]
    assert [row["attention"] for row in read_rows(tmp_path / "rows.json")] == ["paged", "paged", "paged", "xla"]


def result(case: RoundCase) -> RoundResult:
    return RoundResult(case.name, case.batch, case.context, 1.0, 0.1, 0.5, 4.0, 4.5, {}, 3.0, 100.0, 1.0)


class Shapes:
    """No weights: for suites whose measuring is replaced."""

    target = None

    def draft(self, name):
        return name


def test_a_suite_goes_on_after_a_failure_and_stops_within_its_budget(tmp_path, monkeypatch):
    clock, said, path = [0.0], [], tmp_path / "rows.json"

    def measure(case, target, draft, bandwidth):
        clock[0] += 10
        if case.name == "ngram 16":
            raise ValueError("the kernel does not compile")
        assert len(read_rows(path)) == len([x for x in said if "ms" in x])
        return result(case)

    monkeypatch.setattr(suites, "measure", measure)
    monkeypatch.setattr(suites.time, "perf_counter", lambda: clock[0])
    write_rows(path, [])
    cases = suites.peer_suite(["plain", "ngram 16", "eagle3 3/1/4"], batches=[1])
    found = suites.run_suite(cases, Shapes(), Bandwidth(4.0, 4.5), budget=35, path=path, log=said.append)
    assert [r.name for r in found] == ["plain", "eagle3 3/1/4"]
    assert [r["name"] for r in read_rows(path)] == ["plain", "eagle3 3/1/4"]
    assert any("ngram 16" in x and "does not compile" in x for x in said)
    assert "2 of 5 cases were not begun" in said[-1]


def test_the_peer_suite_holds_the_rows_of_the_table():
    cases = [c.case for c in suites.peer_suite()]
    assert {c.name for c in cases} == set(suites.PEER_ROWS)
    assert len({(c.name, c.batch, c.context) for c in cases}) == len(cases)
    plain = {(c.batch, c.context) for c in cases if c.name == "plain"}
    assert plain == {(1, 512), (4, 512), (8, 512), (32, 512), (1, 8192), (8, 8192)}
    with pytest.raises(ConfigError, match="rows: plain"):
        suites.peer_suite(["eagle3"])


@pytest.mark.parametrize("name", shapes.drafts())
def test_random_drafts_fit_their_target(name):
    target = shapes.MODELS["tiny"]
    draft = shapes.random_draft(name, target, jnp.bfloat16)
    layer = draft.tree["layers"]["0"]
    kernels = list(layer.get("block", layer)["mlp"]["down"].values())
    assert all(x.dtype == jnp.bfloat16 and float(jnp.abs(x.astype(jnp.float32)).min()) > 0 for x in kernels)


def test_random_kernels_have_variance_one_over_fan_in():
    tree = shapes.random_tree({"down": {"kernel": (512, 256)}, "norm": {"scale": (8,)}}, 0, jnp.float32)
    assert float(tree["down"]["kernel"].var() * 512) == pytest.approx(1.0, rel=0.02)
    assert float(tree["norm"]["scale"].min()) == 1.0


def test_bandwidth_counts_a_copy_twice():
    found = measure_bandwidth(size=1 << 22, repeats=2, calls=2)
    assert 0 < found.copy < 100
    assert 0 < found.read < 100


@pytest.mark.parametrize(
    ("line", "message"), [("{", "line 1: not JSON"), ('{"question": "?"}', "turns"), ("[1]", "turns"), ("", "no prompts")]
)
def test_prompt_files_that_cannot_be_read(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=message):
        decode.read_prompts(path)


def test_prompts_are_first_turns(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n\n{"prompt": "c"}\n"d"\n')
    assert decode.read_prompts(path) == ["a", "c", "d"]
    assert decode.read_prompts(path, 2) == ["a", "c"]
    assert list(decode.batches_of(["a", "c", "d"], 2)) == [["a", "c"], ["d", "d"]]


def test_answers_are_compared_token_by_token():
    assert decode.first_difference([1, 2], [1, 2]) is None
    assert decode.first_difference([1, 2], [1, 3]) == 1
    assert decode.first_difference([1, 2], [1]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["round"], "--target is missing"),
        (["round", "--target", "tiny", "--context", "131072"], "shorten the context"),
        (["round", "--suite", "peer", "--draft", "eagle3"], "leave --draft"),
        (["round", "--suite", "peer", "--share", "2", "2"], "counts from 0"),
        (["round", "--target", "tiny", "--draft", "eagel"], "eagel"),
        (["sweep", "--target", "tiny", "--csv", "x.csv"], "needs --draft"),
    ],
)
def test_errors_say_what_to_do(arguments, message):
    extra = ["--bandwidth-bytes", "1048576"] if arguments[0] == "round" else []
    with pytest.raises((ConfigError, FileNotFoundError, ValueError), match=message):
        bench.main([*arguments, *extra])


def test_names_of_rows():
    assert bench.row_name("NONE", SpecConfig()) == "plain"
    assert bench.row_name("EAGLE3", SpecConfig(3, 1, 4)) == "eagle3 3/1/4"
    assert bench.row_name("NGRAM", SpecConfig(num_draft_tokens=16)) == "ngram 16"
