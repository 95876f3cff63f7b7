"""XLA's settings for compiling quickly, for pytest and for scripts that run the tests' checks. Imported before jax."""

import importlib.metadata
import os

# Most of the suite's time goes into compiling tiny programs: LLVM's optimiser would be a third of that and changes no result,
# a module per thread costs more than two cores give back, and the fusion emitters of jaxlib 0.10 (0.11 knows no others) take
# three times as long as the ones before them.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", FLAGS)
os.environ.setdefault("JAXSPEC_COMPILATION_CACHE", "0")
# Interpreted warpgroups that wait for each other each hold a thread of XLA's, which has as many as the machine has cores:
# with two they crawl, or wait for ever.
os.environ.setdefault("NPROC", "16")
