"""Histories of a correct store: a real sequential execution under overlapping clients.

Every operation takes effect at one moment between its invocation and its answer, in a store that
does one thing at a time; what it answered there is what the client is told, if it is told.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.linearizability import models
from tests.linearizability.history import UNKNOWN, Operation

History = list[Operation[Any, Any]]


class Store:
    """One key, as the contract says."""

    def __init__(self) -> None:
        self.value: str | None = None
        self.version = 0
        self.offset = 0

    def perform(self, request: Any) -> models.KVAnswer:
        self.offset += 1
        if isinstance(request, models.Get):
            return models.KVAnswer(applied=True, value=self.value, version=self.version)
        if isinstance(request, models.Delete):
            return self._delete(request)
        if request.expected_version is not None:
            applied = request.expected_version == self.version
        else:
            applied = self.value is None or request.overwrite
        if applied:
            self.value, self.version = request.value, self.offset + 1
        return models.KVAnswer(applied=applied, value=self.value, version=self.version)

    def _delete(self, request: models.Delete) -> models.KVAnswer:
        wanted = request.expected_version
        applied = self.value is not None and wanted in (None, self.version)
        answer = models.KVAnswer(applied=applied, value=self.value, version=self.version)
        if applied:
            self.value, self.version = None, 0
        return answer


class StreamStore:
    """One stream, as the contract says."""

    def __init__(self) -> None:
        self.end = 0
        self.object_ids: list[int] = []

    def perform(self, request: Any) -> Any:
        if isinstance(request, models.ReadEnd):
            return models.End(self.end)
        if isinstance(request, models.ReadObjects):
            return models.Objects(tuple(self.object_ids))
        if request.object_id in self.object_ids:
            return models.Committed()
        if request.start != self.end:
            return models.NotAtEnd()
        self.end = request.end
        self.object_ids.append(request.object_id)
        return models.Committed()


def kv_history(
    rng: random.Random, *, operations: int, clients: int, ambiguous: float, values: int = 10**9
) -> History:
    """Return a history of one key; `values` bounds how many different values are written."""
    store = Store()

    def draw() -> Any:
        value = f"v{rng.randrange(values)}"
        version = rng.choice([None, None, store.version, max(0, store.version - 1)])
        return rng.choice(
            [
                models.Get(),
                models.Get(),
                models.Put(value, version, overwrite=rng.random() < 0.7),
                models.Delete(version),
            ]
        )

    return _run(rng, draw, store.perform, operations, clients, ambiguous)


def stream_history(
    rng: random.Random, *, operations: int, clients: int, ambiguous: float, values: int = 10**9
) -> History:
    """Return a history of one stream; `values` bounds how many different objects are committed."""
    store = StreamStore()

    def draw() -> Any:
        start = rng.choice([store.end, store.end, max(0, store.end - 1)])
        commit = models.CommitRange(rng.randrange(values), start, start + rng.randint(1, 3))
        return rng.choice([commit, commit, models.ReadEnd(), models.ReadObjects()])

    return _run(rng, draw, store.perform, operations, clients, ambiguous)


def _run(
    rng: random.Random,
    draw: Callable[[], Any],
    perform: Callable[[Any], Any],
    operations: int,
    clients: int,
    ambiguous: float,
) -> History:
    """Let each free client ask, each asked request take effect, each performed one return."""
    now = started = 0
    asked: dict[int, tuple[Any, int]] = {}
    performed: dict[int, tuple[Any, int, Any]] = {}
    history: History = []
    lost: list[Any] = []
    while started < operations or asked or performed:
        now += 1
        client = rng.randrange(clients)
        if client in asked:
            request, invoked = asked.pop(client)
            if rng.random() >= ambiguous:
                performed[client] = (request, invoked, perform(request))
                continue
            history.append(Operation(f"c{client}", "key", request, invoked))
            lost.append(request)
        elif client in performed:
            request, invoked, answer = performed.pop(client)
            if rng.random() < ambiguous:
                history.append(Operation(f"c{client}", "key", request, invoked, None, UNKNOWN))
            else:
                history.append(Operation(f"c{client}", "key", request, invoked, now, answer))
        elif lost and rng.random() < 0.1:
            # A request that was given up on takes effect late, or never.
            perform(lost.pop(rng.randrange(len(lost))))
        elif started < operations:
            started += 1
            asked[client] = (draw(), now)
    return history
