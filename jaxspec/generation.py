"""`generate` and `stream`: from prompts to answers. Prefill and rounds run on the device, text handling here."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ConfigError, SpecConfig
from jaxspec.drafters import registry
from jaxspec.drafters.base import Drafter
from jaxspec.fused_attention import Implementation
from jaxspec.kvcache import PageAllocator, PagedKVCache, init_layers, pages_for
from jaxspec.prefill import prefill_attention, prefill_chunks
from jaxspec.prompts import encode_prompts
from jaxspec.results import GenerationResult, Stats, acceptance
from jaxspec.round import Program, RoundState, prefill_chunk, run_rounds
from jaxspec.runtime import available_bytes, compiled, use_compilation_cache
from jaxspec.sampling import SamplingParams, row_keys, sampling_state
from jaxspec.stops import cut_at_stop_string, stable_text

UNBOUNDED = 2**30
STREAM_ROUNDS = 8


class PoolTooLarge(ConfigError):
    """The KV pool does not fit into the memory that is left."""


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """A piece of one answer.

    Attributes:
      index: which prompt of the batch it belongs to.
      text: new text ("" while a character or a possible stop string is incomplete); None without a tokenizer.
      tokens: new token ids.
      result: the whole answer, on the last chunk only.
    """

    index: int
    text: str | None
    tokens: list[int]
    result: GenerationResult | None = None


def bucket(length: int) -> int:
    """A length rounded up so that few distinct programs are compiled: to 128s, from 1024 on to 512s."""
    step = 128 if length <= 1024 else 512
    return -(-length // step) * step


@dataclasses.dataclass
class Session:
    """One batch under way: the device state, the compiled programs' arguments and the clock."""

    params: Any
    draft_tree: Any
    program: Program
    spec: SpecConfig
    state: RoundState
    prompts: list[list[int]]
    chunks: tuple[int, int]  # tokens of the first prefill program and of later ones
    allocator: PageAllocator
    pages: list[list[int]]
    fresh: Implementation | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0

    def prefill(self) -> None:
        """Takes in all prompts; every sequence has its first token then."""
        start = time.perf_counter()
        compiling = 0.0
        first, later = self.chunks
        for offset in (0, *range(first, max(map(len, self.prompts)), later)):
            static = {"program": self.program, "chunk": later if offset else first, "fresh": None if offset else self.fresh}
            args = (self.params.tree, self.draft_tree, self.state, jnp.int32(offset))
            program, seconds = compiled(prefill_chunk, *args, **static)
            compiling += seconds
            self.state = program(*args)
        jax.block_until_ready(self.state.tokens)
        self.compile_seconds += compiling
        self.prefill_seconds += time.perf_counter() - start - compiling

    def run(self, rounds: int = UNBOUNDED) -> None:
        """Runs rounds on the device until all sequences are done, at most `rounds`."""
        args = (self.params.tree, self.draft_tree, self.state, jnp.int32(rounds))
        program, seconds = compiled(run_rounds, *args, program=self.program)
        self.compile_seconds += seconds
        start = time.perf_counter()
        self.state = program(*args)
        jax.block_until_ready(self.state.tokens)
        self.decode_seconds += time.perf_counter() - start

    def finish(self, row: int) -> None:
        """Ends a sequence from outside (a stop string was found)."""
        self.state = dataclasses.replace(self.state, done=self.state.done.at[row].set(True))

    def release(self) -> None:
        """Gives all pages back."""
        for pages in self.pages:
            self.allocator.release(pages)
        self.pages = []


def check_pool(needed: int, what: str) -> None:
    """Raises PoolTooLarge unless `needed` bytes are free; the message says what to turn."""
    there = available_bytes()
    if there is not None and needed > there:
        raise PoolTooLarge(
            f"the KV pool needs {needed:,} bytes, {there:,} are available ({what}): lower max_new_tokens or shorten the "
            "prompts, give fewer prompts at once, or use a smaller tree (num_draft_tokens, topk, num_steps)"
        )


def pool_bytes(layers) -> int:
    """Bytes of a pytree of arrays or shapes."""
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(layers) if jnp.issubdtype(x.dtype, jnp.number))


def start(
    params,
    prompts: list[list[int]],
    *,
    draft,
    algorithm: str | Drafter,
    spec: SpecConfig,
    sampling: Sequence[SamplingParams],
    stop_ids: Sequence[Sequence[int]],
    ignore_eos: bool,
    max_new_tokens: int,
    page_size: int,
    prefill_size: int | None,
    attention: str = "auto",
    capacity: int = 0,
) -> Session:
    """Chooses the drafter, lays out the cache and fills the first state.

    Rows have room for `capacity` positions even if these prompts need fewer, so that several batches share one program.

    Raises:
      ConfigError: a parameter cannot work (the message names it), or the pool does not fit (`PoolTooLarge`).
    """
    use_compilation_cache()
    config = params.config
    name, draft = registry.choose(algorithm, params, draft)
    spec = registry.resolve(name, spec, config, draft)
    draft = registry.history(name, params, draft, spec)
    drafter, draft_tree = registry.build(name, params, draft, spec)
    program = Program(config, drafter, spec.accept_threshold_single, spec.accept_threshold_acc, spec.verification)

    lengths = np.array([len(p) for p in prompts], np.int32)
    for i, length in enumerate(lengths):
        if length >= config.max_positions:
            raise ConfigError(
                f"prompt {i} has {length} tokens, but the model's context holds {config.max_positions}: at least one token "
                "must be left for the answer"
            )
    limits = np.minimum(lengths + max_new_tokens, config.max_positions).astype(np.int32)
    batch, max_len = len(prompts), bucket(max(int(limits.max()) + 1, capacity))
    width = pages_for(max_len + drafter.slack, page_size)
    num_pages = 1 + batch * width
    dtype = params.tree["embedder"]["embedding"].dtype

    def target_pools():
        return init_layers(
            config.num_layers, num_pages, page_size, config.num_kv_heads, config.key_head_dim, config.value_head_dim, dtype
        )

    def draft_state():
        return drafter.init(draft_tree, batch, num_pages, page_size, max_len, dtype)

    needed = pool_bytes(jax.eval_shape(target_pools)) + pool_bytes(jax.eval_shape(draft_state))
    tree = f", {drafter.slack} slots for the tree" if drafter.slack > 1 else ""
    check_pool(needed, f"{batch} sequences of {max_len} tokens{tree}")

    allocator = PageAllocator(num_pages)
    pages = [allocator.allocate(pages_for(int(limit) + drafter.slack, page_size)) for limit in limits]
    table = np.zeros((batch, width), np.int32)
    for row, granted in zip(table, pages, strict=True):
        row[: len(granted)] = granted
    tokens = np.zeros((batch, max_len), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    seeds = [secrets.randbits(31) if s.seed is None else s.seed for s in sampling]
    zeros = np.zeros(batch, np.int32)
    state = RoundState(
        cache=PagedKVCache(target_pools(), jnp.asarray(table), jnp.asarray(zeros)),
        draft=draft_state(),
        tokens=jnp.asarray(tokens),
        from_draft=jnp.zeros((batch, max_len), bool),
        round_of=jnp.zeros((batch, max_len), jnp.int32),
        proposed_upto=jnp.zeros((batch, max_len), jnp.int32),
        keys=row_keys(seeds),
        done=jnp.zeros(batch, bool),
        stopped=jnp.zeros(batch, bool),
        prompt_length=jnp.asarray(lengths),
        limit=jnp.asarray(limits),
        rounds=jnp.asarray(zeros),
        proposed=jnp.asarray(zeros),
        sampling=sampling_state(sampling, config.vocab_size, stop_ids, [ignore_eos] * batch),
    )
    state = dataclasses.replace(state, draft=drafter.refresh(state.draft, draft))
    longest = int(lengths.max())
    fresh = prefill_attention(config, dtype, longest, attention)
    chunks = prefill_chunks(longest, batch, fresh is not None) if prefill_size is None else (prefill_size, prefill_size)
    return Session(params, draft_tree, program, spec, state, prompts, chunks, allocator, pages, fresh)


@dataclasses.dataclass
class Answer:
    """What is known of one answer so far, on the host."""

    tokens: list[int]
    text: str | None
    finish_reason: str | None
    from_draft: np.ndarray
    round_of: np.ndarray
    proposed_upto: np.ndarray


def read_answers(session: Session, stop: Sequence[str]) -> list[Answer]:
    """Fetches the state and cuts every answer at its first stop string: the one place where text ends an answer."""
    state, tokenizer = session.state, session.params.tokenizer
    log = jax.device_get(
        (state.tokens, state.from_draft, state.round_of, state.proposed_upto, state.cache.length, state.done, state.stopped)
    )
    answers = []
    for i, prompt in enumerate(session.prompts):
        tokens, from_draft, round_of, proposed, length, done, stopped = (x[i] for x in log)
        begin, end = len(prompt), int(length) + 1
        new = tokens[begin:end].tolist()
        reason = ("stop" if stopped else "length") if done else None
        text = None
        if tokenizer is not None:
            shown = new[:-1] if reason == "stop" else new
            text = tokenizer.decode(shown)
            cut = cut_at_stop_string(tokenizer, shown, text, stop)
            if cut is not None:
                count, text = cut
                new, reason = new[:count], "stop"
        kept = slice(begin, begin + len(new))
        answers.append(Answer(new, text, reason, from_draft[kept], round_of[kept], proposed[kept]))
    return answers


def result_of(session: Session, row: int, answer: Answer, first_token_seconds: float) -> GenerationResult:
    """The final result of one answer."""
    spec = session.spec
    in_rounds, drafter = int((answer.round_of > 0).sum()), session.program.drafter
    stats = Stats(
        algorithm=drafter.name,
        num_steps=spec.num_steps,
        topk=spec.topk,
        num_draft_tokens=spec.num_draft_tokens,
        prompt_tokens=len(session.prompts[row]),
        completion_tokens=len(answer.tokens),
        prefill_seconds=session.prefill_seconds,
        decode_seconds=session.decode_seconds,
        compile_seconds=session.compile_seconds,
        tokens_per_second=in_rounds / session.decode_seconds if session.decode_seconds else 0.0,
        time_to_first_token=first_token_seconds,
        **acceptance(
            answer.from_draft, answer.round_of, answer.proposed_upto, drafter.max_accept - 1 - drafter.num_exact,
            drafter.target_passes,
        ),
    )  # fmt: skip
    tokenizer = session.params.tokenizer
    return GenerationResult(
        text=answer.text,
        tokens=answer.tokens,
        finish_reason=answer.finish_reason or "length",
        stats=stats,
        from_draft=answer.from_draft.tolist(),
        pieces=[] if tokenizer is None else [tokenizer.decode([t], skip_special_tokens=False) for t in answer.tokens],
    )


def prepare(params, prompt, options: dict[str, Any]) -> tuple[Session, bool, tuple[str, ...]]:
    """Checks the options of `generate` and starts a session: (session, single prompt?, stop strings)."""
    max_new_tokens, page_size, chunk = options["max_new_tokens"], options["page_size"], options["prefill_chunk"]
    for name, value in (("max_new_tokens", max_new_tokens), ("page_size", page_size), ("prefill_chunk", chunk)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
    prompts, single = encode_prompts(params, prompt, options["chat"])
    stop = options["stop"]
    stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if any(not isinstance(s, str) or not s for s in stop):
        raise ConfigError(f"stop={options['stop']!r} must be a non-empty string or a list of them")
    if stop and params.tokenizer is None:
        raise ConfigError("stop strings need a tokenizer, and this model came without one: use stop_token_ids")
    seeds = options["seed"]
    seeds = list(seeds) if isinstance(seeds, Sequence) else [seeds] * len(prompts)
    if len(seeds) != len(prompts):
        raise ConfigError(f"{len(seeds)} seeds were given for {len(prompts)} prompts")
    sampling = [
        SamplingParams(
            temperature=options["temperature"], top_k=options["top_k"], top_p=options["top_p"], min_p=options["min_p"],
            repetition_penalty=options["repetition_penalty"], presence_penalty=options["presence_penalty"],
            frequency_penalty=options["frequency_penalty"], seed=seed,
        )
        for seed in seeds
    ]  # fmt: skip
    draft = options["draft"]
    if isinstance(draft, str | Path):
        from jaxspec.loading import load_draft

        draft = load_draft(draft, params)
    given = {n: options[n] for n in ("num_steps", "topk", "num_draft_tokens") if options[n] is not None}
    stop_ids = sorted({*params.config.stop_token_ids, *(options["stop_token_ids"] or ())})
    session = start(
        params, prompts, draft=draft, algorithm=options["algorithm"],
        spec=dataclasses.replace(options["spec"] or SpecConfig(), **given), sampling=sampling,
        stop_ids=[stop_ids] * len(prompts), ignore_eos=options["ignore_eos"], max_new_tokens=max_new_tokens,
        page_size=page_size, prefill_size=chunk, attention=options["prefill_attention"],
    )  # fmt: skip
    return session, single, stop


def generate(
    params,
    prompt,
    *,
    draft=None,
    algorithm: str | Drafter = "auto",
    num_steps: int | None = None,
    topk: int | None = None,
    num_draft_tokens: int | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int | Sequence[int] | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    chat: bool | str = "auto",
    page_size: int = 16,
    prefill_chunk: int | None = None,
    prefill_attention: str = "auto",
    spec: SpecConfig | None = None,
) -> GenerationResult | list[GenerationResult]:
    """Answers one prompt or a batch, speculating with `draft`; the output is what the target alone would have given.

    Args:
      params: the target, from `jaxspec.load`.
      prompt: a string, a message list (dicts with role and content) or token ids; or a list of any of these: a batch. Text
        goes through the model's chat template when it has one; token ids are fed as they are.
      draft: a loaded draft or smaller model, a path or hub id of one, or an `NgramHistory`; None takes a draft that came
        with `params`.
      algorithm: SGLang's name in any case ("ngram", "STANDALONE", "none", …), "auto", or a `jaxspec.drafters.base.Drafter`,
        whose parameter tree is then the draft.
      num_steps, topk, num_draft_tokens: the tree; all three or none, but NGRAM takes num_draft_tokens alone.
      max_new_tokens: tokens per answer; fewer where the model's context ends.
      temperature: 0 is greedy.
      top_k, top_p, min_p: sampling filters, in this order; -1, 1.0 and 0.0 switch them off.
      repetition_penalty, presence_penalty, frequency_penalty: as in SGLang; drafted ancestors of a node count too, so that
        penalised greedy output equals plain decoding.
      seed: one for all prompts or one for each; a prompt's numbers depend on its seed alone, not on the batch. None
        draws one for each prompt.
      stop: strings that end an answer; they are not part of `text`.
      stop_token_ids: ids that end an answer, besides the model's own.
      ignore_eos: run on past stop ids.
      chat: True or False instead of "auto": whether text goes through the chat template.
      page_size: positions per KV page.
      prefill_chunk: prompt tokens per prefill program; None chooses.
      prefill_attention: how a prompt's first chunk attends: "paged" (our kernel, over the pages), "cudnn" or "xla" (over the
        chunk alone). "auto": cuDNN for long prompts where it serves the model and a trial has shown that it works.
      spec: everything else about the speculation; num_steps, topk and num_draft_tokens above win over it.

    Returns:
      One `GenerationResult` for one prompt, a list for a batch.

    Raises:
      ConfigError: a parameter, a prompt or a combination cannot work; the message names it.
    """
    options = dict(locals())
    session, single, stop = prepare(options.pop("params"), options.pop("prompt"), options)
    session.prefill()
    first = session.prefill_seconds + session.compile_seconds
    answers = read_answers(session, stop) if stop else None
    while answers is None or any(a.finish_reason is None for a in answers):
        for row, answer in enumerate(answers or ()):
            if answer.finish_reason is not None:
                session.finish(row)
        session.run(STREAM_ROUNDS if stop else UNBOUNDED)
        answers = read_answers(session, stop)
    results = [result_of(session, i, answer, first) for i, answer in enumerate(answers)]
    remember(draft, session, results)
    return results[0] if single else results


def stream(params, prompt, *, rounds_per_chunk: int = 1, **options) -> Iterator[StreamChunk]:
    """`generate` (same options), yielding pieces as they are known: the first token at once, then after every few rounds.

    Args:
      params, prompt: as for `generate`.
      rounds_per_chunk: rounds between two looks at the device; more cost less and arrive later.
      **options: every keyword of `generate`.

    Yields:
      `StreamChunk`; each answer's last chunk carries its result.
    """
    unknown = set(options) - set(generate.__kwdefaults__)
    if unknown:
        raise TypeError(f"stream() got unexpected keywords: {', '.join(sorted(unknown))}")
    session, _, stop = prepare(params, prompt, {**generate.__kwdefaults__, **options})
    session.prefill()
    first = session.prefill_seconds + session.compile_seconds
    sent_tokens, sent_text = [0] * len(session.prompts), [0] * len(session.prompts)
    finished: dict[int, GenerationResult] = {}
    while True:
        for i, answer in enumerate(read_answers(session, stop)):
            if i in finished:
                continue
            over = answer.finish_reason is not None
            text = answer.text
            if text is not None:
                ready = len(text) if over else stable_text(text, stop)
                text, sent_text[i] = text[sent_text[i] : max(ready, sent_text[i])], max(ready, sent_text[i])
            tokens, sent_tokens[i] = answer.tokens[sent_tokens[i] :], len(answer.tokens)
            result = None
            if over:
                finished[i] = result = result_of(session, i, answer, first)
                session.finish(i)
            if tokens or text or over:
                yield StreamChunk(i, text, tokens, result)
        if len(finished) == len(session.prompts):
            break
        session.run(rounds_per_chunk)
    remember(options.get("draft"), session, [finished[i] for i in sorted(finished)])


def remember(draft, session: Session, results: list[GenerationResult]) -> None:
    """Hands finished texts to a draft that learns from them (`NgramHistory`)."""
    if hasattr(draft, "insert"):
        for prompt, result in zip(session.prompts, results, strict=True):
            draft.insert([*prompt, *result.tokens])
