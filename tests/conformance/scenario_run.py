"""One scenario of operations: its controller, its clock and what the steps have in common.

Sends requests, keeps what the scenarios know that the map does not (the end a current range had
when it was recorded, data times of objects that are gone), and shifts node epochs. Operations and
facts are built on it; it judges nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api import answers, requests
from streammeta.controller.metadata.tables import values
from streammeta.controller.records.record import Record
from tests.conformance.foreign_records import EPOCH_SHIFT, ForeignRecords
from tests.conformance.live_controller import LiveController, OverloadWorld
from tests.conformance.map_rows import MetadataRows
from tests.conformance.scenario_args import Args
from tests.conformance.storage_world import StorageWorld
from tests.kit.waiting import ManualClock

SERVICE = values.NodeIdentity(999, 0)
"""Makes the calls that the scenarios make without a node; ids below 1000 are never issued."""

PAGE = values.PageRequest(page_size=10_000)
TOPIC_DELETIONS = "__automq_topic_deletion/"
GIVEN_TTL_MS = 24 * 3_600_000
ISSUED_AHEAD_MAX = 100_000
"""How far above the issued ids a stream may be that is to be one that was deleted."""


@dataclass(slots=True)
class Outcome:
    """What an operation came to: answered fields, and the deviations' conditions it met."""

    answer: dict[str, Any] = field(default_factory=dict)
    features: list[str] = field(default_factory=list)
    records: tuple[Record, ...] | None = None


class ScenarioRun:
    """What operations and facts share."""

    def __init__(self, scenario: Mapping[str, Any]) -> None:
        clock = dict(scenario.get("clock") or {})
        self.is_timed = bool(clock)
        self.scenario = scenario
        self.config = dict(scenario.get("config") or {})
        self.level = int(str(scenario.get("version", "V6")).lstrip("V"))
        self.clock = ManualClock(int(clock.get("t0", 0)))
        self.live = LiveController(self.clock)
        self.foreign = ForeignRecords(self.live)
        self.storage = StorageWorld(scenario, self.live, self.clock)
        self.overload: OverloadWorld | None = None
        self.topics = _topics_of(scenario)
        self.data_times: dict[int, int] = {}
        self.committed_once: set[int] = set()
        self.contents: dict[int, str] = {}
        """Per result of a commit all that the commit said of it."""
        self.is_malformed = False
        self.expects_success = True
        self.registered_epochs: dict[str, dict[int, int]] = {}
        self.dry_run = False
        """Whether the present step is only judged."""
        self.given = Args({}, "given")
        """What the present step gives besides its arguments."""
        self._requests = 0

    async def prepare(self) -> None:
        """Register the runner's node and put the given objects in place."""
        await self.live.write(requests.RegisterNode(node=SERVICE))
        given = self.scenario.get("given_objects") or {}
        prepared, committed = given.get("prepared") or [], given.get("committed") or []
        if prepared or committed:
            with self.live.edited() as rows:
                for object_id in prepared:
                    self._given(rows, object_id, values.ObjectState.PREPARED)
                for object_id in committed:
                    self._given(rows, object_id, values.ObjectState.COMMITTED)
                rows.counters["next_object_id"] = max([*prepared, *committed]) + 1
        self.live.take_records()

    def _given(self, rows: MetadataRows, object_id: int, state: values.ObjectState) -> None:
        is_prepared = state is values.ObjectState.PREPARED
        rows.put(
            "objects",
            {"object_id": object_id},
            state=int(state),
            kind=int(values.ObjectKind.UNKNOWN if is_prepared else values.ObjectKind.STREAM_SET),
            node_id=-1 if is_prepared else SERVICE.node_id,
            order_id=-1 if is_prepared else object_id,
            timestamp_ms=self.clock.now_ms + (GIVEN_TTL_MS if is_prepared else 0),
        )

    # ---- requests ----

    def request_id(self) -> str:
        self._requests += 1
        return f"request-{self._requests}"

    def is_behind_other_registry(
        self, registry: str, node: values.NodeIdentity, stored: int
    ) -> bool:
        """Whether a node is behind `stored` only by what it told another registry.

        The scenarios have two registries of node epochs, the contract has one.
        """
        known = self.registered_epochs.setdefault(registry, {})
        latest = known.get(node.node_id, -1)
        known[node.node_id] = max(latest, node.node_epoch)
        return latest <= node.node_epoch < stored

    def node(self, node_id: int, node_epoch: int) -> values.NodeIdentity:
        """Return a node as the contract numbers its epochs."""
        return values.NodeIdentity(node_id, node_epoch + EPOCH_SHIFT)

    async def send(
        self, request: requests.WriteRequest, *, judged: bool = False
    ) -> tuple[Any, Any]:
        """Return the answer, and the records if the request was only judged."""
        if judged or self.dry_run:
            return self.live.judge(request)
        return await self.live.write(request), None

    async def send_about(
        self, stream_ids: Iterable[int], request: requests.WriteRequest
    ) -> tuple[Any, Any, bool]:
        """Send a request about streams of which some may never have been created.

        To the scenarios a stream that is not there is one that was deleted; here an id that was
        never issued is an error. So such ids are issued while the request is made. Returns whether
        there were any besides the answer and the records.
        """
        next_id = self.next_stream_id()
        beyond = max(stream_ids, default=-1)
        if not next_id <= beyond < next_id + ISSUED_AHEAD_MAX:
            return *(await self.send(request)), False
        self._set_next_stream_id(beyond + 1)
        try:
            return *(await self.send(request)), True
        finally:
            self._set_next_stream_id(next_id)

    def _set_next_stream_id(self, stream_id: int) -> None:
        with self.live.edited() as rows:
            rows.counters["next_stream_id"] = stream_id

    def next_stream_id(self) -> int:
        return int(self.live.rows().counters["next_stream_id"])

    # ---- reading ----

    async def all(self, request: Any, name: str) -> list[Any]:
        """Return what all pages of an answer hold under this name."""
        found: list[Any] = []
        page = PAGE
        while True:
            answer = await self.live.read(replace(request, page=page))
            found += getattr(answer, name)
            if not answer.next_page_token:
                return found
            page = replace(PAGE, page_token=answer.next_page_token)

    async def streams(self) -> dict[int, answers.StreamDescription]:
        request = requests.DescribeStreams(include_ranges=True, include_stream_objects=True)
        return {item.stream_id: item for item in await self.all(request, "streams")}

    async def nodes(self) -> dict[int, answers.NodeDescription]:
        """Return all nodes but the runner's own."""
        answer = await self.live.read(requests.GetNodes(include_stream_set_objects=True))
        return {node.node_id: node for node in answer.nodes if node.node_id != SERVICE.node_id}

    async def objects(self) -> dict[int, answers.ObjectDescription]:
        return {
            item.object_id: item for item in await self.all(requests.DescribeObjects(), "objects")
        }

    async def pending_topic_deletions(self) -> list[str]:
        entries = await self.all(requests.ListKVs(prefix=TOPIC_DELETIONS), "entries")
        return [entry.key.removeprefix(TOPIC_DELETIONS) for entry in entries]

    def pending_uploads(self) -> dict[int, dict[int, tuple[int, int]]]:
        """Return by node and stream what is owed, also what no longer matters."""
        found: dict[int, dict[int, tuple[int, int]]] = {}
        for row in self.live.rows().rows("pending_uploads"):
            owed = found.setdefault(row["node_id"], {})
            owed[row["stream_id"]] = (row["start_offset"], row["end_offset"])
        return found

    async def current_epoch(self, stream_id: int) -> int:
        """Return the epoch of a stream, 0 if there is none."""
        stream = (await self.streams()).get(stream_id)
        return stream.epoch if stream is not None else 0

    async def remember(self) -> None:
        """Note what later steps may ask for when it is gone."""
        for item in (await self.objects()).values():
            if item.state is values.ObjectState.COMMITTED:
                self.committed_once.add(item.object_id)
        for node in (await self.nodes()).values():
            for held in node.stream_set_objects:
                self.data_times.setdefault(held.object_id, held.data_time_ms)


def error_name(error: ErrorCode | int) -> str:
    return ErrorCode(error).name.replace("NOT_COMMITTED", "NOT_COMMITED")


_TOPIC_NOTE = re.compile(r"[Tt]opic '([^']+)' has id ([A-Za-z0-9_-]{22})")


def _topics_of(scenario: Mapping[str, Any]) -> dict[str, str]:
    """Return ids by name of the topics a scenario speaks of: the cluster's, not the map's."""
    topics = dict(_TOPIC_NOTE.findall(str(scenario.get("notes", ""))))
    for step in scenario.get("steps") or []:
        for item in (step.get("expect") or {}).get("streams") or []:
            if isinstance(item, dict) and item.get("topic_name") and item.get("topic_id"):
                topics.setdefault(item["topic_name"], item["topic_id"])
    return topics
