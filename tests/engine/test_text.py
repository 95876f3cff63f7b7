"""Text of a growing answer: what is shown, what is held back, and where a stop string cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.text import REPLACEMENT, Answer


class Words:
    """Like SentencePiece: pieces begin with "▁" where a word does, and decoding drops the first one's space. 0 is <s>."""

    def __init__(self, *pieces: str):
        self.pieces = ("<s>", *pieces)

    def decode(self, ids) -> str:
        return "".join(self.pieces[i] for i in ids if i).replace("▁", " ").removeprefix(" ")


class Bytes:
    """One byte a token, as byte-level BPE has them for rare characters."""

    def decode(self, ids) -> str:
        return bytes(ids).decode("utf-8", "replace")


def grow(answer: Answer, steps, reason: str | None = "length") -> list[str]:
    """The texts of the pieces when tokens come in these steps; `reason` comes with the last one."""
    shown = []
    for number, tokens in enumerate(steps, 1):
        over = reason if number == len(steps) else None
        answer.add(list(tokens), [False] * len(tokens), [number] * len(tokens), [0] * len(tokens), over)
        shown.append(answer.piece().text)
        if answer.reason is not None:
            break
    return shown


def byte_answer(prompt: str = "P", stop=()) -> Answer:
    return Answer(Bytes(), np.frombuffer(prompt.encode(), np.uint8), stop)


def test_a_stop_string_over_token_borders_cuts_text_tokens_and_log():
    answer = byte_answer(stop=["END"])
    for number, part in enumerate((b"one ", b"E", b"N")):
        assert answer.add(list(part), [True] * len(part), [number] * len(part), [9] * len(part), None) is None
    assert answer.add(list(b"D two"), [False] * 5, [3] * 5, [12] * 5, None) == 7
    assert (answer.text, bytes(answer.tokens), answer.reason) == ("one ", b"one END", "stop")
    assert answer.matched_stop == "END"
    from_draft, round_of, proposed_upto = answer.log()
    assert from_draft.tolist() == [True] * 6 + [False]
    assert round_of.tolist() == [0, 0, 0, 0, 1, 2, 3]
    assert proposed_upto.tolist() == [9] * 6 + [12]
    assert answer.add([65], [False], [4], [12], "length") is None  # what was under way when it ended counts no more
    assert bytes(answer.tokens) == b"one END"


def test_the_stop_string_that_is_complete_first_wins():
    for stop in (["abcdef", "cd"], ["cd", "abcdef"]):
        answer = byte_answer(stop=stop)
        grow(answer, [b"xabcdefg"], None)
        assert (answer.text, bytes(answer.tokens), answer.reason) == ("xab", b"xabcd", "stop")
        assert answer.matched_stop == "cd"
    answer = byte_answer(stop=["bc", "abc"])  # both end there: what the longer one covers is no text either
    grow(answer, [b"xabc"], None)
    assert (answer.text, bytes(answer.tokens)) == ("x", b"xabc")


def test_what_a_stop_string_may_begin_with_is_held_back():
    answer = byte_answer(stop=["END", "\n\n"])
    assert grow(answer, [b"a", b"E", b"N", b"x\n", b"b", b"EN"]) == ["a", "", "", "ENx", "\nb", "EN"]
    assert (answer.text, answer.matched_stop) == ("aENx\nbEN", None)
    answer = byte_answer(stop=["END"])
    assert grow(answer, [b"aEN", b"D"]) == ["a", ""]
    assert (answer.text, answer.reason) == ("a", "stop")


def test_a_stop_id_is_no_text_and_a_stop_string_before_it_wins():
    answer = byte_answer()
    assert grow(answer, [b"ab", b"cS"], "stop") == ["ab", "c"]
    assert (answer.text, bytes(answer.tokens), answer.matched_stop) == ("abc", b"abcS", ord("S"))
    answer = byte_answer(stop=["b"])
    assert grow(answer, [b"a", b"bcS"], "stop") == ["a", ""]
    assert (answer.text, bytes(answer.tokens), answer.matched_stop) == ("a", b"ab", "b")


def test_a_character_is_shown_when_it_is_whole():
    euro = "€".encode()
    answer = byte_answer()
    assert grow(answer, [b"a", euro[:1], euro[1:2], euro[2:] + b"b", euro[:2]]) == ["a", "", "", "€b", REPLACEMENT]
    assert answer.text == "a€b" + REPLACEMENT


def test_what_is_no_character_is_shown_once_something_follows():
    answer = byte_answer()
    assert grow(answer, [b"a", b"\xff", b"b"]) == ["a", "", REPLACEMENT + "b"]


def test_a_character_that_the_prompt_began_is_no_rubbish():
    euro = "€".encode()
    answer = Answer(Bytes(), np.frombuffer(b"long prompt " + euro[:2], np.uint8))
    shown = "".join(grow(answer, [euro[2:], b"x", b"y"]))
    assert shown == answer.text and shown.endswith("xy") and REPLACEMENT not in shown


@pytest.mark.parametrize("prompt, text", [([1], " world wide"), ([0, 1], " world wide"), ([0], "world wide")])
def test_the_prompt_gives_the_first_word_its_space(prompt, text):
    tokenizer = Words("▁Hello", "▁world", "▁wi", "de")
    whole, pieces = (Answer(tokenizer, np.array(prompt, np.int32)) for _ in range(2))
    grow(whole, [[2, 3, 4]])
    assert whole.text == text == "".join(grow(pieces, [[2], [3], [4]])) == pieces.text


def test_without_a_tokenizer_there_are_only_tokens():
    answer = Answer(None, np.array([1]))
    answer.add([4, 5], [True, False], [1, 1], [3, 3], None)
    assert answer.piece().text is None and answer.text is None
    answer.add([6], [False], [2], [3], "length")
    piece = answer.piece()
    assert (piece.tokens, piece.from_draft, piece.text) == ([6], [False], None)
    assert (answer.tokens, answer.reason) == ([4, 5, 6], "length")


TEXT = st.text("abé€\N{GRINNING FACE}", max_size=20)


@given(TEXT, st.lists(st.text("abé€", min_size=1, max_size=3), max_size=3), st.lists(st.integers(1, 5), max_size=80))
def test_pieces_make_up_the_text_before_the_first_stop(text, stop, widths):
    """However the tokens arrive: the text in front of the stop string that is complete first, and no byte behind it."""
    data = text.encode()
    steps, at = [], 0
    for width in widths:
        steps.append(data[at : at + width])
        at += width
    steps = [step for step in [*steps, data[at:]] if step] or [b""]
    answer = byte_answer("prompt é", stop)
    shown = grow(answer, steps)
    found = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    end, begin = min(found, default=(len(text), len(text)))
    assert "".join(shown) == answer.text == text[:begin]
    assert bytes(answer.tokens) == text[:end].encode()
    assert answer.reason == ("stop" if found else "length")
    assert len(answer.log()[0]) == len(answer.tokens)
