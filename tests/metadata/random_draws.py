"""Draws that all random requests are made of: nodes, streams and ids that mostly fit a state.

Draws come from any `random.Random`, so hypothesis can shrink them.
"""

from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

from streammeta.controller.metadata import values as v
from tests.metadata.slow_model_state import State
from tests.metadata.slow_model_uploads import Row

NODE_IDS = (7, 1_000, 1_001)
_T = TypeVar("_T")


class RandomDraws:
    """Draws for one sequence of requests."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        # What a whole sequence prefers: some states are reached by many of the same kind alone.
        self._stream_objects_percent = rng.choice((30, 30, 90))
        self._facts_percent = rng.choice((0, 50, 97))

    def _one(self, values: Sequence[_T]) -> _T:
        return values[self._rng.randrange(len(values))]

    def _chance(self, percent: int) -> bool:
        return self._rng.randrange(100) >= 100 - percent

    def _some(self, values: Sequence[_T], most: int) -> list[_T]:
        rest = list(values)
        count = self._rng.randint(1, max(1, min(most, len(rest)))) if rest else 0
        return [rest.pop(self._rng.randrange(len(rest))) for _ in range(count)]

    def _request_id(self) -> str:
        # A few are used again and again, most only once.
        return f"r{self._rng.randrange(4 if self._chance(15) else 2**32)}"

    def _identity(self, state: State, node_id: int) -> v.NodeIdentity:
        node = state.nodes.get(node_id)
        epoch = node.epoch if node is not None else 1
        return v.NodeIdentity(node_id, max(0, epoch + self._one((0,) * 30 + (1, -1))))

    def _node(self, state: State) -> v.NodeIdentity:
        usable = [i for i, node in state.nodes.items() if not (node.failover or node.departed)]
        if usable and not self._chance(15):
            return self._identity(state, self._one(usable))
        return self._identity(state, self._one(NODE_IDS))

    def _owner(self, state: State, stream_id: int) -> v.NodeIdentity:
        stream = state.streams.get(stream_id)
        if stream is None or stream.node < 0 or self._chance(8):
            return self._node(state)
        return self._identity(state, stream.node)

    def _stream(self, state: State) -> int:
        if state.streams and not self._chance(10):
            return self._one(sorted(state.streams))
        return self._any_stream(state)

    def _any_stream(self, state: State) -> int:
        """Return a stream that may be gone, or may not have been created yet."""
        return self._rng.randrange(state.next_stream + 2)

    def _epoch(self, state: State, stream_id: int, *, least: int = 0) -> int:
        stream = state.streams.get(stream_id)
        epoch = stream.epoch if stream is not None else 0
        return max(least, epoch + self._one((0,) * 30 + (1, -1)))

    def _prepared(self, state: State, count: int) -> list[int]:
        """Return `count` different ids, mostly prepared ones."""
        prepared = [i for i in state.objects if state.is_prepared(i)]
        others = [i for i in range(state.next_object + count) if i not in prepared]
        chosen: list[int] = []
        for _ in range(count):
            source = others if not prepared or self._chance(3) else prepared
            chosen.append(source.pop(self._rng.randrange(len(source))))
        return chosen

    def _facts(self) -> dict[str, Any]:
        """Return what is known of an object's content, with -1 for what is not."""
        low = high = crc32c = -1
        if self._chance(self._facts_percent):
            low = self._one((0, self._rng.randrange(9), 2**63 - 1))
            high = min(low + self._one((0, 3, 2**62)), 2**63 - 1)
        if self._chance(self._facts_percent):
            crc32c = self._one((0, 5, 2**32 - 1))
        return {"min_timestamp_ms": low, "max_timestamp_ms": high, "crc32c": crc32c}

    def _fact_columns(self, count: int) -> dict[str, v.Int64Column]:
        """Return the facts of `count` objects; columns that know nothing are sometimes empty."""
        rows = [self._facts() for _ in range(count)]
        names = ("min_timestamp_ms", "max_timestamp_ms", "crc32c")
        columns = {name: v.column([row[name] for row in rows]) for name in names}
        for alike in (names[:2], names[2:]):
            if all((columns[name] == -1).all() for name in alike) and self._chance(50):
                columns.update((name, v.column()) for name in alike)
        return columns

    def _tags(self) -> v.Tags:
        return self._one(((), (("k", "v"),), (("z", "1"), ("a", "2"))))


def range_columns(rows: list[Row], *, epochs: bool) -> v.RangeColumns:
    """Return rows as columns; without `epochs` that column is empty."""
    return v.RangeColumns(
        stream_id=v.column([row.stream for row in rows]),
        stream_epoch=v.column([row.epoch for row in rows] if epochs else ()),
        start_offset=v.column([row.start for row in rows]),
        end_offset=v.column([row.end for row in rows]),
    )
