"""Seeds of randomized tests: those of every run, and those that `--slow` adds."""

from __future__ import annotations

import os
from typing import Any

import pytest


def seeds(quick: int, *, slow: int = 0, start: int = 0, variable: str = "") -> list[Any]:
    """Return `quick` seeds from `start` on for every run, and `slow` more that run with `--slow`.

    An environment variable replaces them all by the seeds that it names: `first:last`.
    """
    if named := os.environ.get(variable):
        return list(range(*map(int, named.split(":"))))
    added = range(start + quick, start + quick + slow)
    marked = (pytest.param(seed, marks=pytest.mark.slow) for seed in added)
    return [*range(start, start + quick), *marked]
