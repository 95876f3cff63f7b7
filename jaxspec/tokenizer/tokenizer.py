"""Text ↔ token ids: the Rust ``tokenizers`` engine, chat templates rendered with jinja2, and streaming decoding.

A tokenizer lives in files: ``tokenizer.json`` (the engine), ``tokenizer_config.json`` (special tokens, maybe the chat
template), ``special_tokens_map.json`` and ``chat_template.jinja``. What ends an answer stands in the model's configuration,
which takes in the tokenizer's end token when a folder is read (`TokenizerFiles.stop_ids`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxspec.files.errors import ConversionError, reading, shown
from jaxspec.files.values import parse_json, said
from jaxspec.tokenizer.chat_template import ChatTemplate

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
"""What is copied along from a Hugging Face folder; the first six are read here."""


BOS_BY_DEFAULT = {f"{name}Tokenizer{fast}" for name in ("Llama", "CodeLlama", "Gemma") for fast in ("", "Fast")}
"""Values of ``tokenizer_class`` whose ``add_bos_token`` is true unless the file says otherwise (transformers 4)."""


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
        return Tokenizer(text, template, self.special_tokens(), puts_bos=self.puts_bos())

    def puts_bos(self) -> bool:
        """Whether BOS is to stand in front of a text although the post-processor of tokenizer.json may not put it there.

        The one rule for BOS is the union of what published readers do; whoever puts it, it is put once:
          * the post-processor of tokenizer.json puts it (all readers);
          * tokenizer_config.json says ``add_bos_token: true`` (transformers 5, its Llama and Gemma classes before, llama.cpp
            by the key of the same name in a GGUF file);
          * it says nothing, and its class is one that puts BOS by default (transformers 4, hence SGLang);
          * GGUF files: `gguf_tokenizer.puts_bos`.
        Which token that is says tokenizer_config.json, else special_tokens_map.json. A chat template's text is encoded as it
        stands: templates write their own BOS.
        """
        config = self._json("tokenizer_config.json")
        asked, name = config.get("add_bos_token"), config.get("tokenizer_class")
        return asked is True or (asked is None and isinstance(name, str) and name in BOS_BY_DEFAULT)

    def special_tokens(self) -> dict[str, str]:
        """``bos_token`` and the like: what tokenizer_config.json says, else special_tokens_map.json."""
        both = [self._json("special_tokens_map.json"), self._json("tokenizer_config.json")]
        named = [(k, _content(v)) for data in both for k, v in data.items() if k.endswith("_token")]
        return {k: content for k, content in named if content is not None}

    def token_id(self, content: str) -> int | None:
        """The id of a token; None for one that the files do not know."""
        for index, token in self._dict(self._json("tokenizer_config.json"), "added_tokens_decoder").items():
            if _content(token) == content and str(index).isdecimal():
                return int(index)
        definition = self._json("tokenizer.json")
        added = definition.get("added_tokens")
        for token in added if isinstance(added, list) else ():
            if _content(token) == content and _is_id(token.get("id")):
                return token["id"]
        vocab = self._dict(self._dict(definition, "model"), "vocab")
        index = vocab.get(content, self._json("added_tokens.json").get(content))
        return index if _is_id(index) else None

    def stop_ids(self) -> tuple[int, ...]:
        """The id of the tokenizer's end token, if it has one: some folders name it in no other place."""
        end = self.special_tokens().get("eos_token")
        index = None if end is None else self.token_id(end)
        return () if index is None else (index,)

    def _json(self, name: str) -> dict:
        text = self.text(name)
        where = entry if isinstance(entry := self.files.get(name), Path) else name
        return {} if text is None else parse_json(text, where)

    @staticmethod
    def _dict(data: dict, key: str) -> dict:
        value = data.get(key)
        return value if isinstance(value, dict) else {}


def _content(token: Any) -> str | None:
    """A special token is a string or an object with ``content``."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _is_id(index: Any) -> bool:
    return isinstance(index, int) and not isinstance(index, bool) and index >= 0


class Tokenizer:
    """Encoding, decoding and the chat template of one model.

    Args:
      definition: the text of ``tokenizer.json``.
      chat_template: jinja source, or None.
      special_tokens: ``bos_token`` and the like, for the template.
      puts_bos: put BOS in front of texts where the definition itself does not (`TokenizerFiles.puts_bos`).
    """

    def __init__(
        self,
        definition: str,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        puts_bos: bool = False,
    ):
        from tokenizers import Tokenizer as Engine

        try:
            self.engine = Engine.from_str(definition)
        except Exception as error:
            raise ConversionError(f"tokenizer.json cannot be read: {shown(error)}") from None
        self.engine.no_truncation()
        self.engine.no_padding()
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        name = self.special_tokens.get("bos_token")
        self.bos_id: int | None = None if name is None else self.engine.token_to_id(name)
        self._in_front: list[int] = []
        if puts_bos and self.bos_id is not None and self.engine.encode("").ids[:1] != [self.bos_id]:
            self._in_front = [self.bos_id]

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

    @cached_property
    def special_tokens_by_id(self) -> dict[int, str]:
        """Id → token, of the tokens that `decode` leaves out."""
        return {i: token.content for i, token in self.engine.get_added_tokens_decoder().items() if token.special}

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works."""
        return self.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with `add_special_tokens` also what the tokenizer puts around a text (usually BOS)."""
        ids = self.engine.encode(text, add_special_tokens=add_special_tokens).ids
        return self._in_front + ids if add_special_tokens else ids

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
                **self.special_tokens,
                "tools": None,
                "documents": None,
                **variables,
                "messages": [dict(m) for m in messages],
                "add_generation_prompt": add_generation_prompt,
            }
        )

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
