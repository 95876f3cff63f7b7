"""`generate` and `stream`: from prompts to answers, on an engine of their own for the length of the call."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxspec.config import MAX_PAGE, MAX_PREFILL, SpecConfig
from jaxspec.drafters.base import Drafter
from jaxspec.engine import kept, sizes
from jaxspec.engine.core import Core
from jaxspec.engine.device import Device
from jaxspec.engine.messages import Failed, Limits, Request, SchedulerConfig
from jaxspec.kvcache import pages_for
from jaxspec.requests import build_requests, whole_number
from jaxspec.results import GenerationResult, StreamChunk, result_of
from jaxspec.runtime import use_compilation_cache
from jaxspec.sampling_params import SamplingParams
from jaxspec.speculation import Speculation
from jaxspec.tokenizer.text import Answer

UNBOUNDED = 2**30
STOP_ROUNDS = 8
"""Rounds between two looks at the text where a stop string may end it."""


class Call:
    """One call of `generate` or `stream`: its requests run to their end on pools that outlive it.

    Iterating yields (index, answer) whenever an answer has grown; its `reason` is set when it has ended.
    """

    def __init__(
        self,
        params,
        requests: Sequence[Request],
        chosen: Speculation,
        *,
        page_size: int,
        prefill_chunk: int | None,
        prefill_attention: str,
        rounds: int,
        begun: float,
    ):
        self.params, self.requests, self.chosen, self.rounds, self.begun = params, requests, chosen, rounds, begun
        self.page_size = page_size
        self.drafter = chosen.program.drafter
        self.answers = [Answer(params.tokenizer, r.ids, r.stop) for r in requests]
        self.first = [0.0] * len(requests)  # seconds from the call to the first token, compilation apart
        self.ended = [0.0] * len(requests)  # and to the last one
        self.compile_seconds = 0.0
        config, slack = params.config, self.drafter.slack
        dtype = params.tree["embedder"]["embedding"].dtype
        positions = [min(len(r.ids) + r.max_new_tokens, config.max_positions) for r in requests]
        self.pages = sum(pages_for(n + slack, page_size) for n in positions)
        self.long = sizes.prefill_attention(config, dtype, prefill_attention)
        self.limits = Limits(
            buckets=sizes.buckets_for(len(requests)),
            **sizes.program_sizes(self.long, prefill_chunk),
            max_len=sizes.capacity_for(max(positions), config.max_positions),
            total_pages=self.pages,
            page_size=page_size,
            max_accept=self.drafter.max_accept,
            slack=slack,
            key_lookahead=self.drafter.key_lookahead,
            separate_blocks=self.drafter.separate_blocks,
        )

    def __iter__(self) -> Iterator[tuple[int, Answer]]:
        """Runs the requests."""
        chosen, index = self.chosen, {r.rid: i for i, r in enumerate(self.requests)}
        with kept.lent(self.params, chosen.draft_tree, chosen.program, page_size=self.page_size, pages=self.pages) as memory:
            limits = dataclasses.replace(self.limits, total_pages=memory.num_pages - 1)
            depth = 1 if sizes.platform() == "cpu" else 2  # on a CPU a launch takes the cores that would prepare the next
            config = SchedulerConfig.closed(self.rounds, depth)
            core = Core(Device(memory, limits, self.long, self.rounds), config, clock=time.perf_counter)
            for request in self.requests:
                core.submit(request)
            left = len(self.requests)
            while left:
                for event in core.step():
                    if isinstance(event, Failed):
                        raise event.error
                    i, answer = index[event.rid], self.answers[index[event.rid]]
                    if answer.reason is not None:
                        continue
                    self.compile_seconds = memory.compile_seconds(self.begun)
                    self.ended[i] = event.at - self.begun - memory.compile_seconds(self.begun, event.at)
                    if not answer.tokens:
                        self.first[i] = self.ended[i]
                    cut = answer.add(event.tokens, event.from_draft, event.round_of, event.proposed_upto, event.reason)
                    if cut is not None and event.reason is None:
                        core.finish(event.rid, cut)
                    left -= answer.reason is not None
                    yield i, answer
        self.learn()

    def learn(self) -> None:
        """Hands finished texts to a draft that learns from them (`NgramHistory`)."""
        if hasattr(self.chosen.draft, "insert"):
            for request, answer in zip(self.requests, self.answers, strict=True):
                self.chosen.draft.insert([*request.ids.tolist(), *answer.tokens])

    def result(self, i: int) -> GenerationResult:
        """The result of an answer that has ended."""
        return result_of(
            self.requests[i],
            self.answers[i],
            self.drafter,
            self.chosen.spec,
            self.params.tokenizer,
            first=self.first[i],
            all_first=max(self.first),
            ended=self.ended[i],
            all_ended=max(self.ended),
            compile_seconds=self.compile_seconds,
        )


def open_call(
    params,
    prompt,
    begun: float,
    rounds: int | None,
    *,
    draft,
    algorithm,
    num_steps,
    topk,
    num_draft_tokens,
    spec,
    page_size,
    prefill_chunk,
    prefill_attention,
    **request: Any,
) -> tuple[Call, bool]:
    """Checks the arguments of `generate` and makes a `Call` of them; `rounds` between two reports, None chooses.

    Returns:
      The call, and whether there was one prompt, not a list.
    """
    use_compilation_cache()
    whole_number("page_size", page_size, 1, MAX_PAGE)
    if prefill_chunk is not None:
        whole_number("prefill_chunk", prefill_chunk, 1, MAX_PREFILL)
    requests, single = build_requests(params, prompt, **request)
    chosen = Speculation.choose(
        params, draft, algorithm, spec, num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens
    )
    if rounds is None:
        rounds = STOP_ROUNDS if any(r.stop for r in requests) else UNBOUNDED
    call = Call(
        params,
        requests,
        chosen,
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        prefill_attention=prefill_attention,
        rounds=rounds,
        begun=begun,
    )
    return call, single


def generate(
    params,
    prompt,
    *,
    draft=None,
    algorithm: str | Drafter = "auto",
    num_steps: int | None = None,
    topk: int | None = None,
    num_draft_tokens: int | None = None,
    spec: SpecConfig | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = -1,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    repetition_penalty: float | Sequence[float] = 1.0,
    presence_penalty: float | Sequence[float] = 0.0,
    frequency_penalty: float | Sequence[float] = 0.0,
    min_new_tokens: int | Sequence[int] = 0,
    logit_bias=None,
    seed: int | Sequence[int] | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool | Sequence[bool] = False,
    chat: bool | str = "auto",
    page_size: int = 16,
    prefill_chunk: int | None = None,
    prefill_attention: str = "auto",
) -> GenerationResult | list[GenerationResult]:
    """Answers one prompt or a batch, speculating with `draft`; the output is what the target alone would have given.

    From `max_new_tokens` to `ignore_eos` every argument may be a list with one value for each prompt (`stop`,
    `stop_token_ids` and `logit_bias` a list of lists or mappings).

    Args:
      params: the target, from `jaxspec.load`.
      prompt: a string, a message list (dicts with role and content) or token ids; or a list of any of these: a batch. Text
        goes through the model's chat template when it has one; token ids are fed as they are.
      draft: a loaded draft or smaller model, a path or hub id of one, or an `NgramHistory`; None takes a draft that came
        with `params`.
      algorithm: SGLang's name in any case ("ngram", "STANDALONE", "none", …), "auto", or a `jaxspec.drafters.base.Drafter`,
        whose parameter tree is then the draft.
      num_steps, topk, num_draft_tokens: the tree; all three or none, but NGRAM takes num_draft_tokens alone.
      spec: everything else about the speculation; num_steps, topk and num_draft_tokens above win over it.
      max_new_tokens: tokens per answer; fewer where the model's context ends.
      sampling: `SamplingParams` in place of the arguments from `temperature` to `logit_bias`.
      temperature: 0 is greedy.
      top_k, top_p, min_p: sampling filters, in this order; -1, 1.0 and 0.0 switch them off.
      repetition_penalty, presence_penalty, frequency_penalty: as in SGLang; drafted ancestors of a node count too, so that
        penalised greedy output equals plain decoding.
      min_new_tokens: no stop id is emitted before so many tokens.
      logit_bias: what is added to logits: a mapping, or pairs, of token ids and values.
      seed: one for all prompts or one for each; a prompt's numbers depend on its seed alone, not on the batch. None
        draws one for each prompt.
      stop: strings that end an answer; they are not part of `text`.
      stop_token_ids: ids that end an answer, besides the model's own.
      ignore_eos: run on past stop ids.
      chat: True or False instead of "auto": whether text goes through the chat template.
      page_size: positions per KV page.
      prefill_chunk: prompt positions that a row of a prefill program takes in; None chooses.
      prefill_attention: how the beginning of a long prompt attends: "paged" (our kernel, over the pages), "cudnn" or "xla"
        (over the chunk alone). "auto": cuDNN where it serves the model and a trial has shown that it works.

    Returns:
      One `GenerationResult` for one prompt, a list for a batch.

    Raises:
      ConfigError: a parameter, a prompt or a combination cannot work; the message names it.
      NotANumber: the model's activations for a prompt became NaN; the message names its index.
    """
    call, single = open_call(
        params,
        prompt,
        time.perf_counter(),
        None,
        draft=draft,
        algorithm=algorithm,
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=num_draft_tokens,
        spec=spec,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        min_new_tokens=min_new_tokens,
        logit_bias=logit_bias,
        seed=seed,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        chat=chat,
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        prefill_attention=prefill_attention,
    )
    for _ in call:
        pass
    results = [call.result(i) for i in range(len(call.requests))]
    return results[0] if single else results


def stream(
    params,
    prompt,
    *,
    rounds_per_chunk: int = 1,
    draft=None,
    algorithm: str | Drafter = "auto",
    num_steps: int | None = None,
    topk: int | None = None,
    num_draft_tokens: int | None = None,
    spec: SpecConfig | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = -1,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    repetition_penalty: float | Sequence[float] = 1.0,
    presence_penalty: float | Sequence[float] = 0.0,
    frequency_penalty: float | Sequence[float] = 0.0,
    min_new_tokens: int | Sequence[int] = 0,
    logit_bias=None,
    seed: int | Sequence[int] | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool | Sequence[bool] = False,
    chat: bool | str = "auto",
    page_size: int = 16,
    prefill_chunk: int | None = None,
    prefill_attention: str = "auto",
) -> Iterator[StreamChunk]:
    """`generate` (same arguments), yielding pieces as they are known: the first token at once, then after every few rounds.

    Arguments are checked here, at the call; what comes back is an iterator that may be left at any time.

    Args:
      rounds_per_chunk: rounds between two looks at the device; more cost less and arrive later.
      params, prompt, and all others: as for `generate`.

    Returns:
      An iterator of `StreamChunk`; each answer's last chunk carries its result.

    Raises:
      ConfigError: as `generate`.
    """
    call, _ = open_call(
        params,
        prompt,
        time.perf_counter(),
        whole_number("rounds_per_chunk", rounds_per_chunk, 1),
        draft=draft,
        algorithm=algorithm,
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=num_draft_tokens,
        spec=spec,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        min_new_tokens=min_new_tokens,
        logit_bias=logit_bias,
        seed=seed,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        chat=chat,
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        prefill_attention=prefill_attention,
    )
    return chunks(call)


def chunks(call: Call) -> Iterator[StreamChunk]:
    """A call's answers in pieces."""
    for i, answer in call:
        piece, over = answer.piece(), answer.reason is not None
        if piece.tokens or piece.text or over:
            yield StreamChunk(i, piece.text, piece.tokens, call.result(i) if over else None, piece.from_draft)
