"""History of a controller's measurements, and the rows of its last hour.

Keeps one sample a second for 15 minutes, one per 10 s for an hour and one a minute for a day, in
arrays of fixed size. The process does not store them. Pure: independent of the clock.

Commits of the last hour and their latencies are in rows of five minutes. A controller counts the
commits that it acknowledged as leader, so each row states the share of time in which it led. The
history of other leaders has the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

LENGTHS: Mapping[int, int] = {1: 900, 10: 360, 60: 1_440}
"""Number of kept samples by seconds between samples."""

_Values = npt.NDArray[np.float32]
_Times = npt.NDArray[np.float64]


class Fold(Enum):
    """Rule that merges several samples into one."""

    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Series:
    """Name of a series, its unit, and the rule that merges its samples."""

    name: str
    unit: str
    fold: Fold = Fold.MEAN


@dataclass(frozen=True, slots=True)
class Window:
    """Samples in order of time.

    `times` are seconds since 1970. `columns` contains the values by name of the series, NaN for an
    unknown value.
    """

    times: _Times
    columns: Mapping[str, _Values]


class Ring:
    """Ring buffer of the last samples of some series."""

    def __init__(self, series: int, length: int) -> None:
        self._times: _Times = np.zeros(length, dtype=np.float64)
        self._values: _Values = np.full((series, length), np.nan, dtype=np.float32)
        self._added = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._times.nbytes + self._values.nbytes

    def add(self, time_s: float, values: npt.NDArray[np.floating]) -> None:
        """Add a sample, which must be later than the previous one."""
        place = self._added % len(self._times)
        self._times[place] = time_s
        self._values[:, place] = values
        self._added += 1

    def clear(self) -> None:
        """Forget all samples."""
        self._added = 0

    def since(self, time_s: float) -> tuple[_Times, _Values]:
        """Return times and values of the samples later than `time_s`, in order."""
        length = len(self._times)
        first = max(0, self._added - length)
        # The oldest sample may be anywhere in the array, so places follow the order of addition.
        places = np.arange(first, self._added) % length
        places = places[self._times[places] > time_s]
        return self._times[places], self._values[:, places]


class _Steps:
    """Merged samples, one per step of `step_s` seconds."""

    def __init__(self, step_s: int, length: int, takes_max: npt.NDArray[np.bool_]) -> None:
        self.ring = Ring(len(takes_max), length)
        self._step_s = step_s
        self._takes_max = takes_max
        self._begin_s = 0.0
        self._under_way: list[npt.NDArray[np.float64]] = []

    def add(self, time_s: float, sample: npt.NDArray[np.float64]) -> None:
        """Add a sample. The first one of a new step completes the previous step."""
        begin_s = time_s // self._step_s * self._step_s
        # Steps begin at multiples of their length, so that charts of several controllers align.
        if self._under_way and begin_s != self._begin_s:
            self.ring.add(self._begin_s, self._folded())
            self._under_way.clear()
        self._begin_s = begin_s
        # Kept apart until the step ends: a maximum cannot be continued from merged means.
        self._under_way.append(sample)

    def clear(self) -> None:
        """Forget all samples."""
        self.ring.clear()
        self._under_way.clear()

    def _folded(self) -> npt.NDArray[np.float64]:
        """Merge the samples of the current step. Unknown values do not count."""
        samples = np.array(self._under_way)
        is_known = ~np.isnan(samples)
        # Not nanmean and nanmax: they warn about series without any value in the step.
        counts = is_known.sum(axis=0)
        # At least 1 avoids a division by zero. The last line turns such means into NaN.
        means = np.where(is_known, samples, 0).sum(axis=0) / np.maximum(counts, 1)
        highest = np.where(is_known, samples, -np.inf).max(axis=0)
        folded: npt.NDArray[np.float64] = np.where(self._takes_max, highest, means)
        return np.where(counts > 0, folded, np.nan)


class History:
    """Samples of `series`: every added one, and merged ones for each longer step of `lengths`."""

    def __init__(self, series: Sequence[Series], lengths: Mapping[int, int] = LENGTHS) -> None:
        self.series = series
        self._rows = {series_.name: row for row, series_ in enumerate(series)}
        takes_max = np.array([series_.fold is Fold.MAX for series_ in series], dtype=np.bool_)
        self._by_second = Ring(len(series), lengths[1])
        self._by_step = {
            step_s: _Steps(step_s, length, takes_max)
            for step_s, length in lengths.items()
            if step_s > 1
        }
        # Any first sample is later, whatever the clock says.
        self._last_s = -np.inf

    @property
    def nbytes(self) -> int:
        """Bytes allocated for samples."""
        return self._by_second.nbytes + sum(step.ring.nbytes for step in self._by_step.values())

    def add(self, time_s: float, values: Mapping[str, float]) -> None:
        """Add a sample, `time_s` seconds since 1970. A series without a value gets NaN.

        If the clock was set back, the history starts again, because a window is in order of time.
        """
        # `since` relies on increasing times, and a step on beginning only once.
        if time_s <= self._last_s:
            self._by_second.clear()
            for step in self._by_step.values():
                step.clear()
        self._last_s = time_s
        sample = np.array([values.get(series_.name, np.nan) for series_ in self.series])
        self._by_second.add(time_s, sample)
        for step in self._by_step.values():
            step.add(time_s, sample)

    def since(self, time_s: float, names: Sequence[str], step_s: int = 1) -> Window:
        """Return the samples of these series later than `time_s`, by a step of `lengths`.

        The current step is not included. Raises KeyError for an unknown name.
        """
        rows = [self._rows[name] for name in names]
        ring = self._by_second if step_s == 1 else self._by_step[step_s].ring
        times, values = ring.since(time_s)
        return Window(times, {name: values[row] for name, row in zip(names, rows, strict=True)})


HOUR_S = 3_600
STEP_S = 10
"""Seconds between the samples of which rows are made."""

ROW_S = 300
"""Length of a row in seconds. Rows begin at its multiples."""

_NAMES = ("commits_accepted", "commits_refused", "commit_p50", "commit_p99", "is_leader")


def last_hour(history: History, now_s: float) -> Sequence[Mapping[str, float | None]]:
    """Return the rows that have samples, newest first. None means that there was no commit to time.

    `accepted` and `refused` are numbers of commits. Times are milliseconds: `p50_ms` is the mean of
    the medians of 10 s, `p99_ms` the maximum of their 99th percentiles. `led` is a share from 0 to
    1.
    """
    window = history.since(now_s - HOUR_S, _NAMES, STEP_S)
    # Rows at fixed times, so that a row keeps its label between two requests.
    begins = window.times // ROW_S * ROW_S
    rows = []
    # Unique values are sorted. Reversed, the newest row comes first.
    for begin_s in np.unique(begins)[::-1]:
        part = {name: values[begins == begin_s] for name, values in window.columns.items()}
        rows.append(
            {
                "begin_s": float(begin_s),
                "accepted": _count(part["commits_accepted"]),
                "refused": _count(part["commits_refused"]),
                "p50_ms": mean(part["commit_p50"]),
                "p99_ms": highest(part["commit_p99"]),
                "led": mean(part["is_leader"]),
            }
        )

    return rows


def mean(values: npt.NDArray[np.float32]) -> float | None:
    """Return the mean of the known values."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else None


def highest(values: npt.NDArray[np.float32]) -> float | None:
    """Return the maximum of the known values."""
    there = values[~np.isnan(values)]
    return float(there.max()) if len(there) else None


def _count(rates: npt.NDArray[np.float32]) -> int:
    # Rates are means over a step, so their sum times its length gives the count back.
    return round(float(np.nansum(rates)) * STEP_S)
