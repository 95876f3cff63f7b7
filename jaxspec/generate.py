"""``python -m jaxspec.generate``: answers a prompt on the command line, streaming, with statistics."""

from __future__ import annotations

import argparse
import json
import sys

from jaxspec import cli
from jaxspec.config import ConfigError


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = argparse.ArgumentParser(
        prog="python -m jaxspec.generate",
        description="Answers a prompt with speculative decoding: the same tokens as plain decoding, sooner.",
        epilog='Example: python -m jaxspec.generate --model smollm2-135m --prompt "Why is the sky blue?" --compare',
    )
    p.add_argument(
        "--model", "--model-path", required=True, help="converted folder, HF folder, GGUF file, hub id or smollm2-135m"
    )
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help='the prompt; "-" reads it from standard input')
    source.add_argument("--prompt-file", help="a text file that holds the prompt")
    source.add_argument("--token-ids", help="the prompt as token ids, separated by commas or spaces")
    p.add_argument("--raw", action="store_true", help="feed the text as it is, without the model's chat template")
    p.add_argument("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU, bfloat16 on a GPU)")
    p.add_argument(
        "--algorithm",
        "--speculative-algorithm",
        default="auto",
        help="auto, none, ngram, standalone, … (default: auto: by the draft, else n-grams)",
    )
    p.add_argument(
        "--draft",
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        help="a draft checkpoint, or a smaller model with the same vocabulary",
    )
    p.add_argument("--max-new-tokens", type=int, default=128, help="tokens in the answer at most (default: 128)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    p.add_argument("--top-k", type=int, default=-1, help="sample among the k most probable tokens (default: all)")
    p.add_argument("--top-p", type=float, default=1.0, help="sample within this probability mass (default: 1)")
    p.add_argument("--min-p", type=float, default=0.0, help="drop tokens below this share of the best one's probability")
    p.add_argument("--repetition-penalty", type=float, default=1.0, help="in (0, 2]; 1 is none")
    p.add_argument("--presence-penalty", type=float, default=0.0, help="in [-2, 2]; 0 is none")
    p.add_argument("--frequency-penalty", type=float, default=0.0, help="in [-2, 2]; 0 is none")
    p.add_argument("--min-new-tokens", type=int, default=0, help="no stop id before so many tokens (default: 0)")
    p.add_argument("--logit-bias", nargs="+", type=bias, metavar="ID=VALUE", help="added to the logits of these token ids")
    p.add_argument("--seed", type=int, help="random seed of sampled answers (default: a fresh one)")
    p.add_argument("--stop", action="append", help="a string that ends the answer; may be given several times")
    p.add_argument("--stop-token-ids", type=int, nargs="+", help="further token ids that end the answer")
    p.add_argument("--ignore-eos", action="store_true", help="run on to --max-new-tokens past stop ids")
    p.add_argument("--page-size", type=int, default=16, help="positions per KV page (default: 16)")
    p.add_argument("--prefill-chunk", type=int, help="prompt tokens per prefill program (default: chosen by length)")
    p.add_argument(
        "--compare",
        action="store_true",
        help="run with and without speculation after a warm-up, print both speeds and whether the tokens are "
        "equal; exit status 1 when a greedy answer differs",
    )
    p.add_argument("--json", action="store_true", help="one JSON object on standard output, everything else on standard error")
    cli.add_spec_arguments(p)
    return p


def bias(text: str) -> tuple[int, float]:
    """``ID=VALUE`` as a pair."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must read ID=VALUE, as in 42=-5.0") from None


def read_prompt(args: argparse.Namespace) -> str | list[int]:
    """The prompt from wherever the options say."""
    if args.token_ids is not None:
        try:
            return [int(t) for t in args.token_ids.replace(",", " ").split()]
        except ValueError:
            raise ConfigError(f"--token-ids {args.token_ids!r} must be whole numbers, separated by commas or spaces") from None
    if args.prompt_file is not None:
        with open(args.prompt_file, encoding="utf-8") as f:
            return f.read()
    return sys.stdin.read() if args.prompt == "-" else args.prompt


def stream_answer(jaxspec, params, prompt, options: dict, out):
    """Prints an answer as it comes and returns its result."""
    for chunk in jaxspec.stream(params, prompt, **options):
        print(f" {' '.join(map(str, chunk.tokens))}" if chunk.text is None else chunk.text, end="", file=out, flush=True)
        if chunk.result is not None:
            print(file=out)
            return chunk.result
    raise AssertionError("a stream ends with a result")


def compare(jaxspec, params, prompt, options: dict, out) -> tuple[object, object]:
    """Runs an answer with and without speculation, each once to warm up and once to measure."""
    plain = {**options, "algorithm": "none", "draft": None, "spec": None}
    runs = []
    for label, chosen in (("with speculation", options), ("without", plain)):
        print(f"[{label}: warm-up, then the measured run]", file=out, flush=True)
        jaxspec.generate(params, prompt, **chosen)
        runs.append(jaxspec.generate(params, prompt, **chosen))
    return runs[0], runs[1]


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    args = parser().parse_args(argv)
    prompt = read_prompt(args)
    import jaxspec

    out = sys.stderr if args.json else sys.stdout
    params = jaxspec.load(args.model, dtype=args.dtype)
    wanted = None if args.algorithm.lower() == "auto" else args.algorithm
    draft = None if args.draft is None else jaxspec.load_draft(args.draft, params, algorithm=wanted, dtype=args.dtype)
    options = {
        "draft": draft,
        "algorithm": args.algorithm,
        "spec": cli.spec_from(args),
        "chat": False if args.raw else "auto",
        **{
            name: getattr(args, name)
            for name in (
                "max_new_tokens",
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
                "min_new_tokens",
                "logit_bias",
                "seed",
                "stop",
                "stop_token_ids",
                "ignore_eos",
                "page_size",
                "prefill_chunk",
            )
        },
    }
    if args.compare:
        result, plain = compare(jaxspec, params, prompt, options, out)
        print(result.text if result.text is not None else result.tokens, file=out)
    else:
        result, plain = stream_answer(jaxspec, params, prompt, options, out), None
    print(f"\n{result.stats}", file=out)
    report = {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_json(),
    }
    status = 0
    if plain is not None:
        equal = result.tokens == plain.tokens
        speedup = result.stats.tokens_per_second / plain.stats.tokens_per_second if plain.stats.tokens_per_second else 0.0
        print(f"{'plain':>14}: {plain.stats.tokens_per_second:.1f} tokens/s", file=out)
        print(f"{'speed-up':>14}: {speedup:.2f} x in decoding", file=out)
        verdict = "yes" if equal else "no" if args.temperature == 0 else "no (sampled: only the distribution is equal)"
        print(f"{'same tokens':>14}: {verdict}", file=out)
        report |= {"plain_stats": plain.stats.to_json(), "equal": equal, "speedup": speedup}
        status = int(not equal and args.temperature == 0)
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
    return status


if __name__ == "__main__":
    cli.run(main)
