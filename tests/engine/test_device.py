"""The device layer by itself: what the host packs arrives, tables obey their orders, and nobody reads what is not his."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import runtime
from jaxspec.engine import device as device_module
from jaxspec.engine import rows as table
from jaxspec.engine import scheduler as policy
from jaxspec.engine.rows import Layout
from jaxspec.kvcache import LayerKV, is_pool, join, split, take_rows
from jaxspec.round import RoundState, context
from jaxspec.sampling import MAX_BIASES, MAX_STOP_IDS
from jaxspec.sampling_params import SamplingParams
from jaxspec.speculation import Speculation
from tests.drafters import test_rows_join as rows_join
from tests.engine.by_hand import open_core, pair_for, requests_for, restart, run
from tests.engine.cases import NAMES, case_of, texts

LAYOUT, VOCAB = Layout(max_len=40, pages=12, page_size=4), 24
ROWS = 4


def random_admissions(rng: np.random.Generator, count: int) -> list[dict]:
    """Descriptions of rows, with the numbers that are easy to get wrong: large and negative seeds, extreme floats."""
    seeds = [0, -1, 2**63, 2**64 - 1, -(2**63), 12345678901234]
    made = []
    for i in range(count):
        size = int(rng.integers(1, 30))
        bias = tuple((int(t), float(rng.normal())) for t in rng.permutation(VOCAB)[: rng.integers(0, 5)])
        sampling = SamplingParams(
            temperature=float(rng.choice([0.0, 1e-5, 0.7, 3.5])),
            top_k=int(rng.choice([-1, 1, 7])),
            top_p=0.1 + 0.1 * i,
            min_p=0.01 * i,
            repetition_penalty=1.1,
            presence_penalty=-0.3,
            frequency_penalty=0.2,
            min_new_tokens=i,
            logit_bias=bias,
            seed=seeds[i % len(seeds)],
        )
        made.append(
            {
                "row": int(i),
                "length": size // 2,
                "prompt_length": size,
                "fill": size,
                "resumed": bool(i % 2),
                "limit": size + 9,
                "capacity": 4 * (i + 1),
                "rounds_left": 3,
                "drafting": bool((i + 1) % 2),
                "seen": size + i % 2,
                "rounds": 5 * i,
                "proposed": 7 * i,
                "sampling": sampling,
                "stop_ids": tuple(range(i)),
                "ignore_eos": i % 3 == 0,
                "pages": list(range(1, 2 + i)),
                "tokens": rng.integers(0, VOCAB, size).astype(np.int32),
            }
        )
    return made


def random_table(seed: int) -> RoundState:
    """A table of rows without pools, whose leaves all hold something; its drafter's state is a leaf of its own."""
    rng = np.random.default_rng(seed)
    mail = table.pack_admissions(LAYOUT, ROWS, random_admissions(rng, ROWS), VOCAB)
    draft = {"hidden": jnp.asarray(rng.normal(size=(ROWS, 3)), jnp.float32)}
    state = table.state_of(LAYOUT, jnp.asarray(mail), (LayerKV(None, None),), draft)[1]

    def fill(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or x.dtype == jnp.float32:
            return x
        return jnp.asarray(rng.integers(0, 2 if x.dtype == bool else 30, x.shape), x.dtype)

    logs = {
        name: fill(getattr(state, name))
        for name in ("tokens", "from_draft", "round_of", "proposed_upto", "done", "stopped", "broken")
    }
    return dataclasses.replace(state, **logs)


def leaves(state) -> list[np.ndarray]:
    """All leaves as arrays, keys as their words."""
    found = jax.tree.leaves(state)
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in found]


def assert_same(ours, theirs) -> None:
    for x, y in zip(leaves(ours), leaves(theirs), strict=True):
        np.testing.assert_array_equal(x, y)


def test_admissions_arrive_as_they_were_packed():
    asked = random_admissions(np.random.default_rng(1), 6)
    mail = table.pack_admissions(LAYOUT, 8, asked, VOCAB)
    assert mail.dtype == np.int32 and mail.shape == (8, table.admission_width(LAYOUT))
    found = {name: np.asarray(x) for name, x in table.unpack_admissions(LAYOUT, jnp.asarray(mail)).items()}
    at, state = jax.jit(lambda m: table.state_of(LAYOUT, m, (), ()))(mail)
    for i, one in enumerate(asked):
        for name in one.keys() - {"sampling", "stop_ids", "pages", "tokens"}:
            assert found[name][i] == one[name], name
        sampling = one["sampling"]
        for name in table.FLOATS[1:]:
            assert found[name][i] == np.float32(getattr(sampling, name)), name
        assert found["greedy"][i] == sampling.is_greedy and found["min_new_tokens"][i] == sampling.min_new_tokens
        words = np.asarray(jax.random.key_data(state.keys))[i].astype(np.uint64)
        assert int(words[0]) << 32 | int(words[1]) == sampling.seed % 2**64
        assert found["table"][i].tolist() == one["pages"] + [0] * (LAYOUT.pages - len(one["pages"]))
        assert found["tokens"][i, : len(one["tokens"])].tolist() == one["tokens"].tolist()
        assert sorted(t for t in found["stop_ids"][i].tolist() if t >= 0) == list(one["stop_ids"])
        biases = dict(zip(found["bias_ids"][i].tolist(), found["bias_values"][i].tolist(), strict=True))
        assert all(biases[t] == np.float32(v) for t, v in sampling.logit_bias)
        assert found["stop_ids"].shape[1] == MAX_STOP_IDS and found["bias_ids"].shape[1] == MAX_BIASES
    assert np.asarray(at)[6:].min() >= 2**30, "rows beyond the list must go nowhere"
    assert not np.asarray(state.done).any() and not np.asarray(state.round_of).any()


def test_admission_overwrites_its_rows_and_no_others():
    rng, rows = np.random.default_rng(2), random_table(3)
    asked = [{**one, "row": at} for one, at in zip(random_admissions(rng, 2), (3, 1), strict=True)]
    mail = jnp.asarray(table.pack_admissions(LAYOUT, 8, asked, VOCAB))
    fresh = {"hidden": jnp.full((8, 3), 5.0)}
    after = jax.jit(lambda r, m: table.admit(LAYOUT, r, m, fresh))(rows, mail)
    state = table.state_of(LAYOUT, mail, (LayerKV(None, None),), fresh)[1]
    for row, source in ((0, None), (1, 1), (2, None), (3, 0)):
        expected = take_rows(rows if source is None else state, jnp.array([row if source is None else source]))
        assert_same(take_rows(after, jnp.array([row])), expected)


def test_orders_end_rows_clear_tables_and_grant_pages():
    obey = jax.jit(table.obey)
    for seed in range(20):
        rng, rows = np.random.default_rng(seed), random_table(seed)
        finish = {int(r): int(rng.integers(0, 4)) for r in rng.permutation(ROWS)[: rng.integers(0, ROWS + 1)]}
        places = [(r, c) for r in range(ROWS) for c in range(LAYOUT.pages)]
        grants = [(*places[i], int(rng.integers(1, 99))) for i in rng.permutation(len(places))[: rng.integers(0, 9)]]
        capacity = {int(r): int(rng.integers(0, 50)) for r in rng.permutation(ROWS)[:2]}
        rounds = int(rng.choice([table.KEEP, 0, 6]))
        after = obey(rows, table.pack_orders(ROWS, 8, finish, grants, capacity, rounds))

        pages, slots, done = (np.array(x) for x in (rows.cache.page_table, rows.capacity, rows.done))
        for row, kind in finish.items():
            done[row] |= kind in (table.DONE, table.DONE_AND_CLEAR)
            if kind in (table.DONE_AND_CLEAR, table.CLEAR):
                pages[row], slots[row] = 0, 0
        for row, column, page in grants:
            pages[row, column] = page
        for row, count in capacity.items():
            slots[row] = count
        left = np.array(rows.rounds_left) if rounds == table.KEEP else np.full(ROWS, rounds)
        pages, slots, done, left = (jnp.asarray(x) for x in (pages, slots, done, left))
        cache = dataclasses.replace(rows.cache, page_table=pages)
        assert_same(after, dataclasses.replace(rows, cache=cache, capacity=slots, done=done, rounds_left=left))


def test_regrouping_moves_rows_and_empties_the_others():
    rows = random_table(5)
    for moves in ([2, 0], [1], [0, 1, 2, 3, -1, -1, -1, -1], [3, -1, 1, -1], [-1]):
        after = jax.jit(table.regroup)(rows, np.asarray(moves, np.int32))
        for at, source in enumerate(moves):
            row = take_rows(after, jnp.array([at]))
            if source >= 0:
                assert_same(row, take_rows(rows, jnp.array([source])))
            else:
                assert row.done[0] and not np.asarray(row.cache.page_table).any() and row.capacity[0] == 0


def test_blocks_are_copies_of_rows_and_only_the_last_ones_go_back():
    rows = dataclasses.replace(random_table(6), done=jnp.zeros(ROWS, bool))
    blocks = np.array([[2, 0], [2, 4], [2, 8], [0, 3], [-1, -1], [-1, -1]], np.int32)
    taken, continued = jax.jit(table.take_blocks)(rows, blocks)
    assert continued.tolist() == [True, True, False, False, False, False]
    assert taken.done.tolist() == [False] * 4 + [True] * 2 and taken.cache.length[:4].tolist() == [0, 4, 8, 3]
    for at, row in enumerate((2, 2, 2, 0)):
        copy = take_rows(taken, jnp.array([at]))
        length = take_rows(rows, jnp.array([row])).cache.length
        assert_same(
            dataclasses.replace(copy, cache=dataclasses.replace(copy.cache, length=length)), take_rows(rows, jnp.array([row]))
        )
    changed = dataclasses.replace(taken, rounds=taken.rounds + jnp.arange(6) + 100)
    after = jax.jit(table.put_blocks)(rows, changed, blocks, continued)
    for row, at in ((0, 3), (1, None), (2, 2), (3, None)):
        source, index = (rows, row) if at is None else (changed, at)
        assert_same(take_rows(after, jnp.array([row])), take_rows(source, jnp.array([index])))


def test_reports_carry_every_token_once():
    """Against a model that knows the whole text: rows grow by random steps, a window may be too narrow for a step."""
    rng = np.random.default_rng(8)
    rows = random_table(9)
    fill, limit = np.array([5, 9, 3, 7]), np.array([30, 20, 39, 12])
    length = np.array([2, 9, 0, 6])
    seen = fill + np.array([0, 1, 0, 0])  # the second one is resumed: its bonus token is known
    rows = dataclasses.replace(
        rows,
        fill=jnp.asarray(fill),
        limit=jnp.asarray(limit),
        seen=jnp.asarray(seen),
        cache=dataclasses.replace(rows.cache, length=jnp.asarray(length)),
    )
    report = jax.jit(table.report, static_argnames=("window", "rounds"))
    told = [[] for _ in range(ROWS)]
    logs = [np.asarray(x) for x in (rows.tokens, rows.from_draft, rows.round_of, rows.proposed_upto)]
    for turn in range(30):
        step = rng.integers(0, 5, ROWS) * (turn < 20)
        length = np.where(length < fill, np.minimum(length + step, fill), np.minimum(length + step, limit - 1))
        rows = dataclasses.replace(rows, cache=dataclasses.replace(rows.cache, length=jnp.asarray(length)))
        rows, packed = report(rows, window=3, rounds=4)
        heard = device_module.Flight("rounds", packed).result()
        assert (np.asarray(rows.rounds_left) == 4).all()
        for i, news in enumerate(heard.rows):
            flags = (news.done, news.stopped, news.broken)
            assert (news.length, *flags) == (length[i], bool(rows.done[i]), bool(rows.stopped[i]), bool(rows.broken[i]))
            assert (news.rounds, news.proposed) == (int(rows.rounds[i]), int(rows.proposed[i]))
            columns = (news.tokens, news.from_draft, news.round_of, news.proposed_upto)
            told[i] += list(zip(*(np.asarray(c).tolist() for c in columns), strict=True))
    for i in range(ROWS):
        end = min(length[i] + 1, limit[i]) if length[i] >= fill[i] else seen[i]
        assert told[i] == list(zip(*(log[i, seen[i] : end].tolist() for log in logs), strict=True))
        assert int(rows.seen[i]) == end


@pytest.mark.parametrize("name", NAMES)
def test_split_and_join_are_inverses_on_every_drafters_state(name):
    made = case_of(name)
    chosen = Speculation.choose(made.params, made.draft, made.algorithm, made.spec)
    shapes = jax.eval_shape(lambda tree: chosen.program.drafter.init(tree, 3, 5, 4, 40, "float32"), chosen.draft_tree)
    state, count = jax.tree.flatten(shapes)
    state = count.unflatten([np.full(x.shape, i) for i, x in enumerate(state)])
    pools, rows = split(state)
    assert all(isinstance(pool, LayerKV) and pool.k.shape[:2] == (5, 4) for pool in pools)
    assert all(x.shape[0] == 3 for x in jax.tree.leaves(rows)), "a row's leaf has the batch in front"
    again = join(pools, rows)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert all(x is y for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True))
    pools_again, rows_again = split(again)
    assert [id(x) for pool in pools for x in pool] == [id(x) for pool in pools_again for x in pool]
    assert jax.tree.structure(rows_again) == jax.tree.structure(rows)
    assert not any(is_pool(x) and x.k is not None for x in jax.tree.leaves(rows, is_leaf=is_pool))


@pytest.mark.parametrize("name", ["eagle3 tree", "mtp layer per step", "dflash tree", "uno tree"])
def test_nan_in_free_pages_and_idle_rows_changes_nothing(name):
    """The other files poison before every launch as well; here it is compared with a run that does not, bit for bit."""
    core = open_core(name, buckets=(4,), block=8)
    prompts = texts(name, (11, 7, 18, 3, 9), seed=15)

    def answers(poison: bool) -> list:
        fresh = restart(core, pipeline_depth=1)  # so that both runs hear everything at the same time
        if not poison:
            fresh.device.scheduler = None
        asked = requests_for(name, prompts, max_new_tokens=[6, 12, 3, 9, 4], temperature=[0.0, 1.0, 0.5, 0.0, 1.0])
        told = [one.answer for one in run(fresh, asked)]
        held = {node.page for node in fresh.scheduler.prefix.nodes()}
        pages = np.array(sorted(held))
        return told, [np.asarray(x)[pages] for pool in fresh.device.memory.pools for x in pool]

    (told, pages), (expected, clean) = answers(True), answers(False)
    assert told == expected
    for ours, theirs in zip(pages, clean, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.isfinite(ours).all()


# Safety rules: without each of them, something above or beside fails.

RULES = "standalone tree"


@pytest.fixture(scope="module")
def rules():
    """A core on which rules are broken, and two prompts with their right answers."""
    core = open_core(RULES)
    prompts = texts(RULES, (9, 14), seed=16)
    return core, prompts, [[one.answer for one in run(restart(core), pair_for(RULES, p, 12))] for p in prompts]


@pytest.mark.parametrize("case", ["standalone", "eagle3", "dflash", "uno"])
def test_drafters_that_write_for_rows_that_take_no_part_are_found_out(case, monkeypatch):
    def everyone(program, params, state, active, allowed=None):
        return context(program, params, state, jnp.ones_like(active), allowed)

    monkeypatch.setattr(rows_join, "context", everyone)
    for function in (rows_join.propose, rows_join.update):
        function.clear_cache()
    try:
        with pytest.raises(AssertionError):
            rows_join.test_rows_that_take_no_part_change_nothing(case)
    finally:
        for function in (rows_join.propose, rows_join.update):
            function.clear_cache()


def second_row_after_an_abort(core) -> tuple:
    """The answer of a request that gets the pages, but not the row, of one that was aborted in mid-stream."""
    [short] = requests_for(RULES, [[1, 2, 3]], max_new_tokens=4)
    [doomed] = requests_for(RULES, [[4, 5, 6, 7]], max_new_tokens=80)
    [last] = requests_for(RULES, texts(RULES, (19,), seed=16), max_new_tokens=40)
    pool = core.scheduler.pool
    spare = pool.take(pool.total - 24)  # so few are left that pages are used again at once
    core.check_pages = False
    for request in (short, doomed):
        core.submit(request)
    tokens, ended, aborted = [], 0, False
    for _ in range(2000):
        for delta in core.step():
            ended += delta.rid == short.rid and delta.reason is not None
            tokens += delta.tokens if delta.rid == last.rid else []
        if ended and not aborted:
            aborted = True
            core.abort(doomed.rid)
            core.scheduler.prefix.reset()
            core.submit(last)
        if aborted and core.idle:
            break
    pool.release(spare)
    return tuple(tokens)


def test_a_retired_rows_table_is_cleared_before_its_pages_are_used_again(rules, monkeypatch):
    core, *_ = rules
    [last] = requests_for(RULES, texts(RULES, (19,), seed=16), max_new_tokens=40)
    expected = tuple(run(restart(core), [last])[0].tokens)
    assert second_row_after_an_abort(restart(core)) == expected
    monkeypatch.setattr(policy.Scheduler, "_clear_table", lambda self, index, order: None)
    assert second_row_after_an_abort(restart(core)) != expected


def test_rows_own_slack_behind_their_prefill(rules, monkeypatch):
    core, prompts, expected = rules
    asked = lambda: pair_for(RULES, prompts[0], 20 - len(prompts[0]))  # noqa: E731  its last page is full
    assert core.scheduler.limits.slack > core.scheduler.limits.max_accept + 1  # so no round ends a row that could begin one
    assert [one.tokens for one in run(restart(core), asked())] == [tokens[: 20 - len(prompts[0])] for tokens, *_ in expected[0]]
    monkeypatch.setattr(policy, "table_slots", lambda reach, slack: reach)
    with pytest.raises(AssertionError, match="the core makes no progress"):
        run(restart(core), asked(), most_steps=200)


def test_a_report_moves_what_was_seen(rules, monkeypatch):
    core, prompts, expected = rules

    def forgetful(rows, window, rounds):
        after, packed = table.report(rows, window, rounds)
        return dataclasses.replace(after, seen=rows.seen), packed

    monkeypatch.setattr(device_module, "report_program", jax.jit(forgetful, static_argnames=("window", "rounds")))
    try:
        told = [one.answer for one in run(restart(core), pair_for(RULES, prompts[0], 12), most_steps=200)]
    except Exception as error:
        told = error
    assert told != expected[0]
    runtime.forget_compiled()
