"""What generation gives back: text, tokens and statistics."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxspec.viz import result_html


@dataclass(frozen=True)
class Stats:
    """How a generation went.

    Attributes:
      algorithm: the drafter that was used.
      num_steps, topk, num_draft_tokens: the tree it drafted (None where the algorithm has no such parameter).
      prompt_tokens, completion_tokens: tokens in and out.
      rounds: draft-and-verify rounds.
      accept_length: tokens emitted by rounds / rounds: bonus tokens in, the prefill's token out. 1.0 for plain decoding.
      tokens_per_pass: tokens emitted by rounds / passes of the target: accept_length, but half of it for UNO, whose rounds
        run the target twice.
      accepted: drafts that were emitted.
      proposed: drafts that were proposed.
      accept_by_depth: share of rounds that emitted a draft at depth 1, 2, …
      accepted_histogram: entry i counts rounds that emitted exactly i drafts.
      prefill_seconds: from the call until every prompt of the batch had its first token, compilation apart.
      decode_seconds: from then until every answer of the batch was known, compilation apart.
      compile_seconds: compilation during this call; 0 once the programs are known.
      tokens_per_second: tokens emitted by rounds / decode_seconds.
      time_to_first_token: seconds from the call until the first token was known on the host, compilation apart.
      end_to_end_seconds: from the call until the answer was known, compilation apart.
      cached_tokens: prompt tokens whose keys and values an earlier request had left.
      num_retractions: how often the request lost its pages to others and was taken up again.
    """

    algorithm: str = "NONE"
    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    accept_length: float = 1.0
    tokens_per_pass: float = 1.0
    accepted: int = 0
    proposed: int = 0
    accept_by_depth: tuple[float, ...] = ()
    accepted_histogram: tuple[int, ...] = ()
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    tokens_per_second: float = 0.0
    time_to_first_token: float = 0.0
    end_to_end_seconds: float = 0.0
    cached_tokens: int = 0
    num_retractions: int = 0

    def to_json(self) -> dict:
        """Plain JSON types under the same names."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        tree = "/".join(str(v) for v in (self.num_steps, self.topk, self.num_draft_tokens) if v is not None)
        lines = [
            ("algorithm", f"{self.algorithm} {tree}".strip()),
            ("tokens", f"{self.prompt_tokens} in, {self.completion_tokens} out, {self.rounds} rounds"),
            ("accept length", f"{self.accept_length:.2f} tokens a round"),
        ]
        if self.tokens_per_pass != self.accept_length:
            lines.append(("per pass", f"{self.tokens_per_pass:.2f} tokens a pass of the target"))
        if self.proposed:
            by_depth = " ".join(f"{share:.0%}" for share in self.accept_by_depth)
            lines.append(("drafts", f"{self.accepted} of {self.proposed} proposed were accepted; by depth {by_depth}"))
        lines.append(("decoding", f"{self.tokens_per_second:.1f} tokens/s ({self.decode_seconds:.2f} s)"))
        compiling = f", compiling {self.compile_seconds:.1f} s" if self.compile_seconds else ""
        lines.append(("first token", f"{self.time_to_first_token:.2f} s (prefill {self.prefill_seconds:.2f} s{compiling})"))
        return "\n".join(f"{name:>14}: {value}" for name, value in lines)


@dataclass(frozen=True, repr=False)
class GenerationResult:
    """One answer.

    Attributes:
      text: the new text without the stop; None for a model without a tokenizer.
      tokens: the new token ids, a stop id included.
      finish_reason: "stop", "length" or "abort".
      stats: see `Stats`.
      from_draft: for each token, whether a draft proposed it (else the target alone chose it).
      tokenizer: the model's, or None.
      rid: the request's name.
      matched_stop: the stop id or stop string that ended it; None otherwise.
    """

    text: str | None
    tokens: list[int]
    finish_reason: str
    stats: Stats
    from_draft: list[bool] = field(default_factory=list)
    tokenizer: Any = field(default=None, compare=False)
    rid: str = ""
    matched_stop: int | str | None = None

    @property
    def pieces(self) -> list[str]:
        """Each token's text, for display; empty without a tokenizer."""
        if self.tokenizer is None:
            return []
        return [self.tokenizer.decode([t], skip_special_tokens=False) for t in self.tokens]

    def __repr__(self) -> str:
        shown = self.text if self.text is not None else f"{self.tokens}"
        return f"{shown}\n[{self.finish_reason}]\n{self.stats}"

    def _repr_html_(self) -> str:
        return result_html(self)


@dataclass(frozen=True)
class StreamChunk:
    """A piece of one answer.

    Attributes:
      index: which prompt of the batch it belongs to.
      text: new text ("" while a character or a possible stop string is incomplete); None without a tokenizer.
      tokens: new token ids.
      result: the whole answer, on the last chunk only.
      from_draft: which of the tokens a draft proposed.
    """

    index: int
    text: str | None
    tokens: list[int]
    result: GenerationResult | None = None
    from_draft: list[bool] = field(default_factory=list)


def acceptance(
    from_draft: np.ndarray, round_of: np.ndarray, proposed_upto: np.ndarray, max_drafts: int, target_passes: int = 1
) -> dict[str, int | float | tuple]:
    """Acceptance statistics of one sequence from its token log, whatever cut it.

    Args:
      from_draft, round_of, proposed_upto: what `RoundState` recorded for each output token that was kept.
      max_drafts: most drafts that a round can accept.
      target_passes: how often a round runs the target.
    """
    in_rounds = round_of > 0
    rounds = int(round_of[-1]) if len(round_of) else 0
    accept_length = float(in_rounds.sum() / rounds) if rounds else 1.0
    drafts = np.bincount(round_of[from_draft & in_rounds], minlength=rounds + 1)[1 : rounds + 1]
    histogram = np.bincount(drafts, minlength=max_drafts + 1)
    reached = [float((drafts > depth).mean()) if rounds else 0.0 for depth in range(max_drafts)]
    while reached and reached[-1] == 0.0:
        reached.pop()
    return {
        "rounds": rounds,
        "accept_length": accept_length,
        "tokens_per_pass": accept_length / target_passes if rounds else 1.0,
        "accepted": int(drafts.sum()),
        "proposed": int(proposed_upto[-1]) if len(proposed_upto) else 0,
        "accept_by_depth": tuple(reached),
        "accepted_histogram": tuple(int(n) for n in histogram),
    }


def result_of(
    request: Any,
    answer: Any,
    drafter: Any,
    spec: Any,
    tokenizer: Any,
    *,
    first: float,
    all_first: float,
    ended: float,
    all_ended: float,
    compile_seconds: float = 0.0,
    cached_tokens: int = 0,
    num_retractions: int = 0,
) -> GenerationResult:
    """The result of an answer that has ended.

    Args:
      request, answer: the `engine.messages.Request` and the `engine.text.Answer`.
      drafter, spec: what drafted, and its resolved parameters.
      tokenizer: the model's, or None.
      first, all_first: seconds from the call until the answer's first token and those of all answers of its batch were known,
        compilation apart.
      ended, all_ended: the same for their last tokens.
      compile_seconds, cached_tokens, num_retractions: see `Stats`.
    """
    from_draft, round_of, proposed_upto = answer.log()
    decode_seconds = max(all_ended - all_first, 0.0)
    in_rounds = int((round_of > 0).sum())
    stats = Stats(
        algorithm=drafter.name,
        num_steps=spec.num_steps,
        topk=spec.topk,
        num_draft_tokens=spec.num_draft_tokens,
        prompt_tokens=len(request.ids),
        completion_tokens=len(answer.tokens),
        prefill_seconds=all_first,
        decode_seconds=decode_seconds,
        compile_seconds=compile_seconds,
        tokens_per_second=in_rounds / decode_seconds if decode_seconds else 0.0,
        time_to_first_token=first,
        end_to_end_seconds=ended,
        cached_tokens=cached_tokens,
        num_retractions=num_retractions,
        **acceptance(from_draft, round_of, proposed_upto, drafter.max_accept - 1 - drafter.num_exact, drafter.target_passes),
    )
    return GenerationResult(
        text=answer.text,
        tokens=answer.tokens,
        finish_reason=answer.reason or "length",
        stats=stats,
        from_draft=from_draft.tolist(),
        tokenizer=tokenizer,
        rid=request.rid,
        matched_stop=answer.matched_stop,
    )
