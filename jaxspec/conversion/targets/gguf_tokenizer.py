"""The tokenizer inside a GGUF file → the text of a ``tokenizer.json``.

Two kinds are published: ``gpt2`` (byte-level BPE with the file's merges, split by one of a few known regular expressions) and
``llama`` (SentencePiece: pieces with scores, from which the merges follow).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxspec.files.errors import ConversionError
from jaxspec.tokenizer.tokenizer import TokenizerFiles

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

PRE_TOKENIZERS: dict[str, tuple[str, str | None]] = {
    "default": ("gpt2", None),
    "gpt-2": ("gpt2", None),
    "gpt2": ("gpt2", None),
    "smollm": ("digits", None),
    "refact": ("digits", None),
    "starcoder": ("digits", None),
    "llama-bpe": ("regex", LLAMA3_SPLIT),
    "llama3": ("regex", LLAMA3_SPLIT),
    "llama-v3": ("regex", LLAMA3_SPLIT),
    "smaug-bpe": ("regex", LLAMA3_SPLIT),
    "dbrx": ("regex", LLAMA3_SPLIT),
    "qwen2": ("regex", QWEN2_SPLIT),
    "deepseek-r1-qwen": ("regex", QWEN2_SPLIT),
}
"""``tokenizer.ggml.pre`` → (how a text is split before the merges, regular expression)."""


def added_tokens(meta: Mapping[str, Any]) -> list[dict]:
    """Control tokens (special) and user-defined ones, matched in the raw text."""
    kinds = meta.get("tokenizer.ggml.token_type") or []
    tokens = meta["tokenizer.ggml.tokens"]
    special = {CONTROL} | ({UNKNOWN} if meta["tokenizer.ggml.model"] == "llama" else set())
    return [
        {
            "id": i,
            "content": tokens[i],
            "special": kind in special,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, kind in enumerate(kinds)
        if kind in special | {USER_DEFINED}
    ]


def byte_level(meta: Mapping[str, Any]) -> dict:
    """Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2)."""
    name = meta.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ConversionError(f"GGUF pre-tokenizer {name!r} is not known; known: {', '.join(sorted(PRE_TOKENIZERS))}")
    kind, pattern = PRE_TOKENIZERS[name]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": kind != "regex"}
    steps = [level]
    if kind == "digits":
        steps = [{"type": "Digits", "individual_digits": True}, level]
    elif kind == "regex":
        steps = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, level]
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "normalizer": {"type": "NFC"} if pattern == QWEN2_SPLIT else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pattern == LLAMA3_SPLIT,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def sentencepiece(meta: Mapping[str, Any]) -> dict:
    """SentencePiece BPE (Llama 2, TinyLlama, Mistral, Gemma): a pair merges as early as its result's score is high."""
    tokens, scores = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.scores"]
    kinds = meta.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i, token in enumerate(tokens):
        if kinds[i] != NORMAL:
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(a, b) for a, b in pairs if a in vocab and b in vocab]
        merges += [(-scores[i], i, vocab[a], vocab[b], a, b) for a, b in pairs]
    merges.sort(key=lambda m: (m[0], m[2], m[3]))
    spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    undo = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if meta.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, {"type": "Prepend", "prepend": "▁"})
        undo.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((tokens[i] for i, kind in enumerate(kinds) if kind == UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": undo},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [[a, b] for *_, a, b in merges],
        },
    }


KINDS = {"gpt2": byte_level, "llama": sentencepiece}


def puts_bos(meta: Mapping[str, Any]) -> bool:
    """Whether BOS stands in front of a text: as the file says, else for SentencePiece and Llama 3's splitting (llama.cpp)."""
    llama3 = meta.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3", "llama-v3")
    return bool(meta.get("tokenizer.ggml.add_bos_token", meta["tokenizer.ggml.model"] == "llama" or llama3))


def template(meta: Mapping[str, Any]) -> dict | None:
    """What stands around a text: BOS and EOS where the file asks for them."""
    tokens = meta["tokenizer.ggml.tokens"]
    bos, eos = meta.get("tokenizer.ggml.bos_token_id"), meta.get("tokenizer.ggml.eos_token_id")
    before = [bos] if puts_bos(meta) and bos is not None else []
    after = [eos] if meta.get("tokenizer.ggml.add_eos_token", False) and eos is not None else []
    if not before + after:
        return None

    def special(ids):
        return [{"SpecialToken": {"id": tokens[i], "type_id": 0}} for i in ids]

    def sequence(name):
        return [*special(before), {"Sequence": {"id": name, "type_id": 0}}, *special(after)]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A"),
        "pair": sequence("A") + sequence("B"),
        "special_tokens": {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in before + after},
    }


def definition(meta: Mapping[str, Any]) -> str:
    """The text of a ``tokenizer.json``."""
    data = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens(meta)}
    data |= KINDS[meta["tokenizer.ggml.model"]](meta)
    return json.dumps(data | {"post_processor": template(meta)}, ensure_ascii=False)


def tokenizer_files(meta: Mapping[str, Any]) -> TokenizerFiles | None:
    """The tokenizer files that a GGUF file's metadata amount to; None when it holds no vocabulary.

    Raises ConversionError for a kind of tokenizer that is not known.
    """
    if "tokenizer.ggml.tokens" not in meta:
        return None
    kind = meta.get("tokenizer.ggml.model")
    if kind not in KINDS:
        raise ConversionError(f"GGUF tokenizer model {kind!r} is not supported; supported: {', '.join(KINDS)}")
    tokens, special = meta["tokenizer.ggml.tokens"], {}
    for ours, theirs in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        index = meta.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None and 0 <= index < len(tokens):
            special[ours] = tokens[index]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    files = {"tokenizer.json": lambda: definition(meta), "tokenizer_config.json": lambda: json.dumps(config, indent=2)}
    if meta.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = lambda: meta["tokenizer.chat_template"]
    return TokenizerFiles(files)
