"""Heads that are trained at once learn what they learn alone."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from jaxspec import ConfigError
from jaxspec.training import eagle, mtp, together
from jaxspec.training.loop import TrainOptions, train
from jaxspec.training.together import train_together
from tests import tiny
from tests.training.test_loop import data


def options(**more) -> TrainOptions:
    return TrainOptions(**{"steps": 4, "batch": 4, "held_out": 4, "evaluate_steps": 2, **more})


def objectives() -> dict:
    config = tiny.target().config
    return {"eagle": eagle.build(config, passes=1), "mtp": mtp.build(config, passes=1)}


def test_losses_are_those_of_training_alone():
    both = train_together(objectives(), tiny.target(), data(), dict.fromkeys(objectives(), options()))
    for name, objective in objectives().items():
        alone = train(objective, tiny.target(), data(), options(), progress=False)
        np.testing.assert_allclose(both[name].losses, alone.losses, rtol=1e-5)
        assert both[name].curve[-1]["accept_length"] == pytest.approx(alone.curve[-1]["accept_length"], abs=1e-4)


def test_a_head_that_fails_does_not_stop_the_others():
    notes = []
    rates = {"eagle": options(learning_rate=1e30), "mtp": options()}
    both = train_together(objectives(), tiny.target(), data(), rates, log=notes.append)
    assert isinstance(both["eagle"], ConfigError)
    assert both["mtp"].draft is not None
    assert any("eagle failed" in note for note in notes)


@pytest.fixture
def clock(monkeypatch):
    """A clock that ticks when it is read, so that no machine is too slow for the time that is given."""
    monkeypatch.setattr(together, "time", SimpleNamespace(perf_counter=itertools.count(0.0, 0.05).__next__))


def test_time_says_how_many_steps_all_of_them_make(clock):
    given = dict.fromkeys(objectives(), options(steps=1, evaluate_steps=None))
    both = train_together(objectives(), tiny.target(), data(), given, minutes=0.02, storage="int8")
    assert len(both["eagle"].losses) == len(both["mtp"].losses) > 1
    assert "held_out_accept_length_int8" in both["mtp"].about


def test_a_head_may_take_part_in_fewer_turns(clock):
    given = dict.fromkeys(objectives(), options(steps=1, evaluate_steps=None))
    both = train_together(objectives(), tiny.target(), data(), given, minutes=0.02, every={"mtp": 3})
    assert len(both["mtp"].losses) == max(len(both["eagle"].losses) // 3, 1)


def test_options_must_agree():
    with pytest.raises(ConfigError, match="one batch, seed, held_out and steps"):
        train_together(objectives(), tiny.target(), data(), {"eagle": options(), "mtp": options(batch=2)})
    with pytest.raises(ConfigError, match="no head"):
        train_together({}, tiny.target(), data(), {})
    with pytest.raises(ConfigError, match="1 or more"):
        train_together(objectives(), tiny.target(), data(), dict.fromkeys(objectives(), options()), every={"mtp": 0})


def test_without_a_time_budget_every_head_makes_all_its_steps():
    given = dict.fromkeys(objectives(), options())
    both = train_together(objectives(), tiny.target(), data(), given, every={"mtp": 3})
    alone = train(objectives()["mtp"], tiny.target(), data(), options(), progress=False)
    np.testing.assert_allclose(both["mtp"].losses, alone.losses, rtol=1e-5)  # the rows of its own steps
