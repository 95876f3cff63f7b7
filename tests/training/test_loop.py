"""The training loop: losses that fall, interruptions that change nothing, heads that load and draft, budgets that are kept."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import train as command
from jaxspec.config import ConfigError
from jaxspec.files.errors import ConversionError
from jaxspec.models.forward import forward
from jaxspec.training import eagle3, heads, loop, standalone, state
from jaxspec.training.loop import TrainOptions, learning_rate_at, train
from jaxspec.training.objective import cast, merge
from jaxspec.training.output import as_stored, write_head
from jaxspec.training.synthesis import SynthesisOptions, synthesise
from tests import tiny

TARGET = "tests/fixtures/target_llama"


@functools.cache
def data():
    return synthesise(tiny.target(), SynthesisOptions(tokens=32 * 24, length=24, rows=32, segment=24), progress=False)


def objective(**options):
    return eagle3.build(tiny.target().config, **{"taps": (0, 1, 2), "draft_vocab": 40, "steps_ahead": 2, **options})


def options(**changes):
    return TrainOptions(
        **{"steps": 12, "batch": 4, "learning_rate": 3e-3, "held_out": 8, "evaluate_steps": 5, "checkpoint_steps": 4, **changes}
    )


@functools.cache
def whole():
    """A run that nothing interrupts."""
    return train(objective(), tiny.target(), data(), options(), progress=False)


def leaves_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_the_loss_falls_and_is_measured():
    done = whole()
    assert len(done.losses) == 12 and np.mean(done.losses[-3:]) < np.mean(done.losses[:3])
    assert [point["step"] for point in done.curve] == [0, 5, 10, 12]
    assert done.curve[-1]["tokens"] == 12 * 4 * 24 and len(done.curve[-1]["accept"]) == 2
    assert done.curve[-1]["held_out_loss"] < done.curve[0]["held_out_loss"]
    assert done.about["data"]["target"] == "tiny target 0"


def test_stopping_and_going_on_changes_no_loss(tmp_path):
    first = train(objective(), tiny.target(), data(), options(stop_after=7), folder=tmp_path, progress=False)
    assert first.draft is None and len(first.losses) == 7
    with pytest.raises(ConfigError, match="stopped"):
        write_head(first, tmp_path / "head")
    notes = []
    second = train(objective(), tiny.target(), data(), options(), folder=tmp_path, progress=False, log=notes.append)
    assert "step 7 of 12" in notes[0]
    assert second.losses == whole().losses
    leaves_equal(second.draft.tree, whole().draft.tree)
    assert [p["step"] for p in second.curve] == [p["step"] for p in whole().curve]
    assert [p["accept"] for p in second.curve] == [p["accept"] for p in whole().curve]


def test_a_crash_between_checkpoints_changes_no_loss(tmp_path, monkeypatch):
    """The seventh step never happens: the run goes on behind the checkpoint of step 4 and does steps 5 and 6 again."""
    step = loop.Run.step

    def crash(self, state, constants, number, total):
        if number == 6:
            raise KeyboardInterrupt
        return step(self, state, constants, number, total)

    monkeypatch.setattr(loop.Run, "step", crash)
    with pytest.raises(KeyboardInterrupt):
        train(objective(), tiny.target(), data(), options(), folder=tmp_path, progress=False)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_4"]
    (tmp_path / "step_6").mkdir()  # a checkpoint that was not finished
    again = train(objective(), tiny.target(), data(), options(), folder=tmp_path, progress=False)
    assert again.losses == whole().losses
    leaves_equal(again.draft.tree, whole().draft.tree)


def test_another_run_does_not_go_on_from_a_foreign_checkpoint(tmp_path):
    train(objective(), tiny.target(), data(), options(stop_after=2), folder=tmp_path, progress=False)
    for changed, where in ((objective(decay=0.5), options()), (objective(), options(learning_rate=1e-3))):
        wanted = r"head/decay \(0.8 there, 0.5 asked for\)|options/learning_rate \(0.003 there, 0.001 asked for\)"
        with pytest.raises(ConfigError, match=f"differs in ({wanted}): "):
            train(changed, tiny.target(), data(), where, folder=tmp_path, progress=False)


@pytest.mark.parametrize("name", ["tokens", "supervised"])
def test_other_rows_of_the_same_shape_are_noticed(tmp_path, name):
    """Each time one entry differs, which no count and no seed shows."""
    train(objective(), tiny.target(), data(), options(stop_after=2), folder=tmp_path, progress=False)
    array = getattr(data(), name).copy()
    array[3, 5] = not array[3, 5] if name == "supervised" else (array[3, 5] + 1) % tiny.VOCAB
    changed = dataclasses.replace(data(), **{name: array})
    with pytest.raises(ConfigError, match=r"differs in content \("):
        train(objective(), tiny.target(), changed, options(), folder=tmp_path, progress=False)


def test_the_seed_decides_the_run():
    again = train(objective(), tiny.target(), data(), options(steps=2), progress=False)
    other = train(objective(), tiny.target(), data(), options(steps=2, seed=1), progress=False)
    assert again.losses[0] == whole().losses[0] != other.losses[0]


def test_a_checkpoint_of_another_head_is_refused(tmp_path):
    state.save_checkpoint(tmp_path, 3, {"a": jnp.ones(3)}, {"step": 3})
    found, about = state.load_checkpoint(state.latest_checkpoint(tmp_path), {"a": jnp.zeros(3)})
    assert about == {"step": 3} and float(found["a"].sum()) == 3
    with pytest.raises(ConfigError, match="another kind"):
        state.load_checkpoint(tmp_path / "step_3", {"a": jnp.zeros(4)})


def test_the_learning_rate_rises_and_falls():
    rates = [float(learning_rate_at(step, 100.0, 2.0, 0.1)) for step in range(101)]
    assert rates[9] == 2.0 == max(rates) and rates[0] == pytest.approx(0.2) and rates[100] == pytest.approx(0, abs=1e-6)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))


def test_a_time_budget_gives_the_number_of_steps(monkeypatch):
    notes = []
    monkeypatch.setattr(loop.Run, "calibrate", lambda self, *_: 3)
    done = train(objective(), tiny.target(), data(), options(steps=None, minutes=1.0), progress=False)
    assert len(done.losses) == 3 and done.about["steps"] == 3
    monkeypatch.undo()
    run = loop.Run(objective(), tiny.target(), data(), options(steps=None, minutes=0.5), None, notes.append)
    made, constants = run.initial()
    before = jax.tree.map(np.asarray, made[0])
    assert run.calibrate(made, constants) > 3 and "ms a step" in notes[0]
    leaves_equal(made[0], before)


def test_options_are_checked():
    with pytest.raises(ConfigError, match="either steps or minutes"):
        TrainOptions()
    with pytest.raises(ConfigError, match="batch"):
        options(batch=0)
    with pytest.raises(ConfigError, match="more than the"):
        train(objective(), tiny.target(), data(), options(batch=30), progress=False)
    with pytest.raises(KeyError, match="kernel is both"):
        merge({"fc": {"kernel": 1}}, {"fc": {"kernel": 2}})


def test_a_loss_that_is_not_finite_ends_the_run():
    with pytest.raises(ConfigError, match="learning rate"):
        train(objective(), tiny.target(), data(), options(learning_rate=1e30), progress=False)


def test_a_loss_that_is_not_finite_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    """Checkpoints are due behind steps 4 and 8; the sixth step finds no finite loss."""
    step = loop.Run.step

    def broken(self, state, constants, number, total):
        state, metrics = step(self, state, constants, number, total)
        return state, metrics | ({"loss": jnp.nan} if number == 5 else {})

    monkeypatch.setattr(loop.Run, "step", broken)
    with pytest.raises(ConfigError, match="of step 6 is not finite"):
        train(objective(), tiny.target(), data(), options(evaluate_steps=20), folder=tmp_path, progress=False)
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_4"]


def test_half_precision_without_range_is_refused():
    target = tiny.target()
    half = jaxspec.ModelParams(cast(target.tree, jnp.float16), target.config)
    with pytest.raises(ConfigError, match="dtype=float16 .* use bfloat16 or float32"):
        train(objective(), half, data(), options(), progress=False)


def test_a_trained_model_drafts_before_and_after_it_is_written(tmp_path):
    """A draft that is a whole model brings the target's tokenizer (here none)."""
    target = tiny.target()
    made = standalone.build(target.config, layers=1, hidden=16)
    trained = train(made, target, data(), options(steps=2), progress=False)
    assert isinstance(trained.draft, jaxspec.ModelParams) and trained.draft.tokenizer is target.tokenizer
    plain = jaxspec.generate(target, [1, 2, 3], algorithm="none", max_new_tokens=8)
    written = jaxspec.load_draft(write_head(trained, tmp_path / "model", dtype="float32"), target)
    leaves_equal(written.tree, trained.draft.tree)
    for draft in (trained.draft, written):
        assert jaxspec.generate(target, [1, 2, 3], draft=draft, max_new_tokens=8).tokens == plain.tokens


def test_what_is_measured_as_stored_is_what_is_stored(tmp_path):
    """Rounded to the type of the folder first, then to eight bits."""
    folder = write_head(whole(), tmp_path / "head", quantize="int8")
    stored = as_stored(whole().draft.tree, "int8")
    assert all(x.dtype == y.dtype for x, y in zip(*map(jax.tree.leaves, (stored, whole().draft.tree)), strict=True))
    read = jaxspec.load_draft(folder, tiny.target(), dtype="float32")
    leaves_equal(read.tree, stored)


def test_a_type_to_store_in_is_checked(tmp_path):
    for dtype in ("int8", "bfloat"):
        with pytest.raises(ConversionError, match="dtype='.*' is not one of float32, float16, bfloat16"):
            write_head(whole(), tmp_path / "head", dtype=dtype)
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_trained_head_is_a_folder_that_drafts(tmp_path, quantize):
    folder = write_head(whole(), tmp_path / "head", dtype="float32", quantize=quantize)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "params", "training.jsonl"]
    assert len((folder / "training.jsonl").read_text().splitlines()) == 4
    about = json.loads((folder / "config.json").read_text())["provenance"]["training"]
    assert about["steps"] == 12 and about["seed"] == 0 and about["data"]["seed"] == 0
    assert about["objective"] == "Eagle3Objective" and about["objective_options"]["decay"] == 0.8
    draft = jaxspec.load_draft(folder, tiny.target())
    if quantize is None:
        leaves_equal(draft.tree, whole().draft.tree)
    prompt = [1, 2, 3, 4]
    plain = jaxspec.generate(tiny.target(), prompt, algorithm="none", max_new_tokens=24)
    drafted = jaxspec.generate(tiny.target(), prompt, draft=draft, num_steps=2, topk=2, num_draft_tokens=5, max_new_tokens=24)
    assert drafted.tokens == plain.tokens
    with pytest.raises(ConversionError, match="exists"):
        write_head(whole(), folder)
    write_head(whole(), folder, force=True)


def test_the_command_trains_a_fixture(tmp_path, capsys):
    """Synthesis from random ids (the fixture has no tokenizer), falling loss, a head that exports and comes back the same."""
    out, rows = tmp_path / "head", tmp_path / "rows.npz"
    arguments = [
        "eagle3",
        "--target",
        TARGET,
        "--steps",
        "30",
        "--out",
        str(out),
        "--data",
        str(rows),
        "--tokens",
        "2000",
        "--length",
        "32",
        "--rows",
        "64",
        "--batch",
        "8",
        "--held-out",
        "8",
        "--draft-vocab",
        "64",
        "--steps-ahead",
        "3",
        "--store-dtype",
        "float32",
        "--lr",
        "3e-3",
        "--quiet",
    ]
    assert command.main(arguments) == 0
    curve = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    assert curve[-1]["step"] == 30 and curve[-1]["held_out_loss"] < 0.95 * curve[0]["held_out_loss"]
    assert (
        "wrote" in capsys.readouterr().err
        and rows.exists()
        and sorted(p.name for p in tmp_path.iterdir()) == ["head", "rows.npz"]
    )
    with pytest.raises(ConversionError, match="--force"):
        command.main(arguments)

    target = jaxspec.load(TARGET)
    jaxspec.convert(out, tmp_path / "hf", to_hf=True, target=TARGET, progress=False)
    ours, theirs = jaxspec.load_draft(out, target), jaxspec.load_draft(tmp_path / "hf", target)
    assert theirs.config.algorithm == "EAGLE3"
    tokens = np.arange(2, 12)[None]
    made = forward(target, tokens)

    def logits(draft):
        from jaxspec.drafters.eagle import model as eagle_model
        from jaxspec.models.attend import causal_attend

        features = jnp.concatenate([made.hidden_states[tap] for tap in draft.config.taps], -1)[:, :-1]
        positions = jnp.arange(9)[None]
        embedding = eagle_model.embed(draft.tree, draft.config, target.tree, jnp.asarray(tokens[:, 1:]))
        hidden = eagle_model.project(draft.tree, draft.config, features)
        hidden, _ = eagle_model.step(draft.tree, draft.config, embedding, hidden, positions, causal_attend(positions), (None,))
        return eagle_model.logits(draft.tree, draft.config, target.tree, target.config, hidden)

    np.testing.assert_array_equal(logits(ours), logits(theirs))
    np.testing.assert_array_equal(ours.tree["target_ids"], theirs.tree["target_ids"])


def test_the_command_names_what_is_missing(capsys):
    for arguments in (["eagle3", "--target", TARGET], ["data", "--target", TARGET], ["eagle4", "--target", TARGET]):
        with pytest.raises(SystemExit):
            command.main(arguments)
    err = capsys.readouterr().err
    assert "--out is missing" in err and "--data FILE" in err and "eagle4" in err


def test_reading_more_of_the_target_than_a_head_needs_changes_nothing():
    """Features of another program may differ by rounding; they are the same features."""
    some = objective(taps=(2, 0))
    narrow = train(some, tiny.target(), data(), options(steps=2), progress=False)
    wide = train(some, tiny.target(), data(), options(steps=2), taps=(1, -1), progress=False)
    np.testing.assert_allclose(wide.losses, narrow.losses, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("head", heads.modules())
def test_every_head_trains_through_the_command(tmp_path, head):
    arguments = [
        head,
        "--target",
        TARGET,
        "--steps",
        "4",
        "--out",
        str(tmp_path / head),
        "--tokens",
        "2000",
        "--length",
        "48",
        "--rows",
        "48",
        "--batch",
        "4",
        "--held-out",
        "4",
        "--quantize",
        "int8",
        "--quiet",
    ]
    assert command.main(arguments) == 0
    draft = jaxspec.load_draft(tmp_path / head, jaxspec.load(TARGET))
    curve = [json.loads(line) for line in (tmp_path / head / "training.jsonl").read_text().splitlines()]
    assert curve[-1]["step"] == 4 and np.isfinite(curve[-1]["held_out_loss"]) and draft.tree
