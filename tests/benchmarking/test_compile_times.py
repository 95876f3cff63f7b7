"""The benchmark of compile times: its cases, what it reads from XLA's log, and a whole run on a tiny target."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "benchmarks" / "compile_times.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("compile_times", PATH)
    found = importlib.util.module_from_spec(spec)
    sys.modules["compile_times"] = found  # where its dataclass looks for annotations
    spec.loader.exec_module(found)
    yield found
    del sys.modules["compile_times"]


def test_cases(benchmark):
    assert benchmark.parse_case("round:8") == benchmark.Case("round:8", 8)
    assert benchmark.parse_case("prefill:64:2") == benchmark.Case("prefill:64:2", 2, 64)


@pytest.mark.parametrize("text", ["round", "round:0", "round:1:2", "prefill:64", "decode:1", "prefill:x:1", ""])
def test_other_cases_are_refused(benchmark, text):
    with pytest.raises(ConfigError, match="round:BATCH or prefill:CHUNK:BATCH"):
        benchmark.parse_case(text)


LOG = """\
I1 config_assigner.cc:166] Finding configs for 61 unique instructions.
I1 config_assigner.cc:310] Using cached config: TRITON : block_m: 16
I1 compile_module_to_llvm_ir.cc:263] GpuCompiler::RunBackend - IR emission for gemm_fusion_dot.9 time: 77.9 ms (77854 us)
I1 compile_module_to_llvm_ir.cc:263] GpuCompiler::RunBackend - IR emission for loop_add_fusion time: 31 ms (31000 us)
I1 compile_module_to_llvm_ir.cc:263] GpuCompiler::RunBackend - IR emission for jit_run_rounds time: 3.9 s (3900000 us)
I1 hlo_pass_pipeline.cc:206] HLO pass: config-assigner time: 4.5 s (4500000 us) (cumulative: 5.9 s, max: 4.2 s, #called: 2778)
I1 hlo_pass_pipeline.cc:206] HLO pass: priority-fusion time: 752 ms (752000 us) (cumulative: 1 s, max: 1 s, #called: 3)
I1 gpu_compiler.cc:2345] GpuCompiler::RunHloPasses for jit_run_rounds time: 6 s (6000000 us) (cumulative: 6 s, max: 6 s)
I1 gpu_compiler.cc:2345] GpuCompiler::RunHloPasses for jit_iota time: 9 s (9000000 us) (cumulative: 9 s, max: 9 s)
I1 gpu_compiler.cc:3017] GpuCompiler::RunBackend for jit_run_rounds time: 756 ms (755843 us) (cumulative: 756 ms)
"""


def test_stages_are_read_from_the_log(benchmark):
    found = benchmark.xla_stages(LOG)
    assert found == {"tuning": 4.5, "passes": 1.5, "kernels": 0.756, "fusions": 61, "known": 1, "tried": 2}
    assert benchmark.xla_stages("nothing of interest\n") == {}


def test_the_table_leaves_out_what_nobody_measured(benchmark):
    text = benchmark.table([{"case": "round:1", "trace": 0.5, "fusions": 3}, {"case": "prefill:64:1", "trace": 1.25}])
    assert [line.split() for line in text.splitlines()] == [
        ["case", "trace", "fusions"],
        ["round:1", "0.50", "3"],
        ["prefill:64:1", "1.25"],
    ]


def test_a_run(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, str(PATH), "--target", "tiny", "--row", "plain", "--context", "16", "--json", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAXSPEC_COMPILATION_CACHE": "0"}
    done = subprocess.run([*command, "--cases", "round:1", "prefill:16:1"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(out.read_text())["rows"]
    assert result["cache"] == "empty" and result["device"] == "cpu"
    assert [row["case"] for row in result["rows"]] == ["round:1", "prefill:16:1"]
    for row in result["rows"]:
        assert all(row[name] > 0 for name in ("trace", "lower", "compile", "first_run", "second_run"))
    assert "prefill:16:1" in done.stdout
