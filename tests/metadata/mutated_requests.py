"""Mutations of requests: one field, row, column or several at a time, at any depth.

Owns what a request may be changed to: hostile numbers, ids of other objects, streams and nodes,
columns of unequal lengths, swapped fields, repeats with other content. Judges nothing. Types are
respected as far as the wire contract guarantees them: columns and integers are 64 bits wide.
"""

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables.values import Int64Column, NodeIdentity, Tags, column
from streammeta.rpc.method_facts import BATCH_MAX
from tests.metadata.random_commits import NODE_IDS
from tests.metadata.slow_model_state import State

_CLASSES = [kind for kind in vars(r).values() if isinstance(kind, type)]
WRITES, READS = (
    tuple(class_ for class_ in _CLASSES if issubclass(class_, base) and class_ is not base)
    for base in (r.WriteRequest, r.ReadRequest)
)
KEY_FIELDS = frozenset(("object_id", "request_id", "node"))
"""Fields by which the map recognizes a repeat."""
_INT64_MAX = 2**63 - 1
_HOSTILE = (-1, -1, 0, 0, -2, 2**31 - 1, 2**31, _INT64_MAX, _INT64_MAX, _INT64_MAX - 1, -(2**63))
_TEXTS = (
    "",
    "a",
    "b",
    "7",
    "-1",
    "²",
    "9" * 5_000,
    "x" * 64,
    "x" * 65,
    "\x00",
    "a\x00b",
    "é" * 600,
)
_ENUM_NUMBERS = (-1, 3, 7, 2**31 - 1)
_EARLIER_MAX = 60
_Rows = Callable[[list[int]], list[int]]
"""What happens to the row numbers 0 to n-1 of a column or a tuple."""


class Mutations:
    """Draws mutations; `state` is the source of ids that exist or existed."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._state = State()
        self._mentioned: list[int] = []
        self._earlier: list[Any] = []

    def remember(self, request: Any) -> None:
        """Keep a request that was made, to be repeated."""
        if len(self._earlier) >= _EARLIER_MAX:
            self._earlier.pop(self._rng.randrange(_EARLIER_MAX))
        self._earlier.append(request)

    def mutated(self, request: Any, state: State) -> Any:
        """Return the request with one to three changes; as it is if it has no fields."""
        if not dataclasses.fields(request):
            return request
        self._state, self._mentioned = state, list(_numbers(request))
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            request = self._one_change(request)
        return request

    def repeated(self, state: State) -> Any:
        """Return an earlier request, often with other content under the same id."""
        request = self._rng.choice(self._earlier)
        if self._rng.random() < 0.3 or not dataclasses.fields(request):
            return request
        self._state, self._mentioned = state, list(_numbers(request))
        names = [field.name for field in dataclasses.fields(request)]
        content = [name for name in names if name not in KEY_FIELDS]
        return self._field(request, self._rng.choice(content or names))

    def nonsense(self, kind: Any, state: State) -> Any:
        """Return a value of an annotated type whose parts are unrelated."""
        self._state, self._mentioned = state, []
        return self._value(kind)

    # ---- changes ----

    def _one_change(self, item: Any) -> Any:
        drawn = self._rng.random()
        if drawn < 0.12:
            return self._swapped(item)
        if drawn < 0.27:
            return self._rows_of_table(item)
        return self._field(item, self._rng.choice(dataclasses.fields(item)).name)

    def _field(self, item: Any, name: str) -> Any:
        hint = typing.get_type_hints(type(item))[name]
        return replace(item, **{name: self._changed(getattr(item, name), hint)})

    def _swapped(self, item: Any) -> Any:
        hints = typing.get_type_hints(type(item))
        alike = [(a, b) for a in hints for b in hints if a < b and hints[a] == hints[b]]
        if not alike:
            return self._field(item, self._rng.choice(list(hints)))
        first, second = self._rng.choice(alike)
        return replace(item, **{first: getattr(item, second), second: getattr(item, first)})

    def _rows_of_table(self, item: Any) -> Any:
        """Do the same to the rows of all columns of a table."""
        columns = {
            field.name: getattr(item, field.name)
            for field in dataclasses.fields(item)
            if _is_filled_column(getattr(item, field.name))
        }
        if not columns:
            return self._field(item, self._rng.choice(dataclasses.fields(item)).name)
        rows = len(next(iter(columns.values())))
        order = self._rows()(list(range(rows)))
        changes = {
            name: column(values[order]) for name, values in columns.items() if len(values) == rows
        }
        return replace(item, **changes)

    def _rows(self) -> _Rows:
        rng = self._rng
        repeated = rng.random()
        return rng.choice(
            (
                lambda rows: rows[:-1],
                lambda rows: rows[1:],
                lambda rows: rows + rows[:1],
                lambda rows: rows * 2,
                lambda rows: rng.sample(rows, len(rows)),
                lambda rows: rows[::-1],
                lambda _: [],
                lambda rows: rows * (BATCH_MAX + 1) if repeated < 0.02 else rows + rows[-1:],
            )
        )

    def _changed(self, old: Any, hint: Any) -> Any:
        if hint == Int64Column:
            return self._column(old)
        if isinstance(old, NodeIdentity) and self._rng.random() < 0.4:
            return self._node()
        if dataclasses.is_dataclass(old):
            return self._one_change(old)
        if isinstance(old, tuple) and old and hint != Tags and self._rng.random() < 0.9:
            return self._items(old, typing.get_args(hint)[0])
        if isinstance(old, enum.Enum):
            return self._rng.choice((*type(old), *_ENUM_NUMBERS))
        if isinstance(old, bool):
            return not old
        return self._number(old) if isinstance(old, int) else self._value(hint)

    def _column(self, old: Int64Column) -> Int64Column:
        values = old.tolist()
        if not values or self._rng.random() < 0.1:
            return column(self._numbers_drawn())
        if self._rng.random() < 0.5:
            at = self._rng.randrange(len(values))
            values[at] = self._number(values[at])
            return column(values)
        if self._rng.random() < 0.2:
            return column([self._number(values[0])] * len(values))
        return column([values[row] for row in self._rows()(list(range(len(values))))])

    def _items(self, old: tuple[Any, ...], hint: Any) -> tuple[Any, ...]:
        items = list(old)
        if self._rng.random() < 0.6:
            at = self._rng.randrange(len(items))
            items[at] = self._changed(items[at], hint)
            return tuple(items)
        return tuple(items[row] for row in self._rows()(list(range(len(items)))))

    # ---- values ----

    def _number(self, old: int) -> int:
        rng = self._rng
        drawn = rng.random()
        if drawn < 0.25:
            number = old + rng.choice((-1, 1))
        elif drawn < 0.55:
            number = rng.choice(_HOSTILE)
        elif drawn < 0.7 and self._mentioned:
            number = rng.choice(self._mentioned)
        else:
            number = self._id()
        return max(-(2**63), min(number, _INT64_MAX))

    def _id(self) -> int:
        """Return an id of something in any state, or of something that never was."""
        rng, state = self._rng, self._state
        by_state: dict[Any, list[int]] = {}
        for object_id, item in state.objects.items():
            by_state.setdefault((item.state, item.kind), []).append(object_id)
        pools = [ids for _, ids in sorted(by_state.items())]
        removed = sorted(state.forgotten_commits)
        pools += [removed] if removed else []
        pools += [[state.next_object, state.next_object + 1, state.next_stream], list(NODE_IDS)]
        pools.append(list(range(state.next_stream)) or [0])
        return rng.choice(rng.choice(pools))

    def _node(self) -> NodeIdentity:
        node_id = self._rng.choice((*NODE_IDS, *self._state.nodes, 5))
        node = self._state.nodes.get(node_id)
        epoch = node.epoch if node is not None else 1
        return NodeIdentity(node_id, epoch if self._rng.random() < 0.7 else self._number(epoch))

    def _numbers_drawn(self, count: int | None = None) -> list[int]:
        rows = self._count() if count is None else count
        return [self._number(self._rng.randrange(30)) for _ in range(rows)]

    def _count(self) -> int:
        return self._rng.choice((0, 1, 1, 1, 2, 2, 3, 40))

    def _value(self, kind: Any) -> Any:
        if kind == Int64Column:
            return column(self._numbers_drawn())
        if kind == r.Queries:
            kind = typing.get_args(kind)[0]
        origin = typing.get_origin(kind)
        if origin in (typing.Union, types.UnionType):
            return self._value(self._rng.choice(typing.get_args(kind)))
        if origin is tuple:
            return self._tuple(typing.get_args(kind))
        if kind is type(None):
            return None
        if kind is NodeIdentity and self._rng.random() < 0.6:
            return self._node()
        if dataclasses.is_dataclass(kind):
            return self._dataclass(kind, typing.get_type_hints(kind))
        if issubclass(kind, enum.Enum):
            return self._rng.choice(list(kind))
        return self._plain(kind)

    def _dataclass(self, make: Any, hints: dict[str, Any]) -> Any:
        if set(hints.values()) == {Int64Column} and self._rng.random() < 0.8:
            rows = self._count()
            return make(**{name: column(self._numbers_drawn(rows)) for name in hints})
        return make(**{name: self._value(hint) for name, hint in hints.items()})

    def _plain(self, kind: type) -> Any:
        rng = self._rng
        if kind is bool:
            return rng.random() < 0.5
        if kind is int:
            return self._number(rng.randrange(30))
        if kind is bytes:
            return rng.randbytes(rng.choice((0, 1, 9, 9, (1 << 20) + 1)))
        assert kind is str, kind
        return rng.choice(_TEXTS)

    def _tuple(self, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(parts) == 2 and parts[1] is Ellipsis:
            return tuple(self._value(parts[0]) for _ in range(self._count()))
        return tuple(self._value(part) for part in parts)


def _is_filled_column(value: Any) -> bool:
    return hasattr(value, "dtype") and len(value) > 0


def _numbers(item: Any) -> Iterator[int]:
    if isinstance(item, int):
        yield int(item)
    elif hasattr(item, "dtype"):
        yield from item.tolist()
    elif isinstance(item, tuple):
        for part in item:
            yield from _numbers(part)
    elif dataclasses.is_dataclass(item):
        for field in dataclasses.fields(item):
            yield from _numbers(getattr(item, field.name))


def largest_number(item: Any) -> int:
    """Return the largest magnitude of any number in a request, 0 without numbers."""
    return max((abs(number) for number in _numbers(item)), default=0)


def offsets_end(item: Any) -> int:
    """Return the largest offset or count in a request: what the slow model makes sets of."""
    if not dataclasses.is_dataclass(item):
        return max(map(offsets_end, item), default=0) if isinstance(item, tuple) else 0
    largest = 0
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        is_size = field.name.endswith("offset") or field.name == "count"
        largest = max(largest, largest_number(value) if is_size else offsets_end(value))
    return largest


def row_count(item: Any) -> int:
    """Return the largest number of rows or items of any part of a request."""
    if hasattr(item, "dtype"):
        return len(item)
    if isinstance(item, tuple):
        return max([len(item), *map(row_count, item)])
    if dataclasses.is_dataclass(item):
        fields = dataclasses.fields(item)
        return max((row_count(getattr(item, field.name)) for field in fields), default=0)
    return 0
