"""History of a controller's own measurements: 15 min of seconds, an hour of tens, a day of minutes.

Bounded arrays in memory, gone with the process. Pure: knows neither clock nor meaning of a series.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

LENGTHS: Mapping[int, int] = {1: 900, 10: 360, 60: 1_440}
"""Samples kept by the seconds between them: for 15 minutes, an hour and a day."""

_Values = npt.NDArray[np.float32]
_Times = npt.NDArray[np.float64]


class Fold(Enum):
    """Rule by which several samples become one."""

    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Series:
    """Name of a series, its unit, and the rule by which its samples become one."""

    name: str
    unit: str
    fold: Fold = Fold.MEAN


@dataclass(frozen=True, slots=True)
class Window:
    """Samples in order of time: seconds since 1970, and a column for each name; NaN is no value."""

    times: _Times
    columns: Mapping[str, _Values]


class Ring:
    """The last samples of some series; the oldest give way."""

    def __init__(self, series: int, length: int) -> None:
        self._times: _Times = np.zeros(length, dtype=np.float64)
        self._values: _Values = np.full((series, length), np.nan, dtype=np.float32)
        self._added = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._times.nbytes + self._values.nbytes

    def add(self, time_s: float, values: npt.NDArray[np.floating]) -> None:
        """Add a sample; its time must be later than that of the one before."""
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
        places = np.arange(first, self._added) % length
        places = places[self._times[places] > time_s]
        return self._times[places], self._values[:, places]


class _Steps:
    """Samples of a step: one for all that are added within it."""

    def __init__(self, step_s: int, length: int, takes_max: npt.NDArray[np.bool_]) -> None:
        self.ring = Ring(len(takes_max), length)
        self._step_s = step_s
        self._takes_max = takes_max
        self._begin_s = 0.0
        self._under_way: list[npt.NDArray[np.float64]] = []

    def add(self, time_s: float, sample: npt.NDArray[np.float64]) -> None:
        """Add a sample; the first of another step completes the one under way."""
        begin_s = time_s // self._step_s * self._step_s
        if self._under_way and begin_s != self._begin_s:
            self.ring.add(self._begin_s, self._folded())
            self._under_way.clear()
        self._begin_s = begin_s
        self._under_way.append(sample)

    def clear(self) -> None:
        """Forget all samples."""
        self.ring.clear()
        self._under_way.clear()

    def _folded(self) -> npt.NDArray[np.float64]:
        """Return one sample for those under way, as far as they have values."""
        samples = np.array(self._under_way)
        is_known = ~np.isnan(samples)
        counts = is_known.sum(axis=0)
        means = np.where(is_known, samples, 0).sum(axis=0) / np.maximum(counts, 1)
        highest = np.where(is_known, samples, -np.inf).max(axis=0)
        folded: npt.NDArray[np.float64] = np.where(self._takes_max, highest, means)
        return np.where(counts > 0, folded, np.nan)


class History:
    """Samples of `series`, as they are added and by each longer step of `lengths`."""

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
        self._last_s = -np.inf

    @property
    def nbytes(self) -> int:
        """Bytes allocated for samples."""
        return self._by_second.nbytes + sum(step.ring.nbytes for step in self._by_step.values())

    def add(self, time_s: float, values: Mapping[str, float]) -> None:
        """Add a sample, `time_s` seconds since 1970; a series without a value has NaN.

        A clock that was set back begins a new history: times of a window are in order.
        """
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
        """Return the samples later than `time_s` of these series, by a step of `lengths`.

        The step that is under way is no sample yet. Raises KeyError for an unknown name.
        """
        rows = [self._rows[name] for name in names]
        ring = self._by_second if step_s == 1 else self._by_step[step_s].ring
        times, values = ring.since(time_s)
        return Window(times, {name: values[row] for name, row in zip(names, rows, strict=True)})
