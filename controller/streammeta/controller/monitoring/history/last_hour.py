"""Commits and their latencies over the last hour, in rows of five minutes, as text for charts.

Computed from a controller's history, without I/O. A controller counts the commits that it
acknowledged as leader, so each row states the share of time in which it led. The history of other
leaders has the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from streammeta.controller.monitoring.history.history import History

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
