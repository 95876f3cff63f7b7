"""``python -m jaxspec.bench``: a round by parts, decoding, prefill, speculation on against off, and sweeps."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from jaxspec import cli
from jaxspec.config import ConfigError, SpecConfig
from jaxspec.drafters.kinds import KINDS
from jaxspec.engine.sizes import PREFILL_ATTENTION


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = argparse.ArgumentParser(
        prog="python -m jaxspec.bench",
        description="Measures speculative decoding on this machine.",
        epilog="Example: python -m jaxspec.bench round --target llama-3.1-8b --draft eagle3 --num-steps 3 --topk 1",
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="round|decode|prefill|compare|sweep")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument(
            "--target",
            "--model",
            default=None,
            help="a checkpoint (as for jaxspec.load), or with random weights one of llama-3.1-8b, llama-1b, "
            "qwen3-8b, smollm2-135m, tiny",
        )
        sub.add_argument(
            "--weights",
            choices=("auto", "random", "real"),
            default="auto",
            help="random weights of a built-in shape, or a checkpoint; auto: random where --target is the name of "
            "a built-in shape (default: auto)",
        )
        sub.add_argument("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU, bfloat16 on a GPU)")
        sub.add_argument("--json", type=Path, help="write the results to this file")
        return sub

    def drafts(sub: argparse.ArgumentParser) -> None:
        known = ", ".join(kind.head for kind in KINDS.values() if kind.head is not None and kind.example is not None)
        text = f"a draft checkpoint, or with random weights one of {known}, or a model as for --target"
        sub.add_argument("--draft", help=text)
        sub.add_argument("--algorithm", default="auto", help="auto, none, ngram, eagle3, … (default: auto: by the draft)")

    def answers(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--prompts", help="JSONL with 'turns' or 'prompt' in each line; without it random token ids")
        sub.add_argument("--prompt-length", type=int, default=128, help="tokens of a random prompt (default: 128)")
        sub.add_argument("--limit", type=int, default=16, help="prompts at most (default: 16)")
        sub.add_argument("--max-new-tokens", type=int, default=128, help="tokens per answer (default: 128)")

    p_round = command("round", "One round by parts: milliseconds, bytes, share of the memory floor.")
    drafts(p_round)
    p_round.add_argument("--suite", choices=("peer",), help="a list of rounds instead of one: every row of the peer table")
    p_round.add_argument("--rows", nargs="+", default=(), metavar="NAME", help="only these rows of the suite")
    p_round.add_argument("--batch", type=int, nargs="+", default=(), help="sequences (default: 1, or the suite's)")
    p_round.add_argument(
        "--context", type=int, nargs="+", default=(), help="committed tokens of each sequence (default: 512, or the suite's)"
    )
    p_round.add_argument(
        "--accept-length",
        type=float,
        default=3.0,
        help="tokens that a round is made to emit on average; 0: as the target does (default: 3)",
    )
    p_round.add_argument(
        "--rounds",
        type=int,
        nargs=2,
        default=(4, 36),
        metavar=("FEW", "MANY"),
        help="the two loop lengths whose difference is timed (default: 4 36)",
    )
    p_round.add_argument("--repeats", type=int, default=5, help="pairs of runs; their median counts (default: 5)")
    p_round.add_argument("--no-parts", action="store_true", help="only the time of the whole round, no profiler")
    p_round.add_argument("--detail", action="store_true", help="list the costliest instructions of every round")
    p_round.add_argument("--resume", action="store_true", help="keep the rows that --json already holds, measure the others")
    p_round.add_argument(
        "--share",
        type=int,
        nargs=2,
        default=(0, 1),
        metavar=("I", "N"),
        help="of the rows only every N-th from the I-th on, counted from 0: one process a GPU",
    )
    p_round.add_argument("--gpus", type=int, default=1, help="a process on each of so many GPUs, which share the suite's rows")
    p_round.add_argument("--budget", type=float, metavar="SECONDS", help="begin no round that would end later than this")
    p_round.add_argument("--page-size", type=int, default=16, help="positions per KV page (default: 16)")
    p_round.add_argument("--bandwidth-bytes", type=int, help="size of the array whose copy is timed")
    cli.add_spec_arguments(p_round)

    p_decode = command("decode", "Tokens per second of real generation, for plain decoding and each algorithm.")
    drafts(p_decode)
    answers(p_decode)
    p_decode.add_argument("--algorithms", nargs="+", help="several instead of --algorithm, e.g. none ngram eagle3")
    p_decode.add_argument("--batch", type=int, nargs="+", default=(1,), help="prompts at once (default: 1)")
    cli.add_spec_arguments(p_decode)

    p_prefill = command("prefill", "Time to first token by prompt length.")
    p_prefill.add_argument("--lengths", type=int, nargs="+", default=(128, 1024, 8192), help="prompt lengths in tokens")
    p_prefill.add_argument("--batch", type=int, default=1, help="prompts at once (default: 1)")
    p_prefill.add_argument("--repeats", type=int, default=5, help="the median of so many runs (default: 5)")
    p_prefill.add_argument("--prefill-chunk", type=int, help="prompt tokens per program (default: chosen by length)")
    p_prefill.add_argument(
        "--attention",
        nargs="+",
        default=("auto",),
        choices=PREFILL_ATTENTION,
        help="of a prompt's first chunk; several: one after the other (default: auto)",
    )

    p_compare = command("compare", "Speculation on against off on your prompts; exit status 1 when a greedy answer differs.")
    drafts(p_compare)
    answers(p_compare)
    p_compare.add_argument("--batch", type=int, default=1, help="prompts at once (default: 1)")
    cli.add_spec_arguments(p_compare)

    p_sweep = command("sweep", "The best num_steps, topk and num_draft_tokens for your model and prompts: a CSV, resumable.")
    drafts(p_sweep)
    answers(p_sweep)
    from jaxspec.benchmarking import sweep

    p_sweep.add_argument("--csv", type=Path, required=True, help="the table; settings that it holds are not measured again")
    p_sweep.add_argument("--plot", type=Path, help="a picture of it (needs matplotlib)")
    for name, default in (("batch", (1,)), ("steps", sweep.STEPS), ("topk", sweep.TOPK), ("num-draft-tokens", sweep.NODES)):
        text = f"values to try (default: {cli.typed(default)})"
        p_sweep.add_argument(f"--{name}", type=int, nargs="+", default=default, help=text)
    return p


def need_target(args: argparse.Namespace) -> None:
    """Refuses a command line without a target."""
    from jaxspec.benchmarking import shapes

    if args.target is None:
        raise ConfigError(f"--target is missing: a checkpoint, or one of {', '.join(shapes.MODELS)}")


def load(args: argparse.Namespace, with_draft: bool = True) -> tuple[Any, Any]:
    """Target and draft as the options say; the draft is None when none is named."""
    from jaxspec import loading
    from jaxspec.benchmarking import shapes
    from jaxspec.conversion.pipeline import parse_dtype

    need_target(args)
    random = args.weights == "random" or (args.weights == "auto" and args.target in shapes.MODELS)
    dtype = parse_dtype(args.dtype or loading.default_dtype())
    target = shapes.random_model(args.target, dtype) if random else loading.load(args.target, dtype=args.dtype)
    name = getattr(args, "draft", None) if with_draft else None
    if name is None:
        return target, None
    if args.weights != "real" and (name in shapes.drafts() or (random and name in shapes.MODELS)):
        return target, shapes.random_draft(name, target.config, dtype)
    return target, loading.load_draft(name, target, dtype=args.dtype)


def row_name(algorithm: str, spec: SpecConfig) -> str:
    """What a row is called: "plain", "eagle3 3/1/4", "ngram 16"."""
    tree = [str(v) for v in (spec.num_steps, spec.topk, spec.num_draft_tokens) if v is not None]
    return f"{algorithm.lower()} {'/'.join(tree)}" if tree else "plain"


def check_round(args: argparse.Namespace) -> None:
    """Refuses options of ``bench round`` that contradict each other, before anything large is made."""
    if args.suite is None:
        need_target(args)
    elif args.draft is not None or args.algorithm != "auto":
        raise ConfigError("--suite brings its own drafts: leave --draft and --algorithm out, choose with --rows")
    share, shares = args.share
    if not 0 <= share < shares:
        raise ConfigError(f"--share {share} {shares}: I counts from 0 and must be below N")
    if args.resume and args.json is None:
        raise ConfigError("--resume needs --json: the file that holds what was measured before")
    if args.gpus < 1 or (args.gpus > 1 and (args.suite is None or args.json is None or shares > 1)):
        raise ConfigError(f"--gpus {args.gpus}: several share the rows of --suite into --json, each with a --share of its own")


def run_round(args: argparse.Namespace) -> int:
    """``bench round``."""
    check_round(args)
    if args.gpus > 1:
        return run_many(args)
    from jaxspec import loading
    from jaxspec.benchmarking import report, rounds, suites
    from jaxspec.benchmarking.bandwidth import measure_bandwidth
    from jaxspec.benchmarking.records import read_rows
    from jaxspec.conversion.pipeline import parse_dtype
    from jaxspec.drafters import registry
    from jaxspec.runtime import use_compilation_cache

    use_compilation_cache()
    bandwidth = measure_bandwidth(args.bandwidth_bytes)
    print(report.bandwidth_line(bandwidth), flush=True)
    length = args.accept_length or None
    if args.suite is None:
        target, draft = load(args)
        algorithm, draft = registry.choose(args.algorithm, target, draft)
        spec = registry.resolve(algorithm, cli.spec_from(args), target.config, draft)
        name = row_name(algorithm, spec)
        cases = [
            suites.SuiteCase(rounds.RoundCase(name, algorithm, spec, batch, context, length, args.page_size))
            for batch in args.batch or (1,)
            for context in args.context or (512,)
        ]
        weights = suites.Given(target, draft)
    else:
        found = suites.peer_suite(args.rows, args.batch, args.context)
        change = {"accept_length": length, "page_size": args.page_size}
        cases = [dataclasses.replace(c, case=dataclasses.replace(c.case, **change)) for c in found]
        dtype = parse_dtype(args.dtype or loading.default_dtype())
        weights = suites.Weights(args.target or "llama-3.1-8b", dtype)
    cases = cases[args.share[0] :: args.share[1]]
    kept = read_rows(args.json) if args.resume else []
    held = {(row["name"], row["batch"], row["context"]) for row in kept}
    cases = [c for c in cases if (c.case.name, c.case.batch, c.case.context) not in held]
    save(args.json, kept)
    results = suites.run_suite(
        cases,
        weights,
        bandwidth,
        budget=args.budget,
        path=args.json,
        kept=kept,
        rounds=tuple(args.rounds),
        repeats=args.repeats,
        parts=not args.no_parts,
        detail=print if args.detail else None,
        report=lambda result: print(report.round_report(result) + "\n", flush=True),
        log=lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(report.summary(results))
    return 0 if results or not cases else 1


def run_many(args: argparse.Namespace) -> int:
    """``bench round --gpus``."""
    from jaxspec.benchmarking import report, shares, suites

    rows, status = shares.run_shares(args.arguments, args.gpus, args.json)
    if not rows:  # and what the file holds stays
        return status or 1
    order = {key: i for i, key in enumerate(suites.PEER_ORDER)}
    rows.sort(key=lambda row: order.get((row["name"], row["batch"], row["context"]), len(order)))
    save(args.json, rows)
    print(
        report.table(
            ("round", "batch", "context", "ms"),
            [(row["name"], str(row["batch"]), str(row["context"]), f"{row['ms']:.3f}") for row in rows],
        )
    )
    return status


def prompts_for(args: argparse.Namespace, target: Any) -> list:
    """The prompts that the options name, or random token ids."""
    from jaxspec.benchmarking import decode

    if args.prompts is not None:
        return decode.read_prompts(args.prompts, args.limit)
    return decode.random_prompts(target.config.vocab_size, args.prompt_length, args.limit)


def save(path: Path | None, rows: list[dict]) -> None:
    """Writes results where ``--json`` says."""
    from jaxspec.benchmarking.records import write_rows

    if path is not None:
        write_rows(path, rows)


def run_decode(args: argparse.Namespace) -> int:
    """``bench decode``."""
    from jaxspec.benchmarking import decode, report

    target, draft = load(args)
    prompts, results = prompts_for(args, target), []
    for name in args.algorithms or ("none", args.algorithm):
        plain = name.lower() in ("none", "ngram")
        spec = SpecConfig() if name.lower() == "none" else cli.spec_from(args)
        for batch in args.batch:
            results.append(
                decode.measure_decoding(
                    target,
                    prompts,
                    algorithm=name,
                    draft=None if plain else draft,
                    spec=spec,
                    batch=batch,
                    max_new_tokens=args.max_new_tokens,
                )
            )
            save(args.json, [r.to_json() for r in results])
    rows = [
        (
            r.algorithm,
            r.batch,
            f"{r.tokens_per_second:.1f}",
            f"{r.accept_length:.2f}",
            f"{r.round_ms:.3f}",
            f"{r.first_token_ms:.1f}",
        )
        for r in results
    ]
    print(report.table(("algorithm", "batch", "tokens/s", "accept length", "round ms", "first token ms"), rows))
    return 0


def run_prefill(args: argparse.Namespace) -> int:
    """``bench prefill``."""
    from jaxspec.benchmarking import decode, report

    target, _ = load(args, with_draft=False)
    options = {"batch": args.batch, "repeats": args.repeats, "prefill_chunk": args.prefill_chunk}
    found = []
    for attention in args.attention:
        found += decode.measure_prefill(target, args.lengths, attention=attention, **options)
        save(args.json, found)
    rows = [
        (r["tokens"], r["batch"], r["attention"], f"{r['ms']:.2f}", f"{r['spread_ms']:.2f}", f"{r['compile_seconds']:.1f}")
        for r in found
    ]
    print(report.table(("prompt tokens", "batch", "attention", "first token ms", "spread ms", "compile s"), rows))
    return 0


def run_compare(args: argparse.Namespace) -> int:
    """``bench compare``."""
    from jaxspec.benchmarking import decode, report

    target, draft = load(args)
    prompts = prompts_for(args, target)
    common = {"batch": args.batch, "max_new_tokens": args.max_new_tokens}
    off = decode.measure_decoding(target, prompts, algorithm="none", **common)
    on = decode.measure_decoding(target, prompts, algorithm=args.algorithm, draft=draft, spec=cli.spec_from(args), **common)
    different = [
        (i, at)
        for i, (a, b) in enumerate(zip(on.answers, off.answers, strict=True))
        if (at := decode.first_difference(a.tokens, b.tokens)) is not None
    ]
    rows = [(r.algorithm, f"{r.tokens_per_second:.1f}", f"{r.accept_length:.2f}", f"{r.first_token_ms:.1f}") for r in (off, on)]
    print(report.table(("algorithm", "tokens/s", "accept length", "first token ms"), rows))
    print(f"speed-up in decoding: {on.tokens_per_second / off.tokens_per_second:.2f} x")
    print(f"same tokens: {len(prompts) - len(different)} of {len(prompts)} prompts")
    for prompt, at in different:
        print(f"  prompt {prompt} differs from token {at} on")
    save(args.json, [{**r.to_json(), "different": different} for r in (off, on)])
    return int(bool(different))


def run_sweep(args: argparse.Namespace) -> int:
    """``bench sweep``."""
    from jaxspec.benchmarking import decode, report, sweep

    grid = sweep.settings(args.batch, args.steps, args.topk, args.num_draft_tokens)
    target, draft = load(args)
    if draft is None:
        raise ConfigError("a sweep needs --draft: the tree's parameters shape what a draft proposes")
    prompts = prompts_for(args, target)
    source = args.prompts or f"random {args.prompt_length}"
    setup = f"{args.target}, {args.draft}, {source} x {len(prompts)}, {args.max_new_tokens} tokens, {args.dtype or 'default'}"

    def measure(setting: sweep.Setting) -> dict[str, Any]:
        how: dict[str, Any] = {"algorithm": "none"}
        if not setting.is_plain:
            how = {"algorithm": args.algorithm, "draft": draft, "spec": SpecConfig(*setting[1:])}
        found = decode.measure_decoding(target, prompts, batch=setting.batch_size, max_new_tokens=args.max_new_tokens, **how)
        return {
            "acc_length": found.accept_length,
            "step_time": found.round_ms / 1e3,
            "tokens_per_second": found.tokens_per_second,
            "completion_tokens": found.completion_tokens,
        }

    sweep.run_sweep(args.csv, setup, grid, measure, log=lambda text: print(text, file=sys.stderr))
    rows = sweep.read_rows(args.csv, setup)
    best = [
        (
            batch,
            f"{r['steps']}/{r['topk']}/{r['num_draft_tokens']}",
            f"{r['acc_length']:.2f}",
            f"{r['step_time'] * 1e3:.3f}",
            f"{r['speed']:.1f}",
        )
        for batch, r in sorted(sweep.best(rows).items())
    ]
    print(report.table(("batch", "best setting", "accept length", "round ms", "tokens/s a sequence"), best))
    save(args.json, rows)
    if args.plot is not None:
        sweep.plot(rows, args.plot)
    return 0


COMMANDS = {"round": run_round, "decode": run_decode, "prefill": run_prefill, "compare": run_compare, "sweep": run_sweep}


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    args = parser().parse_args(argv)
    args.arguments = sys.argv[1:] if argv is None else argv
    return COMMANDS[args.command](args)


if __name__ == "__main__":
    cli.run(main)
