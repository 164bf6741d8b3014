"""Virtual brokers that append to shared streams, and what must hold of the offsets they are told.

An `Appender` is an idempotent producer that sends its batches through two brokers. It knows neither
offsets nor outcomes that got lost: it repeats such a commit, or sends the batch through another
broker in another object. Whatever it does, each batch is committed once, in its producer's order,
at the offset that every answer tells.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from streammeta.controller.errors import ErrorCode
from streammeta.controller.features import SUPPORTED
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables import values as v
from tests.sim.sim_clients import MapClient
from tests.sim.sim_shared_streams import FIRST_PRODUCER
from tests.sim.sim_time import check

if TYPE_CHECKING:
    from tests.sim.sim_world import World

_BROKERS = (2_001, 2_002)
"""Nodes that no other client speaks for."""
_STREAMS = 2
_IDS = 20
_COLUMNS = tuple(column.name for column in fields(v.SharedRowColumns))
_PLAIN = 0.2
"""Share of commits that come with a row without a producer."""


@dataclass(slots=True)
class _Lane:
    """One stream, as its producer sees it."""

    stream_id: int
    sequence: int = 0
    count: int = 1
    last_end: int = 0
    """End of the newest batch that was acknowledged."""
    told: dict[int, int] = field(default_factory=dict)
    """First sequence -> offset."""


class Appender(MapClient):
    """One producer, its brokers and its streams."""

    def __init__(self, world: World, rng: random.Random, number: int) -> None:
        super().__init__(world)
        self._rng = rng
        self._producer = FIRST_PRODUCER + number
        self._first = iter(())
        self._setup = [
            *(r.RegisterNode(node=v.NodeIdentity(node, 1)) for node in _BROKERS),
            r.SetFeatureLevel(level=SUPPORTED.highest),
        ]
        self._lanes: list[_Lane] = []
        self._ids: dict[int, list[int]] = {node: [] for node in _BROKERS}
        self._pending: list[r.CommitStreamSetObject] = []
        """Commits of the present batches, none of them answered."""
        self._serial = 0

    def _some_request(self) -> Any:
        if self._setup:
            return self._setup[0]
        if len(self._lanes) < _STREAMS:
            return self._create()
        node = self._rng.choice(_BROKERS)
        if not self._ids[node]:
            return self._prepare(node)
        if self._pending and self._rng.random() < 0.5:
            self._world.count("appends repeated")
            return self._rng.choice(self._pending)
        if self._pending:
            self._world.count("appends sent in another object")
        return self._append(node)

    def _create(self) -> Any:
        self._serial += 1
        return r.CreateStreams(
            request_id=f"{self._producer}-{self._serial}",
            node=v.NodeIdentity(_BROKERS[0], 1),
            streams=(r.NewStream(shared=True),),
        )

    def _prepare(self, node: int) -> Any:
        self._serial += 1
        return r.PrepareObjects(
            request_id=f"{self._producer}-{self._serial}",
            node=v.NodeIdentity(node, 1),
            count=_IDS,
            ttl_ms=60_000,
        )

    def _append(self, node: int) -> r.CommitStreamSetObject:
        rows: list[tuple[int, int, int, int, int]] = []
        for lane in sorted(self._lanes, key=lambda lane: lane.stream_id):
            if self._rng.random() < _PLAIN:
                rows.append((lane.stream_id, self._rng.randint(1, 3), -1, -1, -1))
            rows.append((lane.stream_id, lane.count, self._producer, 0, lane.sequence))
        columns = [v.column(cells) for cells in zip(*rows, strict=True)]
        object_id = self._ids[node].pop()
        return r.CommitStreamSetObject(
            node=v.NodeIdentity(node, 1),
            object_id=object_id,
            order_id=-1,
            object_size=7,
            on_conflict=self._rng.choice(list(v.OnConflict)),
            shared_rows=v.SharedRowColumns(**dict(zip(_COLUMNS, columns, strict=True))),
        )

    def _try(self, request: Any, attempts: int) -> None:
        # Without an answer the batch often goes to another broker instead.
        super()._try(request, self._rng.choice((0, attempts)))

    # ---- answers ----

    def _upload(self, request: Any) -> None:
        super()._upload(request)
        if isinstance(request, r.CommitStreamSetObject) and request not in self._pending:
            self._pending.append(request)

    def _see(self, request: Any, answer: Any) -> None:
        if self._setup and request is self._setup[0]:
            self._setup.pop(0)
        elif isinstance(request, r.CreateStreams):
            self._lanes += [_Lane(stream_id) for stream_id in answer.stream_ids]
        elif isinstance(request, r.PrepareObjects) and answer.error is ErrorCode.NONE:
            first = answer.first_object_id
            self._ids[request.node.node_id] += range(first, first + request.count)
        elif isinstance(request, r.CommitStreamSetObject):
            self._see_rows(request, answer)

    def _see_rows(self, request: r.CommitStreamSetObject, answer: Any) -> None:
        """Note where batches are, and go on to the next ones of their streams."""
        self._pending = [commit for commit in self._pending if commit is not request]
        rows = request.shared_rows
        columns = (rows.stream_id, rows.producer_id, rows.first_sequence)
        results = (answer.shared.errors, answer.shared.start_offset)
        done = False
        for stream, producer, first, error, start in zip(
            *(values.tolist() for values in (*columns, *results)), strict=True
        ):
            lane = next((lane for lane in self._lanes if lane.stream_id == stream), None)
            if error == ErrorCode.STREAM_NOT_EXIST and lane is not None:
                self._lanes.remove(lane)  # another client has deleted it
                done = True
            elif lane is not None and producer >= 0:
                is_made = answer.error is ErrorCode.NONE and error == ErrorCode.NONE
                if is_made or error == ErrorCode.DUPLICATE_BATCH:
                    done |= self._tell(lane, first, start)
        if done:
            # Their answers tell nothing new, and may leave out what has been committed since.
            self._pending = []

    def _tell(self, lane: _Lane, first: int, start: int) -> bool:
        """Note an offset; return whether it is that of the present batch."""
        known = lane.told.setdefault(first, start)
        detail = f"batch {first} of {self._producer} in {lane.stream_id}: {known}, then {start}"
        check(known == start, "a batch has one offset", detail)
        watch = self._world.ghost.ledger.append_watch
        check(
            watch.start_of(lane.stream_id, self._producer, first) == start,
            "an acknowledged batch is in the log at its offset",
            detail,
        )
        if first != lane.sequence:
            return False
        self._world.count("batches acknowledged")
        check(start >= lane.last_end, "batches keep their producer's order", detail)
        lane.last_end, lane.sequence = start + lane.count, lane.sequence + lane.count
        lane.count = self._rng.randint(1, 4)
        return True
