"""Combinations of values for tests: some of them in each run, and the others with ``--full``."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def combined(every: int, *values: Iterable[Any]) -> list[Any]:
    """Return each combination of values. Without ``--full``, one in ``every`` runs, and each value in some of them."""
    found = []
    for numbered in itertools.product(*map(enumerate, values)):
        left_out = sum(place for place, _ in numbered) % every > 0
        row = [value for _, value in numbered]
        found.append(pytest.param(*row, marks=pytest.mark.full if left_out else ()))
    return found
