"""Cases of the attention contract, shared by the interpreted tests, the GPU tests and the benchmark."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `tree_attention`: shapes, the kind of in-flight mask, and options."""

    T: int = 1
    M: int | None = None  # in-flight entries, T if None
    B: int = 2
    H: int = 4
    K: int = 2
    Dk: int = 64
    Dv: int = 64
    S: int = 16
    N: int = 8
    tree: bool = True  # random tree in bit words; False: the causal chain, no words
    window: int | None = None
    sink: int = 0
    softcap: float | None = None
    missing: int = 0  # last in-flight entries of the last sequence that do not exist
    lengths: tuple[int, ...] | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        """The fields that differ from the defaults."""
        fields = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        return "-".join(f"{n}{v}" for n, v, default in fields if v != default).replace(" ", "") or "default"


def build(case: Case, dtype=jnp.float32, cache_dtype=None) -> tuple[tuple, dict]:
    """Random inputs of a case: shuffled pages, NaN wherever nobody looks. Returns (arguments, options)."""
    rng = np.random.default_rng(case.seed + 1000 * case.T + case.H)
    M = case.M or case.T
    L = case.N * case.S
    P = case.B * case.N + 3
    table = rng.permutation(np.arange(1, P))[: case.B * case.N].reshape(case.B, case.N).astype(np.int32)
    lengths = case.lengths or (0, *rng.integers(1, L - M + 1, case.B - 1))
    length = np.resize(np.asarray(lengths, np.int32), case.B)

    parent = np.array([-1] + [int(rng.integers(0, i)) for i in range(1, M)])
    if not case.tree:
        parent = np.arange(M) - 1
    seen = np.eye(M, dtype=bool)
    depth = np.zeros(M, np.int32)
    for i in range(1, M):
        seen[i] |= seen[parent[i]]
        depth[i] = depth[parent[i]] + 1
    inflight_positions = (length[:, None] + depth).astype(np.int32)
    if case.missing:
        inflight_positions[-1, M - case.missing :] = -1
    positions = (length[:, None] + depth[None, M - case.T :]).astype(np.int32)
    words = -(-M // 32)
    bits = np.zeros((case.T, words * 32), np.uint64)
    bits[:, :M] = seen[M - case.T :]
    packed = (bits.reshape(case.T, words, 32) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32)
    visible = np.broadcast_to(packed, (case.B, case.T, words)) if case.tree else None

    k = np.full((P, case.S, case.K, case.Dk), np.nan, np.float32)
    v = np.full((P, case.S, case.K, case.Dv), np.nan, np.float32)
    for b in range(case.B):
        for slot in range(int(length[b]) + M):
            exists = slot < length[b] or inflight_positions[b, slot - length[b]] >= 0
            if exists:
                where = table[b, slot // case.S], slot % case.S
                k[where] = rng.standard_normal((case.K, case.Dk))
                v[where] = rng.standard_normal((case.K, case.Dv))
    if case.window is not None:  # what no row's window reaches is not used either
        for b in range(case.B):
            for slot in range(max(case.sink, 0), int(min(length[b], positions[b].min() - case.window + 1))):
                where = table[b, slot // case.S], slot % case.S
                k[where] = v[where] = np.nan
    q = rng.standard_normal((case.B, case.T, case.H, case.Dk)) * 1.5
    cache_dtype = cache_dtype or dtype
    arguments = (
        jnp.asarray(q, dtype),
        jnp.asarray(k, cache_dtype),
        jnp.asarray(v, cache_dtype),
        jnp.asarray(table),
        jnp.asarray(length),
        None if visible is None else jnp.asarray(visible),
        jnp.asarray(positions),
        jnp.asarray(inflight_positions),
    )
    options = {"scale": case.Dk**-0.5, "window": case.window, "sink": case.sink, "softcap": case.softcap}
    return arguments, options


def in_float32(arguments: tuple) -> tuple:
    """The same inputs, exactly, for the float32 reference."""
    return tuple(x.astype(jnp.float32) if i < 3 else x for i, x in enumerate(arguments))


def row_error(got, want) -> float:
    """Largest error of any query row (all heads of one token), relative to that row's largest value.

    The rounding of the result to its own type is taken off: in bfloat16 it alone reaches 2^-8. Rows that must be zero
    count absolutely; NaN where anything is not finite.
    """
    want = np.asarray(want, np.float32)
    rounding = np.abs(np.asarray(want.astype(got.dtype), np.float32) - want)
    got = np.asarray(got, np.float32)
    size = np.abs(want).max((-2, -1), keepdims=True)
    error = (np.abs(got - want) - rounding) / np.where(size > 0, size, 1)
    return float(error.max()) if np.isfinite(got).all() else float("nan")


TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 1e-3}

# Small enough to interpret. Together: every page size, head size, mask, option and kind of length of the contract.
CASES = (
    Case(),
    Case(tree=False, S=64, N=2),
    Case(T=5, H=6, K=2, S=1, N=70, B=1, lengths=(50,)),
    Case(T=7, H=3, K=1, tree=False),
    Case(T=13, M=13, H=4, K=1, lengths=(0, 83)),
    Case(T=3, M=9, lengths=(31, 100)),  # a draft level: the newest three of nine
    Case(T=4, M=40, missing=5, N=9),
    Case(T=9, missing=4, tree=False),
    Case(T=16, H=8, K=2, B=1, lengths=(64,)),
    Case(T=33, H=2, K=1, N=10),
    Case(T=70, H=2, K=2, N=12, lengths=(0, 97)),
    Case(T=40, tree=False, H=8, K=2, N=9, B=1, lengths=(70,)),
    Case(T=2, window=20, lengths=(5, 120)),
    Case(T=6, window=37, sink=3, lengths=(90, 101)),
    Case(T=48, tree=False, window=9, sink=2, lengths=(0, 50)),  # sinks that are in flight
    Case(T=3, softcap=5.0),
    Case(T=3, softcap=8.0, window=33, sink=20, S=32, N=4),
    Case(T=2, H=2, K=2, Dk=192, Dv=128, N=6),
    Case(T=2, Dk=96, Dv=96, N=6),
    Case(T=2, Dk=128, Dv=128, S=64, N=3),
    Case(T=1, H=2, K=1, Dk=256, Dv=256, N=5),
    Case(T=2, H=4, K=1, Dk=80, Dv=48, N=5),
    Case(T=1, B=5, N=6, lengths=(0, 1, 16, 33, 95)),
)


def pretend_h200():
    """From jax 0.11 on, Pallas' Triton lowering must be told which GPU it lowers for."""
    try:
        from jax.sharding import AbstractDevice, AbstractMesh

        device = AbstractDevice("NVIDIA H200", 1, "cuda")
        return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    except ImportError:
        return contextlib.nullcontext()
