"""Decode speed of the demo model on this CPU: transformers, plain decoding, n-gram speculation, in one run.

    python benchmarks/cpu_smollm2.py [--repeats 3] [--json benchmarks/results/cpu_smollm2.json]

float32, the same threads for all, medians of the repeats, which alternate between the engines. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import jax

import jaxspec
from jaxspec.benchmarking.records import write_rows
from jaxspec.hub import demo_file

PROMPT = """Correct the grammar of this text and write it out again:
The library opens at nine in the morning and closes at six in the evening. Every student can borrow five books at a time and \
keep it for two weeks. If a book is returned late, the student has to pay a small fee. On Saturdays, the library also offers \
free lessons for people who wants to learn how to use a computer."""


def transformers_decoder(ids: list[int], new_tokens: int):
    """A function that decodes `new_tokens` greedily with transformers and returns (tokens, decode seconds)."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count())
    file = demo_file("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()

    @torch.inference_mode()
    def decode() -> tuple[list[int], float]:
        out = model(torch.tensor([ids]), use_cache=True)
        token, cache, tokens = out.logits[0, -1].argmax(), out.past_key_values, []
        start = time.perf_counter()
        for _ in range(new_tokens):
            tokens.append(int(token))
            out = model(token.view(1, 1), past_key_values=cache, use_cache=True)
            token, cache = out.logits[0, -1].argmax(), out.past_key_values
        return tokens, time.perf_counter() - start

    return decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    params = jaxspec.load("smollm2-135m", dtype="float32")
    ids = params.tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}])
    reference = transformers_decoder(ids, args.new_tokens)

    def ours(**options):
        def decode() -> tuple[list[int], float]:
            result = jaxspec.generate(params, ids, max_new_tokens=args.new_tokens + 1, **options)
            return result.tokens, result.stats.decode_seconds

        return decode

    engines = {"transformers": reference, "plain": ours(algorithm="none"), "ngram 12": ours(algorithm="ngram")}
    seconds, tokens = {name: [] for name in engines}, {}
    for repeat in range(args.repeats + 1):  # the first one warms up
        for name, decode in engines.items():
            tokens[name], elapsed = decode()
            if repeat:
                seconds[name].append(elapsed)
    speed = {name: args.new_tokens / statistics.median(times) for name, times in seconds.items()}
    equal = all(t[: args.new_tokens] == tokens["transformers"] for t in tokens.values())
    print(f"{'engine':14} {'tokens/s':>9} {'vs transformers':>16} {'vs plain':>9}")
    for name, value in speed.items():
        print(f"{name:14} {value:9.1f} {value / speed['transformers']:15.2f}x {value / speed['plain']:8.2f}x")
    print(f"same tokens: {'yes' if equal else 'NO'}")
    if args.json:
        import torch
        import transformers

        versions = {"jax": jax.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        rows = [{"way": name, "tokens_per_second": value} for name, value in speed.items()]
        write_rows(args.json, rows, versions=versions, same_tokens=equal)


if __name__ == "__main__":
    main()
