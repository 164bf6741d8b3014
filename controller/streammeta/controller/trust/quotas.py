"""Quotas of callers: how many of a thing each may have under way at a time.

A holder is a principal's name. Callers in plain text have none: an address proves nothing, and many
programs may share one, so only what all have together is bounded for them. Pure.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from streammeta.controller.errors import BusyError


class Places:
    """Places for one kind of long calls."""

    def __init__(self, what: str, retry_after_ms: int) -> None:
        self._what = what
        self._retry_after_ms = retry_after_ms
        self._held: Counter[str] = Counter()
        self._count = 0

    @property
    def count(self) -> int:
        """Places that are taken."""
        return self._count

    @contextlib.contextmanager
    def taken(self, holder: str | None, *, per_holder: int, in_all: int) -> Iterator[None]:
        """Hold a place while the block runs.

        Raises:
            BusyError: the holder has `per_holder` places already, or all together have `in_all`.
        """
        if holder is not None and self._held[holder] >= per_holder:
            raise self._refusal(f"{holder} has", self._held[holder])
        # After the own limit: a caller at its limit learns that, and does not wait for others.
        if self._count >= in_all:
            raise self._refusal("callers have", self._count)
        key = holder or ""
        self._held[key] += 1
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            self._held[key] -= 1
            if not self._held[key]:
                # Names of holders come from callers. Zero counts must not pile up.
                del self._held[key]

    def _refusal(self, who: str, count: int) -> BusyError:
        return BusyError(
            f"{who} {count} {self._what} in flight, the maximum. Retry after one has ended, "
            "or ask another controller",
            self._retry_after_ms,
        )
