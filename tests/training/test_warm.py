"""A head that was trained before as the start of another run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import train as command
from jaxspec.config import ConfigError
from jaxspec.conversion.mapping import flatten
from jaxspec.files.errors import ConversionError
from jaxspec.training import card, dspark, eagle3
from jaxspec.training.loop import train
from jaxspec.training.objective import merge
from jaxspec.training.output import write_head
from jaxspec.training.together import train_together
from jaxspec.training.warm import read_start
from tests import tiny
from tests.training.test_loop import TARGET, data, objective, options, whole


@pytest.fixture(scope="module", params=[None, "int8"])
def folder(request, tmp_path_factory):
    """A trained head's folder, in either kind of storage."""
    out = tmp_path_factory.mktemp("warm") / "first"
    return write_head(whole(), out, dtype="float32", quantize=request.param)


def test_the_first_weights_are_those_of_the_head(folder):
    start = read_start(folder, objective())
    trainable, constants = objective().init(jax.random.key(9), tiny.target().tree, jnp.ones(tiny.VOCAB, jnp.int32))
    begun = flatten(merge(*start.replace(trainable, constants)))
    given = flatten(whole().draft.tree)
    assert begun.keys() == given.keys()
    for path, value in given.items():
        rounding = float(jnp.max(jnp.abs(value))) / 250 if "quantized" in (folder / "config.json").read_text() else 0
        np.testing.assert_allclose(begun[path], value, atol=rounding, err_msg=path)
    assert (begun["target_ids"] == given["target_ids"]).all()  # the vocabulary of the new rows does not count


def test_going_on_begins_where_the_head_stands(folder):
    start = read_start(folder, objective())
    more = train(objective(), tiny.target(), data(), options(steps=4, seed=1), start=start, progress=False)
    before = [point for point in whole().curve if point["step"] > 0]
    first = more.curve[len(whole().curve)]
    assert first["step"] == 0 and first["tokens"] == start.tokens == whole().about["tokens"]
    assert abs(first["held_out_loss"] - before[-1]["held_out_loss"]) < 0.1 * before[0]["held_out_loss"]
    assert more.about["tokens"] == 4 * 4 * 24
    assert more.about["tokens_of_all_runs"] == more.curve[-1]["tokens"] == start.tokens + 4 * 4 * 24
    assert more.about["started_from"]["digest"] == card.digest(folder)


def test_the_third_run_counts_both_before_it(folder, tmp_path):
    second = train(objective(), tiny.target(), data(), options(steps=2), start=read_start(folder, objective()), progress=False)
    again = read_start(write_head(second, tmp_path / "second"), objective())
    assert again.tokens == (12 + 2) * 4 * 24
    assert again.provenance()["started_from"]["tokens"] == 12 * 4 * 24
    text = card.card(tmp_path / "second")
    assert f"{again.tokens:,}" in text and "started from/head: first" in text


def test_heads_trained_together_may_have_a_start(folder):
    start, given = read_start(folder, objective()), options(steps=2)
    heads = {"old": objective(), "new": objective()}
    both = train_together(heads, tiny.target(), data(), dict.fromkeys(heads, given), starts={"old": start})
    alone = train(objective(), tiny.target(), data(), given, start=start, progress=False)
    np.testing.assert_allclose(both["old"].losses, alone.losses, rtol=1e-5)
    assert both["old"].losses[0] < both["new"].losses[0] and "started_from" not in both["new"].about


def test_a_head_of_another_configuration_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"taps.*\(0 there, 1 asked for\)|differ in taps"):
        read_start(folder, objective(taps=(1, 1, 2)))
    with pytest.raises(ConfigError, match="is a EagleConfig head.*DFlashConfig"):
        read_start(folder, dspark.build(tiny.target().config, block=3))
    with pytest.raises(ConversionError, match="does not exist"):
        read_start(tmp_path / "nothing", objective())


def test_parameters_of_other_shapes_are_named(folder):
    start = read_start(folder, objective())
    wider = eagle3.build(tiny.target().config, taps=(0, 1, 2), draft_vocab=41, steps_ahead=2)
    with pytest.raises(ConfigError, match=r"head/kernel .* 40\) there, .* 41\) here"):
        start.replace(*wider.init(jax.random.key(0), tiny.target().tree, jnp.ones(tiny.VOCAB, jnp.int32)))


def test_a_checkpoint_of_a_run_with_another_start_is_refused(folder, tmp_path):
    start = read_start(folder, objective())
    train(objective(), tiny.target(), data(), options(stop_after=4), folder=tmp_path / "work", start=start, progress=False)
    with pytest.raises(ConfigError, match="differs in start"):
        train(objective(), tiny.target(), data(), options(), folder=tmp_path / "work", progress=False)
    gone_on = train(objective(), tiny.target(), data(), options(), folder=tmp_path / "work", start=start, progress=False)
    direct = train(objective(), tiny.target(), data(), options(), start=start, progress=False)
    np.testing.assert_array_equal(gone_on.losses, direct.losses)
    assert [p["step"] for p in gone_on.curve] == [p["step"] for p in direct.curve]


def test_the_command_goes_on_from_a_folder(tmp_path, capsys):
    line = f"eagle3 --target {TARGET} --steps 2 --batch 2 --held-out 2 --tokens 200 --length 20 --rows 10 --draft-vocab 32 "
    line += f"--quiet --taps 0,1,2 --steps-ahead 2 --data {tmp_path}/rows.npz"
    assert command.main([*line.split(), "--out", str(tmp_path / "one")]) == 0
    assert command.main([*line.split(), "--out", str(tmp_path / "two"), "--from", str(tmp_path / "one")]) == 0
    about = json.loads((tmp_path / "two" / "config.json").read_text())["provenance"]["training"]
    assert about["tokens_of_all_runs"] == 2 * about["tokens"] and about["started_from"]["head"] == "one"
