"""Cutting runs of rows into pieces that keep limits: for joined index entries and joined reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streammeta.storage.compaction.entries import Column


@dataclass(frozen=True, slots=True)
class Measure:
    """A number per row, of which a piece of several rows may have at most `limit` in sum."""

    values: Column
    limit: int


def cut_runs(run_firsts: Column, measures: Sequence[Measure]) -> Column:
    """Return the first row of each piece, ascending.

    `run_firsts` has the first row of each run, the first of them 0; no piece spans two runs. A
    piece is as many rows as the limits allow; a row over a limit is a piece of its own. Most runs
    are one piece, so only the others are walked through.
    """
    if not len(run_firsts):
        return run_firsts
    sums = [np.concatenate(([0], np.cumsum(m.values, dtype=np.int64))) for m in measures]
    run_stops = np.append(run_firsts[1:], len(sums[0]) - 1)
    is_over = [
        total[run_stops] - total[run_firsts] > measure.limit
        for measure, total in zip(measures, sums, strict=True)
    ]
    cuts: list[int] = []
    for run in np.flatnonzero(np.logical_or.reduce(is_over)).tolist():
        binding = [
            (total, measure.limit)
            for measure, total, over in zip(measures, sums, is_over, strict=True)
            if over[run]
        ]
        row, stop = int(run_firsts[run]), int(run_stops[run])
        while row < stop:
            fits = min(
                int(total.searchsorted(total[row] + limit, side="right")) - 1
                for total, limit in binding
            )
            row = max(row + 1, fits)
            if row < stop:
                cuts.append(row)
    return np.sort(np.concatenate((run_firsts, np.array(cuts, dtype=np.int64))))
