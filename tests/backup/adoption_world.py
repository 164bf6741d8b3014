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
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.object_listings import ListStreamSetObjects
from streammeta.controller.metadata.api.object_slices import ObjectQuery
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables import values
from streammeta.storage.adoption.model import Candidate, Entry, StoredRecord, StoredRun

NODES = (values.NodeIdentity(7, 1), values.NodeIdentity(8, 1), values.NodeIdentity(9, 1))
NOW_MS = 1_000_000
TTL_MS = 10**8


@dataclass(slots=True)
class World:
    """The cluster before the disaster."""

    rng: Random
    map: ClusterMetadata = field(default_factory=ClusterMetadata)
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
    lives_long: bool = False
    """Whether much is compacted, trimmed and deleted, and the bytes of replaced objects go."""
    trimmed: dict[int, int] = field(default_factory=dict)
    """By stream, the first offset that is still wanted; of deleted ones none is."""

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
        weights = {"upload": 70, "take_over": 14, "owe": 6, "compact": 10}
        if self.lives_long:
            weights |= {"upload": 50, "split": 16, "merge": 16, "trim": 5, "drop": 1, "forget": 14}
        (kind,) = self.rng.choices(list(weights), list(weights.values()))
        getattr(self, f"_{kind}")()

    # ---- uploads ----

    def _upload(self) -> None:
        index = self.rng.randrange(len(NODES))
        mine = sorted(stream_id for stream_id, owner in self.owners.items() if owner == index)
        if not mine:
            return
        retried = self.retries.pop(index, {})
        runs = {stream_id: records for stream_id, records in retried.items() if stream_id in mine}
        if not runs:
            chosen = self.rng.sample(mine, self.rng.randint(1, len(mine)))
            runs = {stream_id: self._records(stream_id) for stream_id in sorted(chosen)}
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
        if self.lives_long and len(records) > 1 and self.rng.random() < 0.4:
            cut = self.rng.randrange(1, len(records))  # anywhere, as blocks are cut by size
            return (tuple(records[:cut]), tuple(records[cut:]))
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
                ranges=values.RangeColumns(
                    stream_id=values.column(ids),
                    start_offset=values.column([runs[stream_id][0].start for stream_id in ids]),
                    end_offset=values.column([runs[stream_id][-1].end for stream_id in ids]),
                ),
                compacted_object_ids=values.column(sources or []),
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
        others = [other for other in range(len(NODES)) if other != index]
        self.open(stream_id, self.rng.choice(others))

    # ---- compactions ----

    def _compact(self) -> None:
        """Replace some set objects of a node by one that holds their records."""
        index = self.rng.randrange(len(NODES))
        listed: Any = self.write_free(ListStreamSetObjects(node_id=NODES[index].node_id))
        ids = [object_.object_id for object_ in listed.objects]
        if len(ids) < 2:
            return
        first = self.rng.randrange(len(ids) - 1)
        sources = ids[first : first + self.rng.randint(2, 4)]
        runs = self._live(sources)
        for records in runs.values():
            if any(earlier.end != two.start for earlier, two in itertools.pairwise(records)):
                return  # one range for each stream is enough here
        if runs:
            self.commit(index, self._put(index, runs, whole=True), runs, sources)

    def _set_objects(self, index: int) -> list[int]:
        listed: Any = self.write_free(ListStreamSetObjects(node_id=NODES[index].node_id))
        return [described.object_id for described in listed.objects]

    def _live(self, ids: list[int]) -> dict[int, list[StoredRecord]]:
        """The records that objects have of streams that exist, and are not trimmed."""
        runs: dict[int, list[StoredRecord]] = {}
        for object_id in ids:
            for run in self.bucket[object_id].runs:
                low = self.trimmed.get(run.stream_id, 0)
                live = [record for record in run.records if record.end > low]
                if live:
                    runs.setdefault(run.stream_id, []).extend(live)
        for records in runs.values():
            records.sort(key=lambda record: record.start)
        return runs

    def _split(self) -> None:
        """Replace some set objects of a node by an object for each of their streams, or fewer."""
        index = self.rng.randrange(len(NODES))
        ids = self._set_objects(index)
        if not ids:
            return
        sources = self.rng.sample(ids, self.rng.randint(1, min(3, len(ids))))
        runs = self._live(sources)
        if any(
            before.end != after.start
            for records in runs.values()
            for before, after in itertools.pairwise(records)
        ):
            return  # one range for each stream is enough here
        rest = {run: runs.pop(run) for run in sorted(runs) if self.rng.random() < 0.3}
        made = [(id_, self._put(index, {id_: records})) for id_, records in sorted(runs.items())]
        self.write(
            r.CommitStreamSetObject(
                node=NODES[index],
                object_id=self._put(index, rest) if rest else -1,
                order_id=-1,
                object_size=10 if rest else 0,
                ranges=_ranges(values.RangeColumns, rest),
                stream_objects=_ranges(
                    values.StreamObjectColumns,
                    runs,
                    object_id=values.column([object_id for _, object_id in made]),
                    object_size=values.column([10] * len(made)),
                ),
                compacted_object_ids=values.column(sorted(sources)),
            )
        )

    def _merge(self) -> None:
        """Replace neighbouring objects of one stream by one."""
        stream_id = self.rng.choice(sorted(self.owners) or [-1])
        if stream_id < 0:
            return
        low = self.trimmed.get(stream_id, 0)
        query = ObjectQuery(stream_id, low, -1)
        found: Any = self.write_free(r.GetObjects(queries=(query,)))
        ids = [part.object_id for part in found.results[0].objects]
        alone = [object_id for object_id in ids if object_id not in self._all_set_objects()]
        if len(alone) < 2:
            return
        first = self.rng.randrange(len(alone) - 1)
        sources = alone[first : first + self.rng.randint(2, 4)]
        records = self._live(sources).get(stream_id, [])
        if not records or any(a.end != b.start for a, b in itertools.pairwise(records)):
            return
        index = self.owners[stream_id]
        self.write(
            r.CommitStreamObject(
                node=NODES[index],
                object_id=self._put(index, {stream_id: records}),
                object_size=10,
                stream_id=stream_id,
                stream_epoch=self.epochs[stream_id],
                start_offset=records[0].start,
                end_offset=records[-1].end,
                source_object_ids=values.column(sources),
            )
        )

    def _all_set_objects(self) -> set[int]:
        return {object_id for index in range(len(NODES)) for object_id in self._set_objects(index)}

    # ---- what is wanted no more ----

    def _trim(self) -> None:
        stream_id = self.rng.choice(sorted(self.owners) or [-1])
        starts = sorted(self.acknowledged.get(stream_id, ()))
        if not starts:
            return
        start = self.rng.choice(starts)
        item = r.StreamToTrim(stream_id, self.epochs[stream_id], start)
        answer = self.write(r.TrimStreams(node=NODES[self.owners[stream_id]], streams=(item,)))
        if not any(answer.errors):
            self.trimmed[stream_id] = max(start, self.trimmed.get(stream_id, 0))

    def _drop(self) -> None:
        """Delete a stream."""
        free = sorted(self.owners.keys() - self.owed.keys())
        if not free:
            return
        stream_id = self.rng.choice(free)
        index = self.owners[stream_id]
        self._close(stream_id, None)
        item = r.StreamToDelete(stream_id, self.epochs[stream_id])
        answer = self.write(r.DeleteStreams(node=NODES[index], streams=(item,)))
        assert answer.errors == (ErrorCode.NONE,), answer
        self.trimmed[stream_id] = 1 << 62

    def _forget(self) -> None:
        """Delete some of the bytes that are not needed any more, in no order."""
        ids = tuple(sorted(self.bucket))
        if not ids:
            return
        states: Any = self.write_free(r.CheckObjects(object_ids=ids)).states
        for object_id, state in zip(ids, states, strict=True):
            if state is values.ObjectState.MARK_DESTROYED and self.rng.random() < 0.8:
                del self.bucket[object_id]

    def write_free(self, request: Any) -> Any:
        """Ask something."""
        return self.map.query(request)


def _ranges(kind: Any, runs: dict[int, list[StoredRecord]], **more: Any) -> Any:
    ids = sorted(runs)
    return kind(
        stream_id=values.column(ids),
        start_offset=values.column([runs[stream_id][0].start for stream_id in ids]),
        end_offset=values.column([runs[stream_id][-1].end for stream_id in ids]),
        **more,
    )
