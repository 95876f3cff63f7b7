"""What a call says for each prompt: lists of values, `SamplingParams`, biases, least lengths."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import ConfigError, SamplingParams
from tests import tiny

LENGTH = 20
HOT = {"temperature": 1.5, "seed": [3, 4]}


@pytest.fixture(scope="module")
def model():
    """The tiny target with a stop id that its greedy answers reach early, and two prompts."""
    prompts = tiny.prompts(2, seed=2)
    answers = jaxspec.generate(tiny.target(), prompts, algorithm="none", max_new_tokens=LENGTH)
    config = dataclasses.replace(tiny.target().config, stop_token_ids=(answers[0].tokens[3],))
    return jaxspec.ModelParams(tiny.target().tree, config, tiny.target().tokenizer), prompts, answers


def one_by_one(model, prompts, **lists):
    """Single calls with each prompt's value of every list."""
    return [
        jaxspec.generate(model, prompt, **{name: x[i] if isinstance(x, list) else x for name, x in lists.items()})
        for i, prompt in enumerate(prompts)
    ]


def shown(results) -> list[tuple]:
    return [(r.tokens, r.text, r.finish_reason, r.from_draft) for r in results]


PER_PROMPT = {
    "max_new_tokens": ([4, 11], {"ignore_eos": True}),
    "temperature": ([0.0, 1.5], {"seed": [3, 4]}),
    "top_k": ([1, 3], HOT),
    "top_p": ([0.2, 0.9], HOT),
    "min_p": ([0.9, 0.1], HOT),
    "repetition_penalty": ([1.8, 1.0], {"ignore_eos": True}),
    "presence_penalty": ([0.0, 1.9], {"ignore_eos": True}),
    "frequency_penalty": ([1.5, 0.0], {"ignore_eos": True}),
    "min_new_tokens": ([9, 0], {}),
    "logit_bias": ([{7: 30.0}, [(9, 30.0)]], {"ignore_eos": True}),
    "seed": ([11, 12], {"temperature": 1.5}),
    "ignore_eos": ([True, False], {}),
}
"""Keyword → its values, and what else the calls say. The second value of each pair is not what the first prompt wants."""


@pytest.mark.parametrize("name", PER_PROMPT)
def test_a_list_has_one_value_for_each_prompt(name, model):
    params, prompts, _ = model
    values, others = PER_PROMPT[name]
    options = {"draft": tiny.target(), "max_new_tokens": LENGTH, **others}
    both = jaxspec.generate(params, prompts, **{**options, name: values})
    assert shown(both) == shown(one_by_one(params, prompts, **{**options, name: values}))
    swapped = jaxspec.generate(params, prompts, **{**options, name: values[::-1]})
    assert shown(swapped) != shown(both)


def test_stops_of_each_prompt(model):
    params, prompts, answers = model
    texts = [tiny.target().tokenizer.decode(a.tokens) for a in answers]
    options = {"draft": tiny.target(), "max_new_tokens": LENGTH, "ignore_eos": True}
    for stop in ([[texts[0][4:6]], ["~", texts[1][7:9]]], [None, [texts[1][5]]]):
        both = jaxspec.generate(params, prompts, stop=stop, **options)
        singles = [jaxspec.generate(params, p, stop=s, **options) for p, s in zip(prompts, stop, strict=True)]
        assert shown(both) == shown(singles)
        assert both[1].finish_reason == "stop"
    del options["ignore_eos"]
    for ids in ([[answers[0].tokens[1]], [answers[1].tokens[6]]], [None, [answers[1].tokens[2]]]):
        both = jaxspec.generate(params, prompts, stop_token_ids=ids, **options)
        singles = [jaxspec.generate(params, p, stop_token_ids=s, **options) for p, s in zip(prompts, ids, strict=True)]
        assert shown(both) == shown(singles)
        assert both[1].finish_reason == "stop"
    shared = jaxspec.generate(params, prompts, stop_token_ids=[answers[1].tokens[2]], **options)
    assert shown(shared[1:]) == shown(both[1:])


def test_sampling_params_say_what_the_keywords_say(model):
    params, prompts, _ = model
    wanted = {
        "temperature": 1.2,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "min_new_tokens": 5,
        "logit_bias": {3: 1.0},
    }
    options = {"draft": tiny.small_draft(), "max_new_tokens": LENGTH}
    expected = shown(jaxspec.generate(params, prompts, seed=5, **wanted, **options))
    assert shown(jaxspec.generate(params, prompts, sampling=SamplingParams(**wanted, seed=5), **options)) == expected
    assert shown(jaxspec.generate(params, prompts, sampling=SamplingParams(**wanted), seed=5, **options)) == expected
    greedy = jaxspec.generate(params, prompts, **options)
    mixed = jaxspec.generate(params, prompts, sampling=[SamplingParams(), SamplingParams(**wanted, seed=5)], **options)
    assert shown(mixed) == [shown(greedy)[0], expected[1]]
    one = jaxspec.generate(params, prompts[1], sampling=SamplingParams(**wanted), seed=5, **options)
    assert shown([one]) == expected[1:]


def test_no_stop_before_the_least_length(model):
    params, prompts, answers = model
    stop = params.config.stop_token_ids[0]
    free = jaxspec.generate(params, prompts[0], draft=tiny.target(), max_new_tokens=LENGTH)
    assert (free.tokens, free.finish_reason) == (answers[0].tokens[: answers[0].tokens.index(stop) + 1], "stop")
    result = jaxspec.generate(params, prompts[0], draft=tiny.target(), max_new_tokens=LENGTH, min_new_tokens=10)
    assert len(result.tokens) >= 10 and stop not in result.tokens[:9]
    assert (
        result.tokens == jaxspec.generate(params, prompts[0], algorithm="none", max_new_tokens=LENGTH, min_new_tokens=10).tokens
    )


INTEGERS = {
    "python": int,
    "numpy": np.int64,
    "small": np.uint8,
    "no dimension": np.array,
    "jax": jnp.int32,
    "torch": lambda n: pytest.importorskip("torch").tensor(n),
}


@pytest.mark.parametrize("kind", INTEGERS)
def test_a_whole_number_may_be_of_any_library(kind, model):
    params, prompts, answers = model
    make, stop = INTEGERS[kind], answers[0].tokens[1]
    expected = jaxspec.generate(params, prompts[0], max_new_tokens=6, seed=3, top_k=4, temperature=1.0, num_draft_tokens=3)
    result = jaxspec.generate(
        params, prompts[0], max_new_tokens=make(6), seed=make(3), top_k=make(4), temperature=make(1), num_draft_tokens=make(3)
    )
    assert shown([result]) == shown([expected])
    assert jaxspec.SamplingParams(seed=make(3), top_k=make(4)) == jaxspec.SamplingParams(seed=3, top_k=4)
    for ids in (make(stop), [make(stop)], (make(stop),)):
        result = jaxspec.generate(params, prompts[0], max_new_tokens=6, stop_token_ids=ids)
        assert (result.tokens, result.finish_reason) == (answers[0].tokens[: answers[0].tokens.index(stop) + 1], "stop")


ARRAYS = {
    "numpy": np.array,
    "jax": jnp.array,
    "list of numpy": lambda x: [*np.array(x)],
    "list of jax": lambda x: [*jnp.array(x)],
    "unsigned": lambda x: np.array(x, np.uint16),
    "tuple": tuple,
    "torch": lambda x: pytest.importorskip("torch").tensor(x),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_of_any_library_may_be_a_prompt(kind, model):
    params, _, _ = model
    make, ids = ARRAYS[kind], [[5, 6, 7], [8, 9, 1]]
    expected = jaxspec.generate(params, ids, max_new_tokens=[2, 3])
    one = jaxspec.generate(params, make(ids[0]), max_new_tokens=2)
    assert isinstance(one, jaxspec.GenerationResult) and shown([one]) == shown(expected[:1])
    for batch in (make(ids), [make(ids[0]), make(ids[1])], [ids[0], make(ids[1])]):
        assert shown(jaxspec.generate(params, batch, max_new_tokens=make([2, 3]), seed=make([1, 2]))) == shown(expected)


@pytest.mark.parametrize(
    "prompt", [np.array([1.0]), jnp.array([1.5, 2.0]), np.array([True]), np.zeros((1, 1, 2), int), np.array(3)]
)
def test_arrays_that_are_no_prompts(prompt, model):
    with pytest.raises(ConfigError, match="prompt"):
        jaxspec.generate(model[0], prompt, max_new_tokens=2)


@pytest.mark.parametrize("ids", [5.0, "5", True, [[5.0]], jnp.array([1.5]), np.array(2.0)])
def test_what_is_no_stop_id_is_named(ids, model):
    with pytest.raises(ConfigError, match="stop_token_ids=.* is no token id"):
        jaxspec.generate(model[0], model[1][0], stop_token_ids=ids, max_new_tokens=2)


@pytest.mark.parametrize("rounds", [0, -1, 1.5, True])
def test_a_chunk_has_at_least_one_round(rounds, model):
    with pytest.raises(ConfigError, match="rounds_per_chunk=.* must be a whole number of at least 1"):
        next(jaxspec.stream(model[0], model[1][0], rounds_per_chunk=rounds))


@pytest.mark.parametrize("bias", [{5: 100.0}, [(5, 100.0)], ((5, 100.0),), [{5: 100.0}, {5: 100.0}], [[(5, 100.0)], {5: 90}]])
def test_a_bias_reaches_every_token(bias, model):
    params, prompts, _ = model
    results = jaxspec.generate(params, prompts, draft=tiny.small_draft(), max_new_tokens=6, ignore_eos=True, logit_bias=bias)
    assert [r.tokens for r in results] == [[5] * 6] * 2


def test_biases_of_one_prompt_are_not_those_of_the_other(model):
    params, prompts, answers = model
    results = jaxspec.generate(
        params, prompts, draft=tiny.target(), max_new_tokens=6, ignore_eos=True, logit_bias=[None, {5: 100.0}]
    )
    assert [r.tokens for r in results] == [answers[0].tokens[:6], [5] * 6]


BAD = {
    "both ways": ({"sampling": SamplingParams(), "top_p": 0.5}, "sampling=.*top_p=0.5 as well"),
    "both ways, in lists": ({"sampling": [SamplingParams()] * 2, "temperature": [0.0, 1.0]}, "sampling=.*temperature="),
    "bias beside sampling": ({"sampling": SamplingParams(), "logit_bias": {1: 2.0}}, "sampling=.*logit_bias="),
    "no SamplingParams": ({"sampling": [SamplingParams(), {"top_p": 0.5}]}, "must be a jaxspec.SamplingParams"),
    "too few SamplingParams": ({"sampling": [SamplingParams()]}, "sampling is a list of 1 values, but there are 2 prompts"),
    "too many lengths": ({"max_new_tokens": [1, 2, 3]}, "max_new_tokens is a list of 3 values, but there are 2 prompts"),
    "one wrong value of a list": ({"top_p": [1.0, 2.0]}, "top_p=2.0"),
    "no number": ({"max_new_tokens": [4, 2.5]}, "max_new_tokens=2.5 must be a whole number"),
    "temperatures": ({"temperature": [0.5]}, "temperature is a list of 1 values"),
    "biases": ({"logit_bias": [{1: 1.0}]}, "logit_bias is a list of 1 values"),
    "a bias outside the vocabulary": ({"logit_bias": {tiny.VOCAB: 1.0}}, f"{tiny.VOCAB}"),
    "stops": ({"stop": [["a"]]}, "stop is a list of 1 values"),
    "a stop id outside": ({"stop_token_ids": [[1], [tiny.VOCAB]]}, f"{tiny.VOCAB} is no token id"),
    "flags": ({"ignore_eos": np.array([True])}, "ignore_eos is a list of 1 values"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("call", [jaxspec.generate, jaxspec.stream])
def test_errors_name_the_parameter_at_the_call(name, call, model):
    options, message = BAD[name]
    with pytest.raises(ConfigError, match=message):
        call(model[0], model[1], **options)
