"""History of a controller's own measurements: a sample a second for 15 min, one a minute for a day.

Bounded arrays in memory, gone with the process. Pure: knows neither clock nor meaning of a series.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

SECONDS = 900
"""Samples kept that are a second apart."""

MINUTES = 1_440
"""Samples kept that are a minute apart."""

_Values = npt.NDArray[np.float32]
_Times = npt.NDArray[np.float64]


class Fold(Enum):
    """Rule by which the samples of a minute become one."""

    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Series:
    """Name of a series, its unit, and the rule for its minutes."""

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


class History:
    """Samples of `series` at both steps."""

    def __init__(
        self, series: Sequence[Series], seconds: int = SECONDS, minutes: int = MINUTES
    ) -> None:
        self.series = series
        self._rows = {each.name: row for row, each in enumerate(series)}
        self._by_second = Ring(len(series), seconds)
        self._by_minute = Ring(len(series), minutes)
        self._takes_max = np.array([each.fold is Fold.MAX for each in series], dtype=np.bool_)
        self._minute: list[npt.NDArray[np.float64]] = []
        self._last_s = -np.inf

    @property
    def nbytes(self) -> int:
        """Bytes allocated for samples."""
        return self._by_second.nbytes + self._by_minute.nbytes

    def add(self, time_s: float, values: Mapping[str, float]) -> None:
        """Add a sample, `time_s` seconds since 1970; a series without a value has NaN.

        A clock that was set back begins a new history: times of a window are in order.
        """
        if time_s <= self._last_s:
            self._by_second.clear()
            self._by_minute.clear()
            self._minute.clear()
        elif self._minute and time_s // 60 != self._last_s // 60:
            self._by_minute.add(self._last_s // 60 * 60, self._folded())
            self._minute.clear()
        self._last_s = time_s
        sample = np.array([values.get(each.name, np.nan) for each in self.series])
        self._minute.append(sample)
        self._by_second.add(time_s, sample)

    def since(self, time_s: float, names: Sequence[str], *, by_minute: bool = False) -> Window:
        """Return the samples later than `time_s` of these series.

        The minute that is under way is no sample yet. Raises KeyError for an unknown name.
        """
        rows = [self._rows[name] for name in names]
        times, values = (self._by_minute if by_minute else self._by_second).since(time_s)
        return Window(times, {name: values[row] for name, row in zip(names, rows, strict=True)})

    def _folded(self) -> npt.NDArray[np.float64]:
        """Return one sample for those of a minute, as far as they have values."""
        samples = np.array(self._minute)
        is_known = ~np.isnan(samples)
        counts = is_known.sum(axis=0)
        means = np.where(is_known, samples, 0).sum(axis=0) / np.maximum(counts, 1)
        highest = np.where(is_known, samples, -np.inf).max(axis=0)
        folded: npt.NDArray[np.float64] = np.where(self._takes_max, highest, means)
        return np.where(counts > 0, folded, np.nan)
