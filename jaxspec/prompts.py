"""What a user may call a prompt, turned into token ids."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from jaxspec.config import ConfigError, check_ids


def is_ids(prompt) -> bool:
    """Whether a prompt is a list of token ids."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and np.issubdtype(prompt.dtype, np.integer)
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and all(isinstance(t, int | np.integer) and not isinstance(t, bool) for t in prompt)
    )


def is_chat(prompt) -> bool:
    """Whether a prompt is a message list."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and bool(prompt)
        and all(isinstance(m, Mapping) for m in prompt)
    )


def encode_prompts(params, prompt, chat: bool | str = "auto") -> tuple[list[list[int]], bool]:
    """Token ids of one prompt or a batch, and whether it was one.

    A string, a list of dicts (one chat) and a list of ints are one prompt each; a list of strings, of int lists or of dict
    lists is a batch.

    Raises:
      ConfigError: empty prompts, ids outside the vocabulary, text for a model without a tokenizer, a chat without a
        template, or something that is no prompt.
    """
    if chat not in (True, False, "auto"):
        raise ConfigError(f"chat={chat!r} must be True, False or 'auto'")
    one = isinstance(prompt, str) or is_chat(prompt) or (is_ids(prompt) and len(prompt) > 0)
    batch = [prompt] if one else prompt
    if not isinstance(batch, Sequence | np.ndarray) or len(batch) == 0:
        raise ConfigError("the prompt is empty: give a string, a list of messages, token ids, or a list of these")
    encoded = [encode_one(params, p, chat, i) for i, p in enumerate(batch)]
    return encoded, one


def warn_of_two_bos(ids: list[int], tokenizer, index: int, templated: bool) -> None:
    """Warns of a prompt that begins with BOS twice: models are trained with one, and answer worse behind two."""
    bos = getattr(tokenizer, "bos_id", None)
    if bos is not None and ids[:2] == [bos, bos]:
        who = "the chat template and the message" if templated else "the text and the tokenizer, which puts it in front itself,"
        warnings.warn(
            f"prompt {index} begins with the BOS token {tokenizer.special_tokens['bos_token']!r} twice: {who} have one each; "
            "leave it out of the text, or pass token ids",
            stacklevel=2,
        )


def encode_one(params, prompt, chat: bool | str, index: int) -> list[int]:
    """Token ids of one prompt of a batch."""
    config, tokenizer = params.config, params.tokenizer
    if isinstance(prompt, str) or is_chat(prompt):
        if tokenizer is None:
            raise ConfigError(f"prompt {index} is text, but this model came without a tokenizer: give token ids instead")
        templated = tokenizer.has_chat_template if chat == "auto" else bool(chat)
        if templated and not tokenizer.has_chat_template:
            raise ConfigError("chat=True, but this model has no chat template: use chat=False")
        if is_chat(prompt) and not templated:
            raise ConfigError(f"prompt {index} is a message list, which needs a chat template (and chat=True or 'auto')")
        if templated:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
            ids = tokenizer.apply_chat_template(messages)
        else:
            ids = tokenizer.encode(prompt)
        warn_of_two_bos(ids, tokenizer, index, templated)
    elif is_ids(prompt):
        ids = [int(t) for t in prompt]
    else:
        raise ConfigError(
            f"prompt {index} is a {type(prompt).__name__}: give a string, a list of messages, or a list of token ids"
        )
    if not ids:
        raise ConfigError(f"prompt {index} is empty: at least one token is needed")
    check_ids(ids, config.vocab_size, f"prompt {index}")
    return ids
