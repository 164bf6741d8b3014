"""The map against a slow model of its rules, over random commands, undo at any point included."""

import copy
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controller.errors import ErrorCode
from controller.metadata.cluster_map import ClusterMap
from controller.metadata.requests import (
    CheckObjects,
    CloseStreams,
    CommitStreamSetObject,
    CreateStreams,
    DeleteKVs,
    DeleteStreams,
    DescribeObjects,
    DescribeStreams,
    ExpireObjects,
    GetObjects,
    GetOpeningStreams,
    KVKey,
    KVToPut,
    ListKVs,
    NewStream,
    ObjectQuery,
    OpenStreams,
    PrepareObjects,
    PutKVs,
    RegisterNode,
    RemoveObjects,
    StreamToClose,
    StreamToDelete,
    StreamToOpen,
    StreamToTrim,
    TrimStreams,
)
from controller.metadata.values import (
    NodeIdentity,
    ObjectState,
    OnConflict,
    RangeColumns,
    StreamObjectColumns,
    column,
)
from controller.records.codec import decode_records, encode_records
from tests.metadata.slow_model import Model, Row

NODES = st.tuples(st.integers(0, 1), st.integers(0, 2))
STREAMS = st.integers(0, 5)
EPOCHS = st.integers(0, 3)
OFFSETS = st.integers(0, 40)
REQUEST_IDS = st.sampled_from(["a", "b", "c", "d", "e", "f"])
TAGS = st.sampled_from([(), (("k", "v"),), (("z", "1"), ("a", "2"))])


class MapMachine(RuleBasedStateMachine):
    """Runs every command on both, and undoes and replays the map's log."""

    def __init__(self) -> None:
        super().__init__()
        self.map = ClusterMap()
        self.model = Model()
        self.now = 1_000
        self.log: list[tuple[int, bytes]] = []
        self.before: list[tuple[int, Model]] = []

    def write(self, request: Any, run_model: Any) -> tuple[Any, Any]:
        """Decide and apply a request, run the model, and return both answers."""
        offset = self.map.applied_end_offset
        decision = self.map.decide(request, self.now, offset)
        if decision.records:
            payload = encode_records(decision.records)
            self.before.append((offset, copy.deepcopy(self.model)))
            self.map.apply(offset, decode_records(payload))
            self.log.append((offset, payload))
        return decision.answer, run_model()

    @initialize()
    def usual_start(self) -> None:
        for node in ((0, 0), (1, 0)):
            self.register(node)
        self.create("start", (0, 0), [(), ()])
        for stream in (0, 1):
            self.open((0, 0), [stream], 0, ())
        self.prepare("start", (0, 0), 4)

    @rule(node=NODES)
    def register(self, node: tuple[int, int]) -> None:
        request = RegisterNode(node=NodeIdentity(*node), wal_config=f"wal-{node[1]}")
        answer, expected = self.write(request, lambda: self.model.register(node))
        assert answer.error == expected

    @rule(node=NODES, failover=st.booleans())
    def opening(self, node: tuple[int, int], failover: bool) -> None:
        request = GetOpeningStreams(node=NodeIdentity(*node), failover=failover)
        answer, expected = self.write(request, lambda: self.model.opening(node, failover=failover))
        assert (answer.error, [item.stream_id for item in answer.streams]) == expected

    @rule(request_id=REQUEST_IDS, node=NODES, tag_sets=st.lists(TAGS, min_size=1, max_size=1))
    def create(self, request_id: str, node: tuple[int, int], tag_sets: list[Any]) -> None:
        request = CreateStreams(
            request_id=request_id,
            node=NodeIdentity(*node),
            streams=tuple(NewStream(tags) for tags in tag_sets),
        )
        answer, expected = self.write(
            request, lambda: self.model.create(request_id, node, tag_sets)
        )
        assert (answer.error, answer.stream_ids) == expected

    @rule(node=NODES, streams=st.lists(STREAMS, min_size=1, unique=True), epoch=EPOCHS, tags=TAGS)
    def open(self, node: tuple[int, int], streams: list[int], epoch: int, tags: Any) -> None:
        items = tuple(StreamToOpen(stream, epoch, tags) for stream in streams)
        had = {i: s.epoch for i, s in self.model.streams.items() if not s.tags}
        answer, expected = self.write(
            OpenStreams(node=NodeIdentity(*node), streams=items),
            lambda: [self.model.open(node, stream, epoch) for stream in streams],
        )
        got = [(item.error, item.start_offset, item.next_offset) for item in answer.streams]
        assert got == expected
        for stream, result in zip(streams, expected, strict=True):
            if not result[0] and had.get(stream, epoch) < epoch:
                self.model.streams[stream].tags = tuple(sorted(tags))

    @rule(node=NODES, streams=st.lists(STREAMS, min_size=1, unique=True), epoch=EPOCHS)
    def close(self, node: tuple[int, int], streams: list[int], epoch: int) -> None:
        items = tuple(StreamToClose(stream, epoch) for stream in streams)
        answer, expected = self.write(
            CloseStreams(node=NodeIdentity(*node), streams=items),
            lambda: tuple(self.model.close(node, stream, epoch) for stream in streams),
        )
        assert answer.errors == expected

    @rule(
        node=NODES, streams=st.lists(STREAMS, min_size=1, unique=True), epoch=EPOCHS, start=OFFSETS
    )
    def trim(self, node: tuple[int, int], streams: list[int], epoch: int, start: int) -> None:
        items = tuple(StreamToTrim(stream, epoch, start) for stream in streams)
        answer, expected = self.write(
            TrimStreams(node=NodeIdentity(*node), streams=items),
            lambda: tuple(self.model.trim(node, stream, epoch, start) for stream in streams),
        )
        assert answer.errors == expected

    @rule(node=NODES, stream=STREAMS, epoch=st.integers(-1, 3))
    def delete(self, node: tuple[int, int], stream: int, epoch: int) -> None:
        answer, expected = self.write(
            DeleteStreams(node=NodeIdentity(*node), streams=(StreamToDelete(stream, epoch),)),
            lambda: self.model.delete(node, stream, epoch, self.now),
        )
        assert answer.errors == (expected,)

    @rule(request_id=REQUEST_IDS, node=NODES, count=st.just(4))
    def prepare(self, request_id: str, node: tuple[int, int], count: int) -> None:
        request = PrepareObjects(
            request_id=request_id, node=NodeIdentity(*node), count=count, ttl_ms=1_000
        )
        deadline = self.now + 1_000
        answer, expected = self.write(
            request, lambda: self.model.prepare(request_id, node, count, deadline)
        )
        assert (answer.error, answer.first_object_id, answer.deadline_ms) == expected

    @rule(step=st.sampled_from([0, 400, 1_100]))
    def expire(self, step: int) -> None:
        self.now += step
        request = ExpireObjects(limit=100)
        answer, expected = self.write(request, lambda: self.model.expire(self.now))
        assert answer.expired == expected

    @rule(ids=st.lists(st.integers(0, 12), min_size=1))
    def remove(self, ids: list[int]) -> None:
        answer, expected = self.write(
            RemoveObjects(object_ids=tuple(ids)), lambda: self.model.remove(ids)
        )
        assert answer.removed == expected

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        node = data.draw(NODES)
        streams = sorted(data.draw(st.lists(STREAMS, min_size=1, max_size=4, unique=True)))
        split = data.draw(st.integers(0, len(streams)))
        object_id = data.draw(st.integers(0, 12)) if split else -1
        with_epochs = data.draw(st.booleans())
        rows = [self._draw_row(data, stream, with_epochs) for stream in streams]
        ranges, objects = rows[:split], rows[split:]
        ids = data.draw(
            st.lists(
                st.integers(0, 12).filter(lambda i: i != object_id),
                min_size=len(objects),
                max_size=len(objects),
                unique=True,
            )
        )
        for row in ranges:
            row.object_id = object_id
        for row, own in zip(objects, ids, strict=True):
            row.object_id = own
        failover, accept = data.draw(st.booleans()), data.draw(st.booleans())
        request = CommitStreamSetObject(
            node=NodeIdentity(*node),
            object_id=object_id,
            order_id=object_id,
            object_size=7,
            ranges=RangeColumns(**_columns(ranges, with_epochs)),
            stream_objects=StreamObjectColumns(
                object_id=column([row.object_id for row in objects]),
                object_size=column([7 for _ in objects]),
                **_columns(objects, with_epochs),
            ),
            failover=failover,
            on_conflict=OnConflict.ACCEPT_VALID if accept else OnConflict.REJECT_ALL,
        )
        answer, expected = self.write(
            request,
            lambda: self.model.commit(
                node,
                object_id,
                7,
                ranges,
                objects,
                failover=failover,
                accept_valid=accept,
                now=self.now,
            ),
        )
        got = (answer.error, answer.range_errors.tolist(), answer.stream_object_errors.tolist())
        assert got == expected

    def _draw_row(self, data: st.DataObject, stream_id: int, with_epochs: bool) -> Row:
        stream = self.model.streams.get(stream_id)
        usual = stream.end if stream is not None else 0
        # Mostly what a writer would send, so that commits get somewhere.
        start = data.draw(st.sampled_from([usual, usual, usual, 0, usual + 3, max(0, usual - 2)]))
        epoch = (stream.epoch if stream is not None and stream.epoch >= 0 else 0) + data.draw(
            st.sampled_from([0, 0, 0, 1, -1])
        )
        length = data.draw(st.integers(1, 12))
        return Row(stream_id, start, start + length, epoch if with_epochs else None)

    @rule(key=st.sampled_from("ab"), overwrite=st.booleans(), version=st.sampled_from([None, 0, 7]))
    def put(self, key: str, overwrite: bool, version: int | None) -> None:
        item = KVToPut(
            namespace="n",
            key=key,
            value=f"{len(self.log)}".encode(),
            overwrite=overwrite,
            expected_version=version,
        )
        offset = self.map.applied_end_offset
        current = self.model.kvs.get(("n", key))

        def put() -> bool:
            at = current[1] if current is not None else 0
            allowed = version == at if version is not None else current is None or overwrite
            if allowed:
                self.model.kvs[("n", key)] = (item.value, offset + 1)
            return allowed

        answer, allowed = self.write(PutKVs(items=(item,)), put)
        (result,) = answer.results
        assert result.error == (ErrorCode.NONE if allowed else ErrorCode.KEY_EXIST)
        stored = self.model.kvs.get(("n", key), (b"", 0))
        assert (result.value, result.version) == stored

    @rule(key=st.sampled_from("ab"))
    def delete_key(self, key: str) -> None:
        answer, stored = self.write(
            DeleteKVs(keys=(KVKey(namespace="n", key=key),)),
            lambda: self.model.kvs.pop(("n", key), None),
        )
        assert answer.results[0].found == (stored is not None)

    @precondition(lambda self: self.before)
    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.before) - 1))
        offset, self.model = self.before[index]
        del self.before[index:]
        self.log = [entry for entry in self.log if entry[0] < offset]
        self.map.undo_to(offset)

    @rule(share=st.integers(0, 3))
    def commit_in_the_log(self, share: int) -> None:
        if not self.before:
            return
        keep = len(self.before) * share // 4
        end = self.map.applied_end_offset if not keep else self.before[-keep][0]
        self.before = self.before[len(self.before) - keep :]
        self.map.forget_undo(end)

    @invariant()
    def streams_agree(self) -> None:
        answer: Any = self.map.query(DescribeStreams(include_ranges=True))
        assert {item.stream_id for item in answer.streams} == set(self.model.streams)
        for item in answer.streams:
            stream = self.model.streams[item.stream_id]
            got = (item.epoch, item.range_index, item.start_offset, item.end_offset, item.node_id)
            want = (stream.epoch, stream.index, stream.start, stream.end, stream.node)
            assert got == want
            assert (item.state == 1, item.tags) == (stream.opened, stream.tags)
            ranges = [
                {
                    "index": r.range_index,
                    "epoch": r.epoch,
                    "node": r.node_id,
                    "start": r.start_offset,
                    "end": r.end_offset,
                }
                for r in item.ranges
            ]
            expected = [{"end": stream.end, **r} for r in stream.ranges]
            assert ranges == [*expected[:-1], *({**r, "end": stream.end} for r in expected[-1:])]

    @invariant()
    def objects_agree(self) -> None:
        answer: Any = self.map.query(DescribeObjects())
        assert [item.object_id for item in answer.objects] == sorted(self.model.objects)
        for item in answer.objects:
            want = self.model.objects[item.object_id]
            assert (item.state, item.kind.name, item.object_size, item.node_id) == (
                want.state,
                want.kind,
                want.size,
                want.node,
            )
            held = zip(
                item.ranges.stream_id.tolist(),
                item.ranges.start_offset.tolist(),
                item.ranges.end_offset.tolist(),
                strict=True,
            )
            assert list(held) == want.held
        ids = tuple(range(self.model.next_object + 2))
        states: Any = self.map.query(CheckObjects(object_ids=ids))
        assert states.states == tuple(
            self.model.objects[i].state
            if i in self.model.objects
            else (ObjectState.REMOVED if i < self.model.next_object else ObjectState.NOT_ISSUED)
            for i in ids
        )

    @invariant()
    def lookups_agree(self) -> None:
        for stream_id, stream in self.model.streams.items():
            queries = tuple(
                ObjectQuery(stream_id, start, end, limit)
                for start in {stream.start, stream.start + 3, stream.end}
                for end in (-1, start + 4)
                for limit in (1, 100)
            )
            answer: Any = self.map.query(GetObjects(queries=queries))
            for query, result in zip(queries, answer.results, strict=True):
                got = [(o.object_id, o.start_offset, o.end_offset) for o in result.objects]
                assert got == self.model.find(
                    stream_id, query.start_offset, query.end_offset, query.limit
                )

    @invariant()
    def deadlines_and_keys_agree(self) -> None:
        prepared = [
            item.deadline
            for item in self.model.objects.values()
            if item.state is ObjectState.PREPARED
        ]
        assert self.map.prepared_deadline() == min(prepared, default=None)
        destroyed = {
            object_id
            for object_id, item in self.model.objects.items()
            if item.state is ObjectState.MARK_DESTROYED
        }
        assert set(self.map.destroyed(self.now + 1, 1_000)) == destroyed
        listed: Any = self.map.query(ListKVs(namespace="n"))
        assert {e.key: (e.value, e.version) for e in listed.entries} == {
            key: stored for (_, key), stored in self.model.kvs.items()
        }

    def teardown(self) -> None:
        replayed = ClusterMap()
        for offset, payload in self.log:
            replayed.apply(offset, decode_records(payload))
        assert replayed.state_hash() == self.map.state_hash()
        self.map.forget_undo(self.map.applied_end_offset)
        frozen = self.map.freeze()
        self.map = ClusterMap.from_sections(frozen.sections(), frozen.end_offset)
        assert self.map.state_hash() == replayed.state_hash()
        for check in (self.streams_agree, self.objects_agree, self.lookups_agree):
            check()
        self.deadlines_and_keys_agree()


def _columns(rows: list[Row], with_epochs: bool) -> dict[str, Any]:
    return {
        "stream_id": column([row.stream for row in rows]),
        "start_offset": column([row.start for row in rows]),
        "end_offset": column([row.end for row in rows]),
        "stream_epoch": column([row.epoch for row in rows] if with_epochs else ()),
    }


MapMachine.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
test_the_map_agrees_with_the_slow_model = MapMachine.TestCase
