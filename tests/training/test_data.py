"""Training rows: order, storage, splitting, and overlaps with evaluation prompts."""

import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.config import ConfigError
from jaxspec.training import data
from jaxspec.training.data import Data, batch_rows
from tests import tiny


def rows(count=9, length=20, seed=0):
    rng = np.random.default_rng(seed)
    temperatures = rng.choice([0.0, 0.7], count).astype(np.float32)
    tokens = rng.integers(0, 50, (count, length)).astype(np.int32)
    return Data(tokens, rng.random((count, length)) < 0.5, temperatures, {"seed": seed})


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_every_epoch_reads_every_row_once(count, batch, seed):
    steps = -(-2 * count // batch)
    read = np.concatenate([batch_rows(count, batch, seed, step) for step in range(steps)])
    assert sorted(read[:count]) == sorted(read[count : 2 * count]) == list(range(count))
    np.testing.assert_array_equal(batch_rows(count, batch, seed, steps - 1), read[-batch:])


def test_epochs_and_seeds_differ_in_order():
    first, second, other = batch_rows(50, 50, 0, 0), batch_rows(50, 50, 0, 1), batch_rows(50, 50, 1, 0)
    assert (first != second).any() and (first != other).any()


@pytest.mark.parametrize("largest", [49, 70_000])
def test_a_file_gives_back_the_rows(tmp_path, largest):
    made = rows()
    made.tokens[0, 0] = largest
    made.save(tmp_path / "deep" / "rows.npz")
    found = data.load(tmp_path / "deep" / "rows.npz")
    for name in ("tokens", "supervised", "temperatures"):
        np.testing.assert_array_equal(getattr(found, name), getattr(made, name))
    assert found.about == made.about and found.tokens.dtype == np.int32
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["rows.npz"]


def test_a_file_has_the_usual_mode_and_an_error_leaves_nothing(tmp_path):
    made = rows()
    (tmp_path / "plain").touch()
    made.save(tmp_path / "rows.npz")
    assert (tmp_path / "rows.npz").stat().st_mode == (tmp_path / "plain").stat().st_mode
    before = (tmp_path / "rows.npz").read_bytes()
    with pytest.raises(TypeError):
        data.Data(made.tokens, made.supervised, made.temperatures, {"no JSON": object()}).save(tmp_path / "rows.npz")
    assert sorted(os.listdir(tmp_path)) == ["plain", "rows.npz"] and (tmp_path / "rows.npz").read_bytes() == before


def test_another_file_is_refused(tmp_path):
    rows().save(tmp_path / "good.npz")
    np.savez(tmp_path / "other.npz", tokens=np.zeros((1, 1)))
    np.save(tmp_path / "array.npy", np.zeros((2, 3)))
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "empty.npz").touch()
    (tmp_path / "cut.npz").write_bytes((tmp_path / "good.npz").read_bytes()[:-40])
    made = rows()
    Data(made.tokens, made.supervised, made.temperatures[:-1], {}).save(tmp_path / "short.npz")
    made.take(slice(0)).save(tmp_path / "none.npz")
    for name in ("other.npz", "array.npy", "text.npz", "empty.npz", "cut.npz", "short.npz", "none.npz", "absent.npz"):
        with pytest.raises(ConfigError, match=name):
            data.load(tmp_path / name)


def test_greedy_rows_are_held_out_first():
    made = rows(40)
    kept, held_out = made.split(5)
    assert len(kept.tokens) == 35 and (held_out.temperatures == 0).all() and made.temperatures.any()
    together = {row.tobytes() for row in kept.tokens} | {row.tobytes() for row in held_out.tokens}
    assert together == {row.tobytes() for row in made.tokens}
    with pytest.raises(ConfigError, match="held out"):
        made.split(40)


def test_rows_that_are_equal_count_once():
    made = rows(20)
    twice = made.take(np.array([3, 0, 1, 2, 3, 4, 5, 6, 3, 7, 0]))
    found = twice.distinct()
    np.testing.assert_array_equal(found.tokens, made.tokens[[3, 0, 1, 2, 4, 5, 6, 7]])
    np.testing.assert_array_equal(found.temperatures, made.temperatures[[3, 0, 1, 2, 4, 5, 6, 7]])
    kept, held_out = twice.split(4)
    assert len(kept.tokens) == len(held_out.tokens) == 4
    assert not {row.tobytes() for row in kept.tokens} & {row.tobytes() for row in held_out.tokens}
    with pytest.raises(ConfigError, match="8 different"):
        twice.split(8)


def test_counts_are_those_of_answers():
    made = rows()
    counts = made.counts(60)
    assert counts.sum() == made.supervised.sum() and counts[50:].sum() == 0
    assert counts[7] == ((made.tokens == 7) & made.supervised).sum()


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_overlaps_are_those_of_equal_windows(draw):
    size = draw.draw(st.integers(1, 4))
    tokens = np.array(draw.draw(st.lists(st.lists(st.integers(0, 2), min_size=9, max_size=9), min_size=1, max_size=4)))
    texts = draw.draw(st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=3))
    known = {tuple(t[i : i + size]) for t in texts for i in range(len(t) - size + 1)}
    expected = [any(tuple(row[i : i + size]) in known for i in range(9 - size + 1)) for row in tokens.tolist()]
    assert data.overlapping(tokens, texts, size).tolist() == expected


def test_a_run_of_thirteen_tokens_is_an_overlap_and_of_twelve_is_none():
    tokens = np.random.default_rng(0).integers(0, 49_152, (3, 64))
    assert data.overlapping(tokens, [tokens[1, 20:33]]).tolist() == [False, True, False]
    assert not data.overlapping(tokens, [tokens[1, 20:32]]).any()
    assert not data.overlapping(tokens, []).any()


def test_prompt_files(tmp_path):
    file = tmp_path / "prompts.jsonl"
    texts = [{"turns": ["ONE\u2028LINE", "TWO"]}, {"prompt": "THREE", "id": 3}]
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in texts) + "\n\n", encoding="utf-8")
    assert list(data.read_jsonl(file)) == [["ONE\u2028LINE", "TWO"], ["THREE"]]
    file.write_text('{"text": "no turns"}\n')
    with pytest.raises(ConfigError, match="prompts.jsonl:1 needs a key 'turns'"):
        list(data.read_jsonl(file))
    file.write_text('{"prompt": "A"}\nnot json\n')
    with pytest.raises(ConfigError, match="prompts.jsonl:2 is not JSON"):
        list(data.read_jsonl(file))


def test_excluded_turns_are_found_within_a_row(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"turns": ["SHORT", "A TEXT OF MORE THAN THIRTEEN CHARACTERS"]}) + "\n")
    texts = data.exclusion_texts([file], tiny.CharTokenizer())
    inside = tiny.CharTokenizer().encode("THIS HOLDS MORE THAN THIRTEEN OF THEM")
    apart = tiny.CharTokenizer().encode("THIS ONE IS SHORT AND HAS NOTHING ...")
    assert data.overlapping(np.array([inside, apart]), texts).tolist() == [True, False]
    with pytest.raises(ConfigError, match="tokenizer"):
        data.exclusion_texts([file], None)
