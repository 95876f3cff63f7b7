"""Text of a growing answer: what is shown, what is held back, and where a stop string cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.conversion.targets.gguf_tokenizer import tokenizer_files
from jaxspec.tokenizer.text import REPLACEMENT, Answer
from tests.tokenizer.test_tokenizer import byte_level_meta, sentencepiece_meta


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
    assert shown == answer.text == "€xy"


def sentencepiece():
    return tokenizer_files(sentencepiece_meta()).load()


def byte_level():
    return tokenizer_files(byte_level_meta(["h e", "Ġ w"])).load()


REAL = pytest.mark.parametrize("make", [sentencepiece, byte_level])


def behind(tokenizer, prompt: list[int], answer: list[int]) -> str:
    """decode(prompt + answer) - decode(prompt), where the prompt ends with a whole character."""
    begun, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + answer)
    assert whole.startswith(begun)
    return whole[len(begun) :]


@REAL
@pytest.mark.parametrize("prompt", ["abc", "ab é", "漢字漢字", "🙂🙂🙂🙂", "he", "", " "])
@pytest.mark.parametrize("said", [" abc ab", "abc", "  ab", "é漢🙂", " 🙂 ab"])
def test_an_answer_is_what_stands_behind_its_prompt(make, prompt, said):
    tokenizer = make()
    first = tokenizer.encode(prompt)
    ids = tokenizer.encode(prompt + said)
    if ids[: len(first)] != first:  # the border falls into a piece: its two sides apart
        ids = first + tokenizer.encode("c" + said, add_special_tokens=False)[1:]
    tokens = ids[len(first) :]
    expected = behind(tokenizer, first, tokens)
    for width in (1, 2, 5, 100):
        answer = Answer(tokenizer, np.array(first, np.int32))
        steps = [tokens[i : i + width] for i in range(0, len(tokens), width)]
        assert "".join(grow(answer, steps)) == answer.text == expected


@REAL
@pytest.mark.parametrize("character", ["ö", "漢", "🙂"])
@pytest.mark.parametrize("before", ["ab", "ab 漢🙂", "🙂🙂🙂🙂🙂"])
def test_a_character_may_begin_in_the_prompt_and_end_in_the_answer(make, character, before):
    tokenizer = make()
    prompt, ids = tokenizer.encode(before), tokenizer.encode(before + character + "ab")
    assert ids[: len(prompt)] == prompt and len(ids) - len(prompt) >= len(character.encode()) + 1  # a token a byte
    for cut in range(1, len(character.encode())):
        for width in (1, 2, 9):
            answer = Answer(tokenizer, np.array(ids[: len(prompt) + cut], np.int32), ["b"])
            tokens = ids[len(prompt) + cut :]
            shown = grow(answer, [tokens[i : i + width] for i in range(0, len(tokens), width)])
            assert "".join(shown) == answer.text == character + "a"
            other = Answer(tokenizer, np.array(ids[: len(prompt) + cut], np.int32))
            grow(other, [tokenizer.encode("cab", add_special_tokens=False)[-1:] * 2])
            assert REPLACEMENT not in other.text  # the unfinished character was the prompt's


@pytest.mark.parametrize("stop", [" Paris", " wide", "lo wor"])
def test_a_stop_string_may_begin_with_the_space_of_the_first_word(stop):
    tokenizer = Words("▁Hello", "▁world", "▁wide", "▁Paris", "lo")
    for width in (1, 3):
        tokens = [5, 2, 4, 3]
        answer = Answer(tokenizer, np.array([0, 1], np.int32), [stop])
        grow(answer, [tokens[i : i + width] for i in range(0, 4, width)])
        assert answer.text == "lo world Paris wide"[: "lo world Paris wide".index(stop)]
        assert answer.reason == "stop"


def test_a_stop_string_at_the_first_token_has_its_space():
    answer = Answer(Words("▁France", "▁is", "▁Paris"), np.array([0, 1, 2], np.int32), [" Paris"])
    assert grow(answer, [[3]]) == [""] and answer.matched_stop == " Paris"


PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
GPT2_BYTES = {byte: chr(byte) for byte in PRINTABLE}
GPT2_BYTES |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in GPT2_BYTES)}
"""A byte and what stands for it in a byte-level vocabulary."""

BYTE_RUNS = st.lists(st.sampled_from([*"🙂é漢".encode(), 0xFF, 0xE2, ord("q"), "ab", "end"]), max_size=14)


@REAL
@given(BYTE_RUNS, BYTE_RUNS, st.lists(st.integers(1, 5), max_size=14), st.booleans())
def test_the_text_does_not_depend_on_how_tokens_arrive(make, prompt, said, widths, stops):
    """Runs of bytes of which some are no characters, and special tokens between them."""
    tokenizer = make()
    end = min(tokenizer.special_tokens_by_id)

    def ids(parts):
        found = []
        for part in parts:
            if part == "end":
                found.append(end)
            elif isinstance(part, str):
                found += tokenizer.encode(part, add_special_tokens=False)
            else:
                name = f"<0x{part:02X}>"
                found.append(tokenizer.vocab[name if name in tokenizer.vocab else GPT2_BYTES[part]])
        return found

    prompt, tokens = ids(prompt), ids(said)
    answers = []
    for sizes in ([1] * len(tokens), widths, []):
        answer, steps, at = Answer(tokenizer, np.array(prompt, np.int32), ["ba"] if stops else []), [], 0
        for size in sizes:
            steps.append(tokens[at : at + size])
            at += size
        steps = [step for step in [*steps, tokens[at:]] if step] or [[]]
        assert "".join(grow(answer, steps)) == answer.text
        answers.append((answer.text, answer.tokens, answer.reason))
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    "stop, text, count",
    [
        (["<|user|>"], "abhe", 4),
        (["he<|user|>"], "ab", 4),
        (["<|end|>he"], "ab", 3),
        (["b<|end|>h"], "a", 3),
        (["<|user|>c"], "abhe", 5),
        (["zz", "<|end|>"], "ab", 2),
        (["<|end|><|user|>"], "abhecd", 6),
        (["c", "<|user|>d"], "abhe", 5),
    ],
)
def test_a_special_token_may_be_a_stop_string_or_a_part_of_one(stop, text, count):
    """ab <|end|> he <|user|> c d, of which the specials are not shown."""
    tokenizer = tokenizer_files(byte_level_meta(["h e", "a b"])).load()
    tokens = tokenizer.encode("ab<|end|>he<|user|>cd", add_special_tokens=False)
    for width in (1, 2, 3, 6):
        answer = Answer(tokenizer, np.array(tokenizer.encode("he"), np.int32), stop)
        shown = grow(answer, [tokens[i : i + width] for i in range(0, 6, width)])
        assert "".join(shown) == answer.text == text
        assert answer.tokens == tokens[:count]
        assert (answer.reason, answer.matched_stop in stop) == (
            ("stop", True) if stop != ["<|end|><|user|>"] else ("length", False)
        )


def test_a_stop_string_may_end_with_the_stop_id():
    tokenizer = tokenizer_files(byte_level_meta(["h e", "a b"])).load()
    tokens = tokenizer.encode("ab\n<|end|>", add_special_tokens=False)
    answer = Answer(tokenizer, np.array([5], np.int32), ["\n<|end|>"])
    assert grow(answer, [tokens], "stop") == ["ab"]
    assert (answer.text, answer.tokens, answer.matched_stop) == ("ab", tokens, "\n<|end|>")
    plain = Answer(tokenizer, np.array([5], np.int32), ["never"])
    assert grow(plain, [tokens], "stop") == ["ab\n"] and plain.matched_stop == tokens[-1]


def test_what_a_stop_string_with_a_special_token_may_begin_with_is_held_back():
    tokenizer = tokenizer_files(byte_level_meta(["h e", "a b"])).load()
    tokens = tokenizer.encode("ab<|end|>he<|user|>ab", add_special_tokens=False)
    answer = Answer(tokenizer, np.array([5], np.int32), ["b<|end|>hex", "he<|user|>x"])
    assert grow(answer, [[t] for t in tokens]) == ["a", "", "", "b", "heab"]


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
