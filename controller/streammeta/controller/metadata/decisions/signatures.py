"""Adapters that give deciders and replayers the signatures that the metadata calls."""

from collections.abc import Callable, Sequence
from typing import Any

from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.records.record import Record


def ignore_offset(replay: Callable[[Any, Undo], None]) -> Callable[[Any, int, Undo], None]:
    """Adapt a replayer that does not depend on the log offset."""
    return lambda record, _offset, undo: replay(record, undo)


def with_time(decide: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a decision that depends on the time only."""
    return lambda request, now_ms, _offset: decide(request, now_ms)


def without_time(decide: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a decision that depends neither on the time nor on the log offset."""
    return lambda request, _now_ms, _offset: decide(request)


def as_list(decide: Callable[..., tuple[Record | None, Any]]) -> Callable[..., Any]:
    """Adapt a decision of at most one record to a sequence of records."""

    def decide_many(*args: Any) -> tuple[Sequence[Record], Any]:
        record, answer = decide(*args)
        return () if record is None else (record,), answer

    return decide_many
