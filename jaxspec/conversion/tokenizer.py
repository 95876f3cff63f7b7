"""Text ↔ token ids: the Rust ``tokenizers`` engine, chat templates rendered with jinja2, and streaming decoding.

A tokenizer lives in files: ``tokenizer.json`` (the engine), ``tokenizer_config.json`` (special tokens, maybe the chat
template) and ``chat_template.jinja``. Stop ids are not its business: they come from the model's configuration.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxspec.conversion.chat_template import ChatTemplate
from jaxspec.conversion.errors import ConversionError, reading, shown
from jaxspec.conversion.values import parse_json, said

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
"""What is copied along from a Hugging Face folder; only the first four are read here."""


@dataclass(frozen=True)
class TokenizerFiles:
    """Tokenizer files that exist, or that can be made: name → path, or a function that gives the text."""

    files: Mapping[str, Path | Callable[[], str]]

    @classmethod
    def of_folder(cls, folder: Path) -> TokenizerFiles:
        """The tokenizer files of a folder; there may be none."""
        return cls({name: folder / name for name in FILES if (folder / name).exists()})

    def text(self, name: str) -> str | None:
        """One file's text, or None."""
        entry = self.files.get(name)
        if entry is None:
            return None
        with reading(entry if isinstance(entry, Path) else name):
            return entry.read_text(encoding="utf-8") if isinstance(entry, Path) else entry()

    def write(self, folder: Path) -> None:
        """Writes all files into `folder`."""
        for name, entry in self.files.items():
            if isinstance(entry, Path):
                with reading(entry):
                    data = entry.read_bytes()
            else:
                data = self.text(name).encode()
            (folder / name).write_bytes(data)

    def load(self) -> Tokenizer | None:
        """The tokenizer, or None without a ``tokenizer.json``."""
        text = self.text("tokenizer.json")
        if text is None:
            other = [name for name in ("tokenizer.model", "vocab.json") if name in self.files]
            if other:
                warnings.warn(
                    f"{other[0]} is not read, tokenizer.json is; without it prompts are token ids. transformers writes it: "
                    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
                    stacklevel=2,
                )
            return None
        config = self._json("tokenizer_config.json")
        template = self.text("chat_template.jinja")
        if template is None:
            template = self._json("chat_template.json").get("chat_template", config.get("chat_template"))
        if isinstance(template, list):
            with reading("the list of chat templates"):
                named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default", next(iter(named.values()), None))
        if template is not None and not isinstance(template, str):
            raise ConversionError(f"chat_template is {said(template)}, expected a text or a list of named ones")
        special = {k: _content(v) for k, v in config.items() if k.endswith("_token")}
        return Tokenizer(text, template, {k: v for k, v in special.items() if v is not None})

    def _json(self, name: str) -> dict:
        text = self.text(name)
        where = entry if isinstance(entry := self.files.get(name), Path) else name
        return {} if text is None else parse_json(text, where)


def _content(token: Any) -> str | None:
    """A special token is a string or an object with ``content``."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


class Tokenizer:
    """Encoding, decoding and the chat template of one model.

    Args:
      definition: the text of ``tokenizer.json``.
      chat_template: jinja source, or None.
      special_tokens: ``bos_token`` and the like, for the template.
    """

    def __init__(self, definition: str, chat_template: str | None = None, special_tokens: Mapping[str, str] | None = None):
        from tokenizers import Tokenizer as Engine

        try:
            self.engine = Engine.from_str(definition)
        except Exception as error:
            raise ConversionError(f"tokenizer.json cannot be read: {shown(error)}") from None
        self.engine.no_truncation()
        self.engine.no_padding()
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})

    def __repr__(self) -> str:
        chat = "with" if self.has_chat_template else "without"
        return f"Tokenizer({self.vocab_size} tokens, {chat} a chat template)"

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included; the model's vocabulary may be padded beyond."""
        return self.engine.get_vocab_size(with_added_tokens=True)

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token → id, added tokens included."""
        return self.engine.get_vocab(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works."""
        return self.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with `add_special_tokens` also what the tokenizer puts around a text (usually BOS)."""
        return self.engine.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids beyond the tokenizer's vocabulary (padding of the model's) give nothing."""
        return self.engine.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The chat template's text for `messages` (dicts with ``role`` and ``content``).

        Raises:
          ConversionError: there is no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ConversionError("this tokenizer has no chat template: pass text or token ids, or chat=False")
        return self._template.render(
            {
                **self.special_tokens, "tools": None, "documents": None, **variables,
                "messages": [dict(m) for m in messages], "add_generation_prompt": add_generation_prompt,
            }
        )  # fmt: skip

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation, ready for the model's answer (`render_chat`, encoded as it stands)."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables), add_special_tokens=False)

    @cached_property
    def _template(self):
        return ChatTemplate(self.chat_template)

    def stream(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder for one growing sequence."""
        return IncrementalDecoder(self, skip_special_tokens)


class IncrementalDecoder:
    """Text of a growing token sequence, in pieces that never end inside a character.

    The pieces of `push`, and of `flush` at the end, add up to the decoding of the whole sequence. Each step decodes a short
    window only: it starts at a token behind which the text was known to be whole, so that a word's leading space survives.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # the window decodes from here …
        self._seen = 0  # … and the text up to here is out

    def push(self, ids: Iterable[int]) -> str:
        """Adds tokens and returns the new text, which may be empty."""
        self._ids += [int(i) for i in ids]
        text, before = self._window()
        if text.endswith("\ufffd") or len(text) <= len(before):
            return ""  # bytes of an unfinished character, or tokens that show nothing
        self._start, self._seen = self._seen, len(self._ids)
        return text[len(before) :]

    def flush(self) -> str:
        """What is still held back, at the end of the sequence."""
        text, before = self._window()
        self._start = self._seen = len(self._ids)
        return text[len(before) :]

    def _window(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        window, seen = self._ids[self._start :], self._seen - self._start
        return decode(window, self._skip), decode(window[:seen], self._skip)
