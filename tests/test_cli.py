"""The command lines, run as a user would run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec import cli
from jaxspec import generate as command
from jaxspec.config import SpecConfig

FIXTURES = Path(__file__).parent / "fixtures"
LLAMA = str(FIXTURES / "target_llama_smallvocab")


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, env=environment, timeout=600, check=False, **options
    )


def test_generate_compares_and_reports_json():
    done = run(
        "jaxspec.generate",
        "--model",
        LLAMA,
        "--token-ids",
        "1,2 3",
        "--max-new-tokens",
        "12",
        "--ignore-eos",
        "--speculative-algorithm",
        "NGRAM",
        "--speculative-num-draft-tokens",
        "5",
        "--compare",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    assert "RuntimeWarning" not in done.stderr
    report = json.loads(done.stdout)
    assert report["equal"] is True
    assert len(report["tokens"]) == 12
    assert report["text"] is None
    assert report["stats"]["algorithm"] == "NGRAM"
    assert report["stats"]["num_draft_tokens"] == 5
    assert report["plain_stats"]["algorithm"] == "NONE"
    assert report["speedup"] == pytest.approx(report["stats"]["tokens_per_second"] / report["plain_stats"]["tokens_per_second"])
    assert "same tokens: yes" in done.stderr


def test_errors_are_one_line():
    done = run("jaxspec.generate", "--model", "no/such/folder/here", "--prompt", "x")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "no/such/folder/here" in done.stderr
    assert "Traceback" not in done.stderr


def main(*arguments: str) -> int:
    import runpy

    module = runpy.run_module("jaxspec.generate", run_name="jaxspec_generate_command")
    return module["main"](list(arguments))


def test_generate_streams(capsys):
    assert main("--model", LLAMA, "--token-ids", "1 2 3", "--max-new-tokens", "6", "--algorithm", "none") == 0
    out = capsys.readouterr().out
    assert "accept length" in out
    assert "tokens/s" in out


def test_every_field_is_an_option_in_both_spellings():
    import argparse

    parser = argparse.ArgumentParser()
    cli.add_spec_arguments(parser)
    plain = cli.spec_from(parser.parse_args(["--num-steps", "3", "--topk", "2", "--ngram-match-type", "PROB"]))
    prefixed = cli.spec_from(
        parser.parse_args(
            ["--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-ngram-match-type", "PROB"]
        )
    )
    assert plain == prefixed == SpecConfig(num_steps=3, topk=2, options={"ngram_match_type": "PROB"})
    text = parser.format_help()
    for name in ("draft levels", "most recent first", "lossless", "default: 18"):
        assert name in " ".join(text.split())


def test_helps_name_options_and_defaults_as_they_are_typed():
    assert cli.with_default("seconds; steps where `evaluate_steps` is given.", 20.0) == (
        "seconds; steps where --evaluate-steps is given (default: 20.0)"
    )
    assert cli.with_default("one is drawn (`data.heat`), 100% of rows", (0.0, 0.7)) == (
        "one is drawn, 100%% of rows (default: 0.0 0.7)"
    )
    assert cli.with_default("draft levels.", None) == "draft levels"


def test_the_function_stays_the_function():
    import jaxspec

    assert callable(jaxspec.generate)
    assert command is jaxspec.generate
