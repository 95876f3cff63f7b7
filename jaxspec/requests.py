"""From what a caller says about his prompts to requests: one frozen `Request` a prompt."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.config import ConfigError
from jaxspec.engine.messages import Request
from jaxspec.plain import plain
from jaxspec.prompts import encode_prompts
from jaxspec.sampling import check_request
from jaxspec.sampling_params import SamplingParams

SAMPLING = tuple(f.name for f in dataclasses.fields(SamplingParams))
DEFAULTS = SamplingParams()


def per_prompt(name: str, value: Any, count: int, is_one: bool) -> list:
    """A keyword's value for each prompt: the same for all, or a list with one each.

    Args:
      name: of the keyword, for the error.
      value: what was given.
      count: prompts.
      is_one: whether it is one value for all prompts.

    Raises:
      ConfigError: a list of another length.
    """
    if is_one:
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise ConfigError(f"{name} is a list of {len(values)} values, but there are {count} prompts: {name}={value!r}")
    return values


def is_list(value: Any) -> bool:
    """Whether a value is a list of something, not a string or a mapping."""
    return isinstance(value, list | tuple | np.ndarray) and getattr(value, "ndim", 1) > 0


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """`value` as an int. Raises ConfigError unless it is a whole number of at least `least` and at most `most`."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        bound = "" if most is None else f" and at most {most}"
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}{bound}")
    return int(value)


def stop_strings(value: Any) -> tuple[str, ...]:
    """One prompt's stop strings. Raises ConfigError for anything but non-empty strings."""
    strings = (value,) if isinstance(value, str) else tuple(value or ())
    if any(not isinstance(s, str) or not s for s in strings):
        raise ConfigError(f"stop={value!r} must be a non-empty string or a list of them")
    return strings


def token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    """One prompt's stop token ids. Raises ConfigError for anything but ids of the vocabulary."""
    ids = list(value) if isinstance(value, Iterable) else [] if value is None else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < vocab_size:
            raise ConfigError(f"stop_token_ids={value!r}: {i!r} is no token id; the vocabulary has ids 0 to {vocab_size - 1}")
    return tuple(int(i) for i in ids)


def sampling_of(count: int, sampling: Any, keywords: Mapping[str, Any]) -> list[SamplingParams]:
    """Every prompt's `SamplingParams`, with a seed.

    Args:
      count: prompts.
      sampling: `SamplingParams`, a list with one each, or None: then `keywords` say it.
      keywords: every field of `SamplingParams` as given: one value for all, or a list with one each.

    Raises:
      ConfigError: a value out of its range, both ways used at once, or a list of another length.
    """
    if sampling is not None:
        changed = [n for n in SAMPLING if n != "seed" and given(keywords[n], getattr(DEFAULTS, n))]
        if changed:
            raise ConfigError(f"sampling=… was given, and {changed[0]}={keywords[changed[0]]!r} as well: say it in one place")
        made = per_prompt("sampling", sampling, count, isinstance(sampling, SamplingParams))
        for one in made:
            if not isinstance(one, SamplingParams):
                raise ConfigError(f"sampling={one!r} must be a jaxspec.SamplingParams, or a list with one for each prompt")
        seeds = per_prompt("seed", keywords["seed"], count, not is_list(keywords["seed"]))
        made = [s if seed is None else dataclasses.replace(s, seed=seed) for s, seed in zip(made, seeds, strict=True)]
    else:
        columns = []
        for name in SAMPLING:
            value = keywords[name]
            if name == "logit_bias":
                column = per_prompt(name, value, count, not holds_biases(value))
                columns.append([() if v is None else v for v in column])
            elif name == "seed" and is_list(value) and len(value) != count:
                raise ConfigError(f"{len(value)} seeds were given for {count} prompts")
            else:
                columns.append(per_prompt(name, value, count, not is_list(value)))
        made = [SamplingParams(**dict(zip(SAMPLING, values, strict=True))) for values in zip(*columns, strict=True)]
    return [dataclasses.replace(s, seed=secrets.randbits(31)) if s.seed is None else s for s in made]


def holds_biases(value: Any) -> bool:
    """Whether a logit_bias is a list with one for each prompt (mappings, lists of pairs, None), not one for all."""
    return is_list(value) and any(
        v is None or isinstance(v, Mapping) or (is_list(v) and (not len(v) or is_list(v[0]))) for v in value
    )


def given(value: Any, default: Any) -> bool:
    """Whether a keyword differs from its default."""
    if is_list(value) or isinstance(value, Mapping):
        return len(value) > 0
    return value is not None and value != default


def build_requests(
    params,
    prompt,
    *,
    chat: bool | str | Sequence = "auto",
    max_new_tokens: int | Sequence[int] = 128,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    stop: Any = None,
    stop_token_ids: Any = None,
    ignore_eos: bool | Sequence[bool] = False,
    **keywords: Any,
) -> tuple[list[Request], bool]:
    """Requests for one prompt or a batch; arguments as for `jaxspec.generate`, `keywords` being the fields of `SamplingParams`.

    Returns:
      The requests, named "0", "1", …, and whether there was one prompt, not a list.

    Raises:
      ConfigError: a prompt or a parameter that cannot work; the message names it.
    """
    unknown = sorted(set(keywords) - set(SAMPLING))
    if unknown:
        raise TypeError(f"a request has no argument {unknown[0]!r}")
    keywords = {name: plain(keywords.get(name, getattr(DEFAULTS, name))) for name in SAMPLING}
    prompt, max_new_tokens, stop_token_ids, ignore_eos = map(plain, (prompt, max_new_tokens, stop_token_ids, ignore_eos))
    config = params.config
    ids, single = encode_prompts(params, prompt, chat)
    count = len(ids)
    limits = per_prompt("max_new_tokens", max_new_tokens, count, not is_list(max_new_tokens))
    nested = is_list(stop) and any(s is None or is_list(s) for s in stop)
    stops = [stop_strings(s) for s in per_prompt("stop", stop, count, not nested)]
    if any(stops) and params.tokenizer is None:
        raise ConfigError("stop strings need a tokenizer, and this model came without one: use stop_token_ids")
    nested = is_list(stop_token_ids) and any(s is None or is_list(s) for s in stop_token_ids)
    own = per_prompt("stop_token_ids", stop_token_ids, count, not nested)
    stop_ids = [tuple(sorted({*config.stop_token_ids, *token_ids(s, config.vocab_size)})) for s in own]
    ignore = per_prompt("ignore_eos", ignore_eos, count, not is_list(ignore_eos))
    requests = []
    for i, (prompt_ids, one) in enumerate(zip(ids, sampling_of(count, sampling, keywords), strict=True)):
        if len(prompt_ids) >= config.max_positions:
            raise ConfigError(
                f"prompt {i} has {len(prompt_ids)} tokens, but the model's context holds {config.max_positions}: at least one "
                "token must be left for the answer"
            )
        check_request(one, config.vocab_size, stop_ids[i])
        requests.append(
            Request(
                rid=str(i),
                ids=np.asarray(prompt_ids, np.int32),
                sampling=one,
                max_new_tokens=whole_number("max_new_tokens", limits[i], 0),
                stop_ids=stop_ids[i],
                ignore_eos=bool(ignore[i]),
                stop=stops[i],
            )
        )
    return requests, single
