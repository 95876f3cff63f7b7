"""Chi-square tests of drawn outcomes against exact probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from scipy import stats

from tests.parity.checks import Mismatch

MIN_EXPECTED = 5.0


def p_value(outcomes: Sequence[Hashable], expected: Sequence[Hashable], probs: Sequence[float]) -> float:
    """Pearson's chi-square test; outcomes with a small expectation are merged. 0 for an outcome that is impossible."""
    counts = Counter(outcomes)
    if set(counts) - {e for e, p in zip(expected, probs, strict=True) if p > 0}:
        return 0.0
    order = np.argsort(probs, kind="stable")
    observed = np.array([counts[expected[i]] for i in order], float)
    wanted = np.asarray(probs, float)[order] * len(outcomes)
    # Rarest first: merge from the front until every bin is large enough.
    bins = np.minimum(np.cumsum(wanted) // MIN_EXPECTED, 1)
    head = max(int(np.argmax(bins)), int(np.sum(wanted < MIN_EXPECTED)) - 1) + 1
    observed = np.concatenate([[observed[:head].sum()], observed[head:]])
    wanted = np.concatenate([[wanted[:head].sum()], wanted[head:]])
    statistic = np.sum((observed - wanted) ** 2 / wanted)
    return float(stats.chi2.sf(statistic, max(len(wanted) - 1, 1)))


def assert_distribution(
    name: str, outcomes: Sequence[Hashable], expected: Sequence[Hashable], probs: Sequence[float], level: float
) -> float:
    """Raises `Mismatch` when the p-value is below `level`; returns the largest error of a frequency."""
    found = p_value(outcomes, expected, probs)
    counts = Counter(outcomes)
    error = max(abs(counts[e] / len(outcomes) - p) for e, p in zip(expected, probs, strict=True))
    if found < level:
        raise Mismatch(f"{name}: p = {found:.2g} < {level:.2g} in {len(outcomes)} rounds, largest error {error:.3g}")
    return error
