"""Tokenizers: from GGUF metadata, chat templates, streaming that never splits a character."""

import json
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxspec
from jaxspec.conversion import ConversionError, convert
from jaxspec.conversion.targets.gguf_tokenizer import LLAMA3_SPLIT, PRE_TOKENIZERS, QWEN2_SPLIT, definition, tokenizer_files
from jaxspec.prompts import encode_prompts
from jaxspec.tokenizer.tokenizer import Tokenizer, TokenizerFiles
from tests import tiny
from tests.conversion.gguf_files import write_gguf

TEXTS = [
    "Hello world",
    "  leading and trailing  ",
    "tabs\tand\n\nnewlines   \n x",
    "1234567890 3.14 1,000 2026-01-31",
    "def f(x):\n    return x**2  # comment\n\n\n",
    "émigré naïve 日本語 한국어 Ω ﬁ",
    "🙂👍🏽 🇩🇪🏳️‍🌈",
    "I'm you're they'LL DON'T",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a\u00a0b\u200bc\u3000d",
    "\r\n\r\n",
    "مرحبا بالعالم",
    "foo_bar-baz/qux@example.com",
    "   ",
    "",
    "\x00\x01 odd",
    "A" * 50,
    '{"k": [1, 2.5e-3, null]}',
    "e\u0301 vs é",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
]


def byte_alphabet():
    """GPT-2's printable stand-ins for bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def byte_level_meta(merges=(), pre="gpt-2", **more):
    specials = ["<|end|>", "<|user|>"]
    tokens = specials + byte_alphabet() + [m.replace(" ", "") for m in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(specials) + [1] * (len(tokens) - len(specials)),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.eos_token_id": 0,
        **more,
    }


def tokens_of(tokenizer, text):
    names = {i: t for t, i in tokenizer.vocab.items()}
    return [names[i] for i in tokenizer.encode(text)]


def load(meta):
    return tokenizer_files(meta).load()


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_round_trip(pre):
    tokenizer = load(byte_level_meta(["h e", "Ġ w"], pre))
    for text in TEXTS:
        expected = text.replace("e\u0301", "é") if PRE_TOKENIZERS[pre][1] == QWEN2_SPLIT else text
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == expected
    assert tokens_of(tokenizer, "he <|user|>he") == ["he", "Ġ", "<|user|>", "he"]
    assert tokenizer.decode(tokenizer.encode("he<|user|>he")) == "hehe"  # special tokens are skipped


def test_digits_split_as_the_model_was_trained():
    digits = ["1 2", "12 3", "123 4"]
    assert tokens_of(load(byte_level_meta(digits, "gpt-2")), "1234") == ["1234"]
    assert tokens_of(load(byte_level_meta(digits, "smollm")), "1234") == ["1", "2", "3", "4"]
    assert tokens_of(load(byte_level_meta(digits, "llama-bpe")), "1234") == ["123", "4"]
    assert tokens_of(load(byte_level_meta(digits, "qwen2")), "1234") == ["1", "2", "3", "4"]


def test_bos_and_eos_are_added_only_where_the_file_says_so():
    keys = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": True}
    tokenizer = load(byte_level_meta(**keys))
    assert tokenizer.encode("a")[0] == 1 and tokenizer.encode("a", add_special_tokens=False)[0] != 1
    assert load(byte_level_meta(**keys | {"tokenizer.ggml.add_eos_token": True})).encode("a")[-1] == 0
    assert 1 not in load(byte_level_meta(**keys | {"tokenizer.ggml.add_bos_token": False})).encode("a")


def test_llama3_files_have_bos_in_front_unless_they_say_otherwise():
    key = {"tokenizer.ggml.bos_token_id": 1}
    for pre in PRE_TOKENIZERS:
        puts = pre in ("llama-bpe", "llama3", "llama-v3")
        assert (load(byte_level_meta(pre=pre, **key)).encode("a")[0] == 1) == puts
        assert 1 not in load(byte_level_meta(pre=pre, **key | {"tokenizer.ggml.add_bos_token": False})).encode("a")


BOS = "<|user|>"
OF_CLASS = {"tokenizer_class": "LlamaTokenizerFast"}


@pytest.mark.parametrize("puts_itself", [False, True])
@pytest.mark.parametrize(
    "config, special, puts",
    [
        ({"bos_token": BOS, "add_bos_token": True}, None, True),
        ({"bos_token": {"content": BOS}, "add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"}, None, True),
        ({"add_bos_token": True}, {"bos_token": {"content": BOS}}, True),  # only special_tokens_map.json names it
        ({"add_bos_token": True, "bos_token": None}, {"bos_token": BOS}, True),
        ({"bos_token": BOS} | OF_CLASS, None, True),
        (OF_CLASS, {"bos_token": BOS}, True),
        ({"bos_token": BOS, "add_bos_token": False} | OF_CLASS, None, False),
        ({"bos_token": BOS, "tokenizer_class": "PreTrainedTokenizerFast"}, None, False),
        ({"add_bos_token": True}, None, False),  # no file says which token it is
        ({"add_bos_token": True, "bos_token": "<not there>"}, None, False),
    ],
)
def test_bos_of_folders(config, special, puts, puts_itself, tmp_path):
    keys = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": puts_itself}
    (tmp_path / "tokenizer.json").write_text(definition(byte_level_meta(**keys)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if special is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    tokenizer = TokenizerFiles.of_folder(tmp_path).load()
    bare = tokenizer.encode("ab", add_special_tokens=False)
    assert 1 not in bare
    assert tokenizer.encode("ab") == ([1] if puts or puts_itself else []) + bare
    assert tokenizer.encode("") == ([1] if puts or puts_itself else [])


def params_with(tokenizer):
    """A model of which only the tokenizer and the size of its vocabulary count."""
    return jaxspec.ModelParams({}, tiny.config(vocab=tokenizer.vocab_size), tokenizer)


def test_bos_given_twice_warns():
    special = {"bos_token": BOS}
    own = Tokenizer(definition(byte_level_meta()), "{{ bos_token }}{{ messages[0].content }}", special, puts_bos=True)
    processor = Tokenizer(
        definition(byte_level_meta(**{"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": True})), None, special
    )
    for tokenizer in (own, processor):
        for text in (BOS + "ab", BOS):
            with pytest.warns(UserWarning, match=r"prompt 0 begins with the BOS token '<\|user\|>' twice: the text and"):
                assert encode_prompts(params_with(tokenizer), text, False)[0][0][:2] == [1, 1]
    with pytest.warns(UserWarning, match="prompt 1 begins .* twice: the chat template and the message have one each"):
        encode_prompts(params_with(own), ["ab", BOS + "ab"], True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for prompt, chat in (("ab", False), ("ab", True), ("a" + BOS + BOS, False), ([1, 1, 2], "auto")):
            encode_prompts(params_with(own), prompt, chat)


PIECES = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁ab", "cab", "▁abc", "ca", "é", "▁▁"]
SCORES = [float(s) for s in (-20, -21, -22, -23, -1, -3, -2, -6, -5, -4, -8, -9, -10, -7)]


def sentencepiece_meta(**more):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + SCORES,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


def sentencepiece_reference(text: str) -> list[str]:
    """SentencePiece's BPE by its definition: merge the adjacent pair whose piece scores best, leftmost first."""
    scores = dict(zip(PIECES, SCORES, strict=True))
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        found = [(-scores[a + b], i) for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False)) if a + b in scores]
        if not found:
            break
        i = min(found)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return [x for p in pieces for x in ([p] if p in scores else [f"<0x{b:02X}>" for b in p.encode()])]


@settings(max_examples=200, deadline=None)
@given(st.text("abc é漢🙂", min_size=1, max_size=12))
def test_sentencepiece_agrees_with_its_definition(text):
    tokenizer = load(sentencepiece_meta())
    assert tokens_of(tokenizer, text) == ["<s>", *sentencepiece_reference(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_without_a_space_in_front():
    tokenizer = load(sentencepiece_meta(**{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}))
    assert tokens_of(tokenizer, "ab ab") == ["ab", "▁ab"]
    assert tokenizer.decode(tokenizer.encode("ab ab")) == "ab ab"


def test_unknown_kinds_are_refused():
    with pytest.raises(ConversionError, match="pre-tokenizer 'poro' is not known; known: .*llama-bpe.*smollm"):
        definition(byte_level_meta(pre="poro"))
    with pytest.raises(ConversionError, match="tokenizer model 't5' is not supported; supported: gpt2, llama"):
        tokenizer_files({"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": []})
    assert tokenizer_files({}) is None


# ---- chat templates


def chat(template, **special):
    return Tokenizer(definition(byte_level_meta()), template, special)


def test_chat_template():
    source = (
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n<|user|>{{ m['content'] }}{{ eos_token }}\n  {% endif %}\n"
        "{% endfor %}\n{% if add_generation_prompt %}A:{% endif %}"
    )
    tokenizer = chat(source, eos_token="<|end|>")
    messages = [{"role": "user", "content": "hé"}]
    assert tokenizer.render_chat(messages) == "<|user|>hé<|end|>\nA:"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "<|user|>hé<|end|>\n"
    ids = tokenizer.apply_chat_template(messages)
    assert ids[0] == 1 and tokenizer.decode(ids, skip_special_tokens=False) == "<|user|>hé<|end|>\nA:"


def test_helpers_of_chat_templates():
    assert chat("{{ strftime_now('%Y')|length }}").render_chat([]) == "4"
    assert chat("{{ {'a': '<é>'}|tojson }}").render_chat([]) == '{"a": "<é>"}'
    assert chat("{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}").render_chat([]) == "1"
    assert chat("{% generation %}x{% endgeneration %}").render_chat([]) == "x"
    assert chat("{{ think }}").render_chat([], think="yes") == "yes"


def test_chat_template_errors():
    with pytest.raises(ConversionError, match="refuses these messages: roles must alternate"):
        chat("{{ raise_exception('roles must alternate') }}").render_chat([])
    with pytest.raises(ConversionError, match="no chat template"):
        chat(None).apply_chat_template([])
    with pytest.raises(ConversionError, match="chat template is not valid"):
        chat("{% for %}").render_chat([])
    with pytest.raises(ConversionError, match="refuses these messages"):  # the sandbox
        chat("{{ ''.__class__.__mro__[1].__subclasses__() }}").render_chat([])


def test_where_folders_keep_their_template(tmp_path):
    (tmp_path / "tokenizer.json").write_text(definition(byte_level_meta()))
    config = {"bos_token": {"content": "<|user|>"}, "eos_token": "<|end|>", "pad_token": None, "chat_template": "inline"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = TokenizerFiles.of_folder(tmp_path).load()
    assert tokenizer.special_tokens == {"bos_token": "<|user|>", "eos_token": "<|end|>"}
    assert tokenizer.chat_template == "inline"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert TokenizerFiles.of_folder(tmp_path).load().chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert TokenizerFiles.of_folder(tmp_path).load().chat_template == "file"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConversionError, match="tokenizer.json cannot be read"):
        TokenizerFiles.of_folder(tmp_path).load()


def test_other_tokenizer_formats_are_named(tmp_path):
    assert TokenizerFiles.of_folder(tmp_path).load() is None
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.warns(UserWarning, match="tokenizer.model is not read, tokenizer.json is"):
        assert TokenizerFiles.of_folder(tmp_path).load() is None


# ---- streaming


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=20), st.lists(st.integers(1, 4), max_size=30))
def test_pieces_add_up_and_never_split_a_character(text, sizes):
    for tokenizer in (load(byte_level_meta(["h e", "Ġ w"])), load(sentencepiece_meta())):
        ids, stream, pieces = tokenizer.encode(text), tokenizer.stream(), []
        for size in [*sizes, len(ids) + 1]:
            pieces.append(stream.push(ids[:size]))
            ids = ids[size:]
        pieces.append(stream.flush())
        whole = tokenizer.decode(tokenizer.encode(text))
        assert "".join(pieces) == whole
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in whole


def test_a_character_of_four_bytes_comes_in_one_piece():
    tokenizer = load(byte_level_meta())
    stream = tokenizer.stream()
    pieces = [stream.push([i]) for i in tokenizer.encode("a🙂b")]
    assert pieces == ["a", "", "", "", "🙂", "b"]
    assert stream.push([0]) == "" and stream.flush() == ""  # a special token shows nothing


def test_unfinished_and_invalid_bytes_come_out_at_the_end():
    tokenizer = load(byte_level_meta())
    ids = tokenizer.encode("🙂")
    stream = tokenizer.stream()
    assert [stream.push([i]) for i in ids[:2]] == ["", ""]
    assert stream.flush() == tokenizer.decode(ids[:2]) != ""


# ---- through files


def test_gguf_tokenizer_survives_conversion(tmp_path):
    meta = sentencepiece_meta(**{"tokenizer.chat_template": "{{ messages[0].content }}"})
    meta = {k: v for k, v in meta.items() if "bos_token_id" not in k and "eos_token_id" not in k}
    write_gguf("target_llama_smallvocab", tmp_path / "m.gguf", metadata=meta)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    convert(tmp_path / "out", tmp_path / "hf", to_hf=True, progress=False)
    tokenizers = [jaxspec.load(tmp_path / name).tokenizer for name in ("m.gguf", "out", "hf")]
    for tokenizer in tokenizers:
        assert tokenizer.has_chat_template and tokenizer.special_tokens["bos_token"] == "<s>"
        assert tokenizer.encode("abc é") == tokenizers[0].encode("abc é")
        assert tokenizer.vocab_size == len(tokenizer.vocab) == 259 + len(PIECES)


@pytest.mark.slow
def test_smollm2_agrees_with_transformers():
    pytest.importorskip("torch", reason="transformers reads GGUF files with torch only")
    from transformers import AutoTokenizer

    from jaxspec.files.gguf_reader import GGUFReader
    from jaxspec.hub import demo_file

    try:
        file = demo_file("smollm2-135m")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    ours, theirs = load(GGUFReader(file).metadata), AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    for text in [*TEXTS, *Path(__file__).read_text(encoding="utf-8").splitlines(keepends=True)]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
    messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
    for prompt in (True, False):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        assert ours.render_chat(messages, add_generation_prompt=prompt) == expected
    assert ours.vocab == theirs.get_vocab()


def test_split_patterns_differ_in_digits_only():
    assert QWEN2_SPLIT != LLAMA3_SPLIT and QWEN2_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|") == LLAMA3_SPLIT
