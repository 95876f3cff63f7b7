"""Distilling a student: its loss against torch, its sizes and start, whether it learns, and that it can draft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ModelParams
from jaxspec.config import ConfigError
from jaxspec.models.decoder import param_shapes
from jaxspec.models.forward import forward
from jaxspec.training import standalone
from jaxspec.training.objective import merge
from tests import tiny
from tests.training.descent import assert_loses_nothing, descend
from tests.training.numpy_model import accept_shares, view_of

COUNTS = jnp.arange(tiny.VOCAB)


def made(target, **options):
    objective = standalone.build(target.config, **options)
    return objective, merge(*objective.init(jax.random.key(0), target.tree, COUNTS))


def test_the_loss_is_the_one_described():
    torch = pytest.importorskip("torch")
    target = tiny.target()
    objective, params = made(target, layers=1, hidden=16, elsewhere=0.25)
    view = view_of(target, objective)
    loss, metrics = jax.jit(objective.loss)(params, view, jax.random.key(0), 0)
    student = ModelParams(params, objective.config)
    ours, theirs = (torch.tensor(np.asarray(forward(m, view.tokens).logits)) for m in (student, target))
    log_p, log_q = torch.log_softmax(theirs, -1), torch.log_softmax(ours, -1)
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)[:, :-1]
    marks = torch.tensor(np.asarray(view.supervised))[:, 1:]
    weights = torch.where(marks, 1.0, 0.25)
    np.testing.assert_allclose(loss, (kl * weights).sum() / weights.sum(), rtol=1e-4)
    np.testing.assert_allclose(metrics["kl"], kl[marks].mean(), rtol=1e-4)
    equal = np.asarray(ours.argmax(-1) == theirs.argmax(-1))
    hits = [[np.pad(row, (0, 5))[i : i + 5] for i in range(len(row))] for row in equal]
    np.testing.assert_allclose(metrics["accept"], accept_shares(hits, np.asarray(view.supervised), 1), atol=1e-6)


def test_the_default_student_has_at_most_seven_percent_of_the_weights():
    smollm2 = tiny.config(
        vocab=49152, width=576, layers=30, heads=9, num_kv_heads=3, head_dim=64, ffn_size=1536, tie_embeddings=True
    )
    student = standalone.build(smollm2).config
    share = standalone.count_weights(student) / standalone.count_weights(smollm2)
    assert 0.05 < share < 0.071
    assert student.num_layers == 4 and student.hidden_size % 32 == 0 and student.tie_embeddings
    assert standalone.build(tiny.config()).config.hidden_size == 16


def test_a_narrow_students_embedding_keeps_what_varies_most():
    """Inner products of frequent tokens' embeddings survive the projection as well as rank allows (Eckart and Young 1936)."""
    target = tiny.target()
    counts = jnp.zeros(tiny.VOCAB, jnp.int32).at[:12].set(1000)
    objective = standalone.build(target.config, layers=1, hidden=16)
    params, constants = objective.init(jax.random.key(0), target.tree, counts)
    assert constants == {}
    table, ours = (np.asarray(t["embedder"]["embedding"])[:12] for t in (target.tree, params))
    np.testing.assert_allclose(ours @ ours.T, table @ table.T, atol=0.02)


def test_a_student_as_wide_as_the_target_is_its_first_layers():
    target = tiny.target(layers=3)
    objective, params = made(target, layers=2, hidden=32)
    assert jax.tree.map(jnp.shape, params) == param_shapes(objective.config)
    for i in "01":
        jax.tree.map(np.testing.assert_array_equal, params["layers"][i], target.tree["layers"][i])
    for name in ("embedder", "head", "final_norm"):
        jax.tree.map(np.testing.assert_array_equal, params[name], target.tree[name])
    whole, params = made(target, layers=3, hidden=32)
    loss, metrics = whole.loss(params, view_of(target, whole), jax.random.key(0), 0)
    assert float(loss) < 1e-5 and metrics["accept"].tolist() == [1.0] * 5


@pytest.mark.slow
def test_the_loss_falls_and_the_student_loses_nothing():
    target = tiny.target()
    objective, params = made(target, layers=1, hidden=16)
    view = view_of(target, objective, rows=4, length=24)
    params, losses = descend(objective, params, view, rate=0.3)
    assert losses[-1] < 0.8 * losses[0]
    assert_loses_nothing(target, ModelParams(params, objective.config), "STANDALONE")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layers": 0}, "layers=0 must be at least 1"),
        ({"hidden": 24, "heads": 5}, "hidden=24 over heads=5"),
        ({"hidden": 32, "layers": 3}, "at most 2, with heads=4 and ffn=64"),
        ({"elsewhere": -1.0}, "elsewhere=-1.0 must not be negative"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        standalone.build(tiny.config(), **options)
