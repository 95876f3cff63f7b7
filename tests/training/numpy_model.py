"""Restatements in numpy, in float64, one anchor at a time: what the objectives' losses are checked against."""

from __future__ import annotations

import jax
import numpy as np

from jaxspec import ModelParams
from jaxspec.models.forward import forward
from jaxspec.training.objective import View
from tests import tiny


def view_of(target: ModelParams, objective, rows: int = 2, length: int = 12, seed: int = 0) -> View:
    """A batch of random tokens, about two thirds of them supervised."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, tiny.VOCAB, (rows, length)).astype(np.int32)
    supervised = rng.random((rows, length)) < 0.67
    out = forward(target, tokens)
    features = out.final_norm if objective.taps else out.final_norm[..., :0]
    return View(target.tree, jax.numpy.asarray(tokens), jax.numpy.asarray(supervised), features, out.final_norm)


def double(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def rms(x, scale, eps=1e-6):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * scale


def rotated(x, position, theta=10000.0):
    """One head's channels [D], halves rotated."""
    half = len(x) // 2
    angle = position * theta ** (-np.arange(half) / half)
    a, b = x[:half], x[half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])


class Layer:
    """Attention of one query over entries that are added one by one, and the MLP, of one layer."""

    def __init__(self, params, heads=4, kv_heads=2, head_dim=8):
        self.p, self.H, self.K, self.D = params, heads, kv_heads, head_dim

    def projected(self, x, position):
        qkv = self.p["attention"]["qkv"]
        y = (x @ qkv["kernel"] + qkv.get("bias", 0)).reshape(self.K, self.H // self.K + 2, self.D)
        q = [rotated(v, position) for group in y for v in group[:-2]]
        return q, [rotated(group[-2], position) for group in y], [group[-1] for group in y]

    def attention(self, q, entries):
        out = []
        for h, query in enumerate(q):
            kv = h // (self.H // self.K)
            scores = np.array([query @ keys[kv] for keys, _ in entries]) * self.D**-0.5
            weights = np.exp(scores - scores.max())
            out.append(sum(w * values[kv] for w, (_, values) in zip(weights / weights.sum(), entries, strict=True)))
        return np.concatenate(out) @ self.p["attention"]["out"]["kernel"]

    def mlp(self, x):
        x = rms(x, self.p["mlp_norm"]["scale"])
        gate, up = np.split(x @ self.p["mlp"]["gate_up"]["kernel"], 2)
        return (gate / (1 + np.exp(-gate)) * up) @ self.p["mlp"]["down"]["kernel"]


def chains(step, features, tokens, passes):
    """States [T, passes, E] of chains of `passes` draft steps behind every target feature of one row.

    Args:
      step: (token, hidden, position, earlier entries) -> (state, entry).
      features, tokens: of the row; tokens behind its end are 0.
    """
    T = len(tokens)
    padded = np.concatenate([tokens, np.zeros(passes + 1, int)])
    committed, states = [], []
    for i in range(T):
        state, entry = step(padded[i + 1], features[i], i, committed)
        committed.append(entry)
        chain, entries = [state], list(committed)
        for s in range(1, passes):
            state, entry = step(padded[i + 1 + s], state, i + s, entries)
            entries.append(entry)
            chain.append(state)
        states.append(chain)
    return np.array(states)


def log_softmax(x):
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def accept_shares(hits, supervised, first):
    """Shares of anchors whose first d drafts all hit; hits [B][T][depth]; draft s of row i is the token at i + first + s."""
    depth = len(hits[0][0])
    counted, good = 0, np.zeros(depth)
    for row, marks in zip(hits, supervised, strict=True):
        for i, chain in enumerate(row):
            wanted = range(i + first, i + first + depth)
            if wanted[-1] < len(marks) and all(marks[j] for j in wanted):
                counted += 1
                good += np.cumprod(chain)
    return good / counted
