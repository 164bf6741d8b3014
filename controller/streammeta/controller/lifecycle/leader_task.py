"""Base of tasks that a leader performs in a bucket, whose findings are only valid for one term."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from streammeta.controller.lifecycle.tasks import T, in_thread
from streammeta.storage.object_store.protocol.base import ObjectStore

Term = TypeVar("Term")

CALL_TIMEOUT_S = 20.0
"""Deadline of one step in a bucket, including retries, in seconds."""


class TermOverError(Exception):
    """The leader's term ended during the work for it."""


class LeaderTask(Generic[Term]):
    """A task with a bucket. `_term` is its state in the current term, None outside of one."""

    _term: Term | None = None
    _store: ObjectStore

    def _require(self, term: Term) -> None:
        """Raise `TermOverError` if the term is not the current one."""
        if self._term is not term:
            raise TermOverError

    async def _call(
        self, term: Term, call: Callable[[ObjectStore], T], timeout_s: float = CALL_TIMEOUT_S
    ) -> T:
        """Run calls of the bucket in a thread.

        `TermOverError` takes precedence over other outcomes.
        """
        store = self._store.until(time.monotonic() + timeout_s)
        try:
            # The term may end while the thread works. Its outcome is then no longer ours to use.
            result = await in_thread(lambda: call(store))
        except Exception:
            self._require(term)
            raise
        self._require(term)
        return result
