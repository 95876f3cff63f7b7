"""What the tokens of a vocabulary stand for in a text, whatever way their tokenizer writes them down."""

from __future__ import annotations

import re
from collections.abc import Mapping

SPACE = "▁"
"""SentencePiece's space."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""SentencePiece's token for a single byte."""


def byte_letters() -> dict[str, int]:
    """The letter by which byte-level BPE (GPT-2) writes each byte: itself if it is printable, else one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def pieces(vocab: Mapping[str, int]) -> dict[int, bytes]:
    """Id → the bytes that a token adds to a text.

    A vocabulary with byte-level BPE's space is read in its letters, one with SentencePiece's space as SentencePiece writes, any
    other one as it stands. Tokens that are not written so, special ones for the most part, stand for their own name.
    """
    letters = byte_letters()
    if any(token.startswith("Ġ") for token in vocab):
        return {
            i: bytes(letters[c] for c in token) if all(c in letters for c in token) else token.encode()
            for token, i in vocab.items()
        }
    if any(token.startswith(SPACE) for token in vocab):
        found = {}
        for token, i in vocab.items():
            byte = BYTE.fullmatch(token)
            found[i] = bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()
        return found
    return {i: token.encode() for token, i in vocab.items()}
