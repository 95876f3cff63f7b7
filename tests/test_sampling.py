import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import sampling
from jaxspec.config import ConfigError
from jaxspec.sampling import ACCEPT, DRAFT, FINAL, SamplingParams, round_keys, row_keys, sampling_state, tagged
from jaxspec.trees.tree import from_parents, pack_bits, root_only

V = 37
coins = jax.jit(sampling.coins, static_argnums=1)
probabilities = jax.jit(sampling.probabilities)
process_logits = jax.jit(sampling.process_logits)


def state_of(*params: SamplingParams, vocab: int = V, stops=(), ignore_eos: bool = False):
    return sampling_state(params, vocab, [stops] * len(params), [ignore_eos] * len(params))


def plain(logits, state, history=((0,),), prompt_length=1, allowed=None):
    """One position of every row, as in plain decoding; logits [B, V]."""
    history = jnp.asarray(history, jnp.int32)
    lengths = jnp.full(len(history), history.shape[1])
    prompts = jnp.full(len(history), prompt_length)
    return process_logits(logits[:, None], state, root_only(history[:, -1]), history, lengths, prompts, allowed)[:, 0]


@pytest.mark.parametrize(
    "name, value, bound",
    [
        ("temperature", -0.1, ">= 0"),
        ("temperature", float("nan"), ">= 0"),
        ("temperature", float("inf"), "finite"),
        ("temperature", "hot", ">= 0"),
        ("top_k", 0, ">= 1"),
        ("top_k", 2.5, "whole"),
        ("top_k", True, "whole"),
        ("top_p", 0.0, r"\(0, 1\]"),
        ("top_p", 1.01, r"\(0, 1\]"),
        ("min_p", -0.1, r"\[0, 1\]"),
        ("min_p", 1.1, r"\[0, 1\]"),
        ("repetition_penalty", 0.0, r"\(0, 2\]"),
        ("repetition_penalty", 2.1, r"\(0, 2\]"),
        ("presence_penalty", 2.1, r"\[-2, 2\]"),
        ("frequency_penalty", -2.1, r"\[-2, 2\]"),
        ("min_new_tokens", -1, ">= 0"),
        ("seed", 2**64, "64-bit"),
        ("seed", 1.5, "64-bit"),
    ],
)
def test_bad_values_name_parameter_value_and_bound(name, value, bound):
    with pytest.raises(ConfigError, match=bound) as error:
        SamplingParams(**{name: value})
    assert f"{name}={value!r}" in str(error.value)


@pytest.mark.parametrize("bias", [((-1, 1.0),), ((3, float("inf")),), (3,), 7])
def test_bad_logit_bias(bias):
    with pytest.raises(ConfigError, match="logit_bias"):
        SamplingParams(logit_bias=bias)


def test_logit_bias_outside_the_vocabulary():
    with pytest.raises(ConfigError, match=f"id {V}, but the vocabulary has {V}"):
        state_of(SamplingParams(logit_bias=((V, 1.0),)))


def test_params_are_hashable_and_take_a_mapping():
    assert hash(SamplingParams(logit_bias={3: 1})) == hash(SamplingParams(logit_bias=((3, 1.0),)))


@pytest.mark.parametrize("params, greedy", [({}, True), ({"temperature": 1e-7}, True), ({"temperature": 1e-6}, False)])
def test_greedy_threshold(params, greedy):
    assert SamplingParams(**params).is_greedy is greedy


def test_top_k_of_one_is_greedy():
    assert SamplingParams(temperature=1.0, top_k=1).is_greedy


def test_the_class_says_what_the_program_needs():
    def of_class(*params):
        return state_of(*params).of_class

    assert of_class(SamplingParams()) == "greedy"
    assert of_class(SamplingParams(top_p=0.5)) == "greedy"
    assert of_class(SamplingParams(), SamplingParams(temperature=1.0)) == "sampled"
    assert of_class(SamplingParams(temperature=1.0, min_p=0.1)) == "sampled"
    assert of_class(SamplingParams(frequency_penalty=0.1), SamplingParams(temperature=1.0)) == "full"
    assert of_class(SamplingParams(min_new_tokens=1)) == "full"
    assert of_class(SamplingParams(logit_bias={1: 1.0})) == "full"


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_a_program_of_a_larger_class_gives_the_same_bits(seed, sampled):
    """So that a request's answer does not depend on what its neighbours ask for."""
    random = np.random.default_rng(seed)
    state = (
        state_of(SamplingParams(temperature=0.7, top_p=0.9), SamplingParams()) if sampled else state_of(*[SamplingParams()] * 2)
    )
    logits = jnp.asarray(random.normal(size=(2, 1, V)), jnp.float32)
    tree = root_only(jnp.asarray([1, 2]))
    results = []
    for name in (state.of_class, "full"):
        one = state.at_class(name)
        out = process_logits(logits, one, tree, jnp.asarray([[1, 3, 2]] * 2), jnp.asarray([3, 3]), jnp.asarray([1, 1]))
        results.append((out, probabilities(out, one)) if sampled else (out,))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_a_row_has_no_room_for_is_refused():
    with pytest.raises(ConfigError, match="17 stop ids.*at most 16"):
        state_of(SamplingParams(), stops=tuple(range(17)))
    with pytest.raises(ConfigError, match="logit_bias has 513 entries; at most 512"):
        sampling_state([SamplingParams(logit_bias={i: 1.0 for i in range(513)})], 1000, [()], [False])


def reference_probabilities(logits, params: SamplingParams):
    """Sorts, in float64: temperature, top_k, top_p, min_p, ties of the last token kept."""
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    if params.top_k > 0:
        p = np.where(p >= np.sort(p)[-min(params.top_k, len(p))], p, 0)
        p /= p.sum()
    if params.top_p < 1:
        down = np.sort(p)[::-1]
        last = min(int(np.searchsorted(np.cumsum(down), params.top_p)), len(p) - 1)
        p = np.where(p >= down[last], p, 0)
        p /= p.sum()
    p = np.where(p >= params.min_p * p.max(), p, 0)
    return p / p.sum()


def test_probabilities_match_sorting():
    random = np.random.default_rng(0)
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t in (0.3, 1.0, 1.7)
        for k in (-1, 2, 5, V, 10**6)
        for p in (0.05, 0.6, 0.95, 1.0)
        for m in (0.0, 0.07)
    ]
    logits = random.normal(size=(len(params), 2, V)).astype(np.float32) * 3
    got = probabilities(jnp.asarray(logits), state_of(*params))
    for row, many, p in zip(got, logits, params, strict=True):
        for position, values in zip(row, many, strict=True):
            np.testing.assert_allclose(position, reference_probabilities(values.astype(np.float64), p), atol=2e-6)


def test_ties_of_the_last_kept_token_stay():
    logits = jnp.asarray([[[3.0, 1.0, 2.0, 2.0, 2.0]]])
    kept = probabilities(logits, state_of(SamplingParams(temperature=1.0, top_k=2), vocab=5)) > 0
    assert kept[0, 0].tolist() == [True, False, True, True, True]


def test_cut_is_exact_between_neighbouring_floats():
    values = np.float32(1.0) + np.arange(8, dtype=np.float32) * np.spacing(np.float32(1.0))
    for k in range(1, 9):
        params = SamplingParams(temperature=1.0, top_k=k) if k > 1 else SamplingParams(temperature=1.0, top_p=1e-9)
        kept = probabilities(jnp.asarray(values)[None, None], state_of(params, vocab=8))[0, 0] > 0
        assert kept.tolist() == [i >= 8 - k for i in range(8)]


def test_greedy_rows_are_one_hot_at_the_first_maximum():
    logits = jnp.asarray([[[1.0, 5.0, 5.0, 2.0]], [[1.0, 5.0, 5.0, 2.0]]])
    probs = probabilities(logits, state_of(SamplingParams(), SamplingParams(temperature=1.0, top_k=2), vocab=4))
    assert probs[0, 0].tolist() == [0, 1, 0, 0]
    np.testing.assert_allclose(probs[1, 0], [0, 0.5, 0.5, 0])


def test_small_temperatures_do_not_overflow():
    state = state_of(SamplingParams(temperature=1e-6), vocab=3)
    logits = process_logits(
        jnp.asarray([[[jnp.inf, -jnp.inf, jnp.nan]]]),
        state,
        root_only(jnp.zeros(1, jnp.int32)),
        jnp.zeros((1, 1), jnp.int32),
        jnp.ones(1, jnp.int32),
        jnp.ones(1, jnp.int32),
    )
    assert probabilities(logits, state)[0, 0].tolist() == [1, 0, 0]


def test_nan_logits_give_tokens_of_the_vocabulary():
    state = state_of(SamplingParams(), SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1))
    bad = jnp.full((2, V), jnp.nan)
    one_good = bad.at[:, 5].set(-100.0)
    history = [[1, 2]] * 2
    np.testing.assert_array_equal(jnp.argmax(plain(one_good, state, history), -1), 5)
    np.testing.assert_array_equal(probabilities(plain(one_good, state, history)[:, None], state)[:, 0, 5], 1)
    for logits in (bad, jnp.full((2, V), -jnp.inf)):
        out = plain(logits, state, history)
        np.testing.assert_allclose(probabilities(out[:, None], state).sum(-1), 1, atol=1e-6)
    words = pack_bits(jnp.arange(V) == 11)[None, None].repeat(2, 0)
    out = plain(bad, state, history, allowed=words)
    np.testing.assert_array_equal(jnp.argmax(out, -1), 11)
    nothing = plain(bad, state, history, allowed=jnp.zeros_like(words))
    assert np.isfinite(probabilities(nothing[:, None], state)).all()


def test_numbers_of_a_row_do_not_depend_on_the_batch():
    seeds = [5, 2**40 + 5, -1, 0]
    lengths = jnp.asarray([7, 7, 100, 3])
    many, many_final = coins(round_keys(row_keys(seeds), lengths), 9)
    for i, seed in enumerate(seeds):
        one, one_final = coins(round_keys(row_keys([seed]), lengths[i : i + 1]), 4)
        np.testing.assert_array_equal(one[0], many[i, :4])
        np.testing.assert_array_equal(one_final[0], many_final[i])
    assert len(np.unique(np.concatenate([many.ravel(), many_final]))) == 4 * 10
    assert (many >= 0).all() and (many < 1).all()


def test_seed_length_and_use_are_kept_apart():
    keys = row_keys([5])
    rounds = [round_keys(keys, jnp.asarray([n])) for n in (3, 4)]
    used = [tagged(r, tag) for r in rounds for tag in (DRAFT, ACCEPT, FINAL)]
    data = {tuple(np.asarray(jax.random.key_data(k)).ravel().tolist()) for k in used + rounds + [keys]}
    assert len(data) == 9


PENALTIES = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.7, frequency_penalty=0.4),
    SamplingParams(repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=1.1, min_new_tokens=4),
    SamplingParams(min_new_tokens=3, logit_bias={2: 5.0, 7: -3.0}),
]


def test_penalties_of_one_position():
    history = np.array([[3, 3, 5, 8, 8, 8]] * 4)
    logits = np.random.default_rng(0).normal(size=(4, V)).astype(np.float32)
    got = plain(jnp.asarray(logits), state_of(*PENALTIES, stops=(2, 4)), history, prompt_length=3)
    for row, before, tokens, p in zip(got, logits, history, PENALTIES, strict=True):
        want = before.copy()
        counts = np.bincount(tokens[3:], minlength=V)
        want -= p.frequency_penalty * counts + p.presence_penalty * (counts > 0)
        seen = np.isin(np.arange(V), tokens)
        want = np.where(seen, np.where(want > 0, want / p.repetition_penalty, want * p.repetition_penalty), want)
        for token, value in p.logit_bias:
            want[token] += value
        if p.min_new_tokens > 3:
            want[[2, 4]] = -np.inf
        np.testing.assert_allclose(row, want, rtol=1e-6)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32 - 1))
def test_every_node_sees_what_plain_decoding_would_see(seed):
    random = np.random.default_rng(seed)
    batch, nodes, prompt, length = len(PENALTIES), 7, 3, 5
    parent = np.array([[-1] + [random.integers(0, i) for i in range(1, nodes)] for _ in range(batch)], np.int32)
    tokens = random.integers(0, 9, (batch, nodes)).astype(np.int32)
    history = random.integers(0, 9, (batch, 12)).astype(np.int32)
    history[:, length - 1] = tokens[:, 0]
    build = jax.jit(from_parents, static_argnames="max_depth")
    tree = build(jnp.asarray(tokens), jnp.asarray(parent), jnp.ones((batch, nodes), bool), max_depth=nodes - 1)
    logits = random.normal(size=(batch, nodes, V)).astype(np.float32)
    words = pack_bits(jnp.asarray(random.random((batch, nodes, V)) < 0.8))
    state = state_of(*PENALTIES, stops=(2, 4))
    ones = jnp.ones(batch, jnp.int32)
    whole = process_logits(jnp.asarray(logits), state, tree, jnp.asarray(history), length * ones, prompt * ones, words)
    for t in range(nodes):
        plain_history, plain_length = history.copy(), np.full(batch, length)
        for b in range(batch):
            path, node = [], t
            while node > 0:
                path.append(tokens[b, node])
                node = parent[b, node]
            plain_history[b, length : length + len(path)] = path[::-1]
            plain_length[b] += len(path)
        last = np.take_along_axis(plain_history, plain_length[:, None] - 1, 1)[:, 0]
        want = process_logits(
            jnp.asarray(logits[:, t : t + 1]),
            state,
            root_only(jnp.asarray(last)),
            jnp.asarray(plain_history),
            jnp.asarray(plain_length),
            prompt * ones,
            words[:, t : t + 1],
        )
        np.testing.assert_allclose(whole[:, t], want[:, 0], rtol=1e-6)


def test_padding_of_stop_ids_bans_no_token():
    params = [SamplingParams(min_new_tokens=2)] * 2
    state = sampling_state(params, V, [[1], [1, 2, 3]], [False, False])
    banned = np.isneginf(plain(jnp.zeros((2, V)), state, [[0], [0]]))
    assert [np.flatnonzero(row).tolist() for row in banned] == [[1], [1, 2, 3]]


def test_min_new_tokens_counts_the_output_only():
    state = state_of(SamplingParams(min_new_tokens=2), stops=(1,))
    for outputs, banned in ((0, True), (1, True), (2, False)):
        out = plain(jnp.zeros((1, V)), state, [[9] * (4 + outputs)], prompt_length=4)
        assert bool(jnp.isneginf(out[0, 1])) is banned


def test_tokens_outside_the_vocabulary_are_ignored():
    state = state_of(SamplingParams(frequency_penalty=1.0))
    tree = from_parents(jnp.asarray([[1, V, -1, 2]]), jnp.asarray([[-1, 0, 1, 2]]), jnp.ones((1, 4), bool), max_depth=3)
    out = process_logits(jnp.zeros((1, 4, V)), state, tree, jnp.asarray([[V + 5, -7, 1]]), jnp.asarray([3]), jnp.asarray([1]))
    assert [np.flatnonzero(row).tolist() for row in np.asarray(out[0])] == [[1], [1], [1], [1, 2]]


def test_rows_without_a_parameter_keep_their_logits():
    state = state_of(SamplingParams(), SamplingParams(repetition_penalty=1.5, logit_bias={1: 2.0}))
    logits = jax.random.normal(jax.random.key(0), (2, V))
    out = plain(logits, state, [[1, 2, 3]] * 2)
    np.testing.assert_array_equal(out[0], logits[0])
    assert (out[1] != logits[1]).sum() == 3


def test_state_can_be_gathered_by_row():
    state = state_of(*PENALTIES, stops=(2, 4))
    picked = jax.tree.map(lambda x: x[jnp.asarray([2, 0])], state)
    assert picked.min_new_tokens.tolist() == [4, 0]
    assert picked.at_class("greedy").of_class == "greedy" and picked.of_class == "full"
