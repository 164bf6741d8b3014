"""A cluster in memory for disasters: a bucket, brokers that write, fence each other and compact.

The map is the real one; objects are lists of records. Knows what was acknowledged, offset by
offset. Every choice comes from one seed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from random import Random
from typing import Any

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata.cluster_map import ClusterMap
from streammeta.controller.metadata.values import NodeIdentity, RangeColumns, column
from streammeta.storage.adoption.planner import Candidate, Entry, StoredRecord, StoredRun

NODES = (NodeIdentity(7, 1), NodeIdentity(8, 1), NodeIdentity(9, 1))
NOW_MS = 1_000_000
TTL_MS = 10**8


@dataclass(slots=True)
class World:
    """The cluster before the disaster."""

    rng: Random
    map: ClusterMap = field(default_factory=ClusterMap)
    bucket: dict[int, Candidate] = field(default_factory=dict)
    acknowledged: dict[int, dict[int, StoredRecord]] = field(default_factory=dict)
    """By stream, the record at each offset."""
    epochs: dict[int, int] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)
    """Index of the node that has a stream open, by stream."""
    retries: dict[int, dict[int, list[StoredRecord]]] = field(default_factory=dict)
    """By node, what was put into the bucket and not committed; it may be put again."""
    owed: dict[int, tuple[int, list[StoredRecord]]] = field(default_factory=dict)
    """By stream closed before its last upload, the node that owes it and the records."""
    texts: Any = field(default_factory=itertools.count)

    def start(self) -> None:
        """Register the nodes; each opens two streams."""
        self.write(r.SetFeatureLevel(level=2))
        for index, node in enumerate(NODES):
            self.write(r.RegisterNode(node=node))
            new = (r.NewStream(), r.NewStream())
            answer = self.write(r.CreateStreams(request_id="s", node=node, streams=new))
            for stream_id in answer.stream_ids:
                self.epochs[stream_id] = 0
                self.acknowledged[stream_id] = {}
                self.open(stream_id, index)

    def write(self, request: Any) -> Any:
        offset = self.map.applied_end_offset
        decision = self.map.decide(request, NOW_MS, offset)
        if decision.records:
            self.map.apply(offset, decision.records)
            self.map.forget_undo(offset + 1)
        return decision.answer

    def step(self) -> None:
        """Let something happen."""
        kinds, weights = ("upload", "take_over", "owe", "compact"), (70, 14, 6, 10)
        (kind,) = self.rng.choices(kinds, weights)
        getattr(self, f"_{kind}")()

    # ---- uploads ----

    def _upload(self) -> None:
        index = self.rng.randrange(len(NODES))
        mine = sorted(one for one, owner in self.owners.items() if owner == index)
        if not mine:
            return
        retried = self.retries.pop(index, {})
        runs = {one: records for one, records in retried.items() if one in mine}
        if not runs:
            chosen = self.rng.sample(mine, self.rng.randint(1, len(mine)))
            runs = {one: self._records(one) for one in sorted(chosen)}
        object_id = self._put(index, runs)
        if self.rng.random() < 0.2:
            self.retries[index] = runs  # the broker never heard of its commit, and goes no further
        else:
            self.commit(index, object_id, runs)

    def _records(self, stream_id: int) -> list[StoredRecord]:
        at, records = self.end(stream_id), []
        for _ in range(self.rng.randint(1, 4)):
            end = at + self.rng.randint(1, 3)
            text = str(next(self.texts)).encode()
            records.append(StoredRecord(at, end, self.epochs[stream_id], text))
            at = end
        return records

    def _put(self, index: int, runs: dict[int, list[StoredRecord]], whole: bool = False) -> int:
        """Put an object with these records into the bucket; `whole` makes each run one entry."""
        answer = self.write(
            r.PrepareObjects(
                request_id=f"p{next(self.texts)}", node=NODES[index], count=1, ttl_ms=TTL_MS
            )
        )
        object_id: int = answer.first_object_id
        self.bucket[object_id] = Candidate(
            object_id,
            10,
            tuple(
                StoredRun(object_id, stream_id, self._entries(records, whole=whole))
                for stream_id, records in sorted(runs.items())
            ),
        )
        return object_id

    def _entries(self, records: list[StoredRecord], *, whole: bool) -> tuple[Entry, ...]:
        if whole or self.rng.random() < 0.3:
            return (tuple(records),)
        return tuple((record,) for record in records)

    def commit(
        self,
        index: int,
        object_id: int,
        runs: dict[int, list[StoredRecord]],
        sources: list[int] | None = None,
    ) -> bool:
        """Commit an object of the bucket; note what is acknowledged by that."""
        ids = sorted(runs)
        answer = self.write(
            r.CommitStreamSetObject(
                node=NODES[index],
                object_id=object_id,
                order_id=-1,
                object_size=10,
                ranges=RangeColumns(
                    stream_id=column(ids),
                    start_offset=column([runs[one][0].start for one in ids]),
                    end_offset=column([runs[one][-1].end for one in ids]),
                ),
                compacted_object_ids=column(sources or []),
            )
        )
        if answer.error is not ErrorCode.NONE:
            return False
        for stream_id, records in runs.items():
            for record in records:
                self.acknowledged[stream_id][record.start] = record
        return True

    def end(self, stream_id: int) -> int:
        """End of a stream."""
        answer: Any = self.map.query(r.DescribeStreams(stream_ids=(stream_id,)))
        return int(answer.streams[0].end_offset)

    # ---- owners ----

    def open(self, stream_id: int, index: int) -> None:
        """Open a closed stream on a node, under a larger epoch."""
        self.epochs[stream_id] += self.rng.randint(1, 2)
        item = r.StreamToOpen(stream_id, self.epochs[stream_id])
        opened = self.write(r.OpenStreams(node=NODES[index], streams=(item,))).streams[0]
        assert opened.error is ErrorCode.NONE, opened
        self.owners[stream_id] = index

    def _take_over(self) -> None:
        """Another node takes a stream; what was not committed of it is a leftover from then on."""
        stream_id = self.rng.choice(sorted(self.owners))
        self._close(stream_id, None)
        debtor = self.owed.get(stream_id, (-1,))[0]  # may not open it before it has uploaded
        self.open(stream_id, self.rng.choice([one for one in range(len(NODES)) if one != debtor]))

    def _close(self, stream_id: int, end_offset: int | None) -> None:
        index = self.owners.pop(stream_id)
        for runs in self.retries.values():
            runs.pop(stream_id, None)
        self.retries = {node: runs for node, runs in self.retries.items() if runs}
        item = r.StreamToClose(stream_id, self.epochs[stream_id], end_offset)
        closed = self.write(r.CloseStreams(node=NODES[index], streams=(item,)))
        assert closed.errors == (ErrorCode.NONE,), closed

    def _owe(self) -> None:
        """Close a stream before its last upload and give it away, or make up for an upload."""
        if self.owed and self.rng.random() < 0.6:
            stream_id = self.rng.choice(sorted(self.owed))
            index, records = self.owed.pop(stream_id)
            runs = {stream_id: records}
            assert self.commit(index, self._put(index, runs), runs)
            return
        free = sorted(self.owners.keys() - self.owed.keys())
        if not free:
            return
        stream_id = self.rng.choice(free)
        index = self.owners[stream_id]
        # What it could not commit is the first that it owes.
        records = self.retries.get(index, {}).get(stream_id) or self._records(stream_id)
        self._close(stream_id, records[-1].end)
        self.owed[stream_id] = (index, records)
        others = [one for one in range(len(NODES)) if one != index]
        self.open(stream_id, self.rng.choice(others))

    # ---- compactions ----

    def _compact(self) -> None:
        """Replace some set objects of a node by one that holds their records."""
        index = self.rng.randrange(len(NODES))
        listed: Any = self.write_free(r.ListStreamSetObjects(node_id=NODES[index].node_id))
        ids = [one.object_id for one in listed.objects]
        if len(ids) < 2:
            return
        first = self.rng.randrange(len(ids) - 1)
        sources = ids[first : first + self.rng.randint(2, 4)]
        runs: dict[int, list[StoredRecord]] = {}
        for source in sources:
            for run in self.bucket[source].runs:
                runs.setdefault(run.stream_id, []).extend(run.records)
        for records in runs.values():
            records.sort(key=lambda record: record.start)
            if any(one.end != two.start for one, two in itertools.pairwise(records)):
                return  # one range for each stream is enough here
        self.commit(index, self._put(index, runs, whole=True), runs, sources)

    def write_free(self, request: Any) -> Any:
        """Ask something."""
        return self.map.query(request)
