"""Calls on a real server and their audit lines: each by its rule, with its outcome and offset."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from streammeta.controller.config import AuditFailure
from streammeta.controller.errors import AuditUnavailableError
from streammeta.controller.metadata.api.requests import SetFeatureLevel
from streammeta.controller.trust.audit.auditor import Auditor, LeadershipState
from streammeta.controller.trust.audit.lines import DENIALS_A_MINUTE, AuditLine, Chain, Verdict
from streammeta.rpc.failures import read_failure
from streammeta.tls.identity import Principal, Role
from streammeta.v1 import common_pb2, kv_pb2, metadata_pb2, nodes_pb2, objects_pb2, streams_pb2
from tests.attack.direct_calls import METHODS, Controller, DirectContext
from tests.kit.waiting import ManualClock
from tests.server.rpc_server import NODE, Rpcs, serving
from tests.trust.trusted_server import CLUSTER, shown

EPOCH = 7
BROKER = Principal(CLUSTER, Role.BROKER, "1007")


@dataclass
class MemoryWriter:
    """A writer of lines that are durable when the test says so."""

    lines: list[AuditLine] = field(default_factory=list)
    problem: str = ""
    head: Chain = field(default_factory=Chain)
    durable: asyncio.Event = field(default_factory=asyncio.Event)
    more: asyncio.Event = field(default_factory=asyncio.Event)
    fails_after: int = 1_000_000
    """Lines that are made durable before one is not."""

    def put(self, line: AuditLine) -> bool:
        self.lines.append(line)
        self.more.set()
        return True

    async def until(self, call: str, count: int) -> None:
        """Wait until a method has as many lines."""
        async with asyncio.timeout(60):
            while len(self.of(call)) < count:
                self.more.clear()
                await self.more.wait()

    async def written(self, line: AuditLine) -> None:
        self.put(line)
        self.fails_after -= 1
        if self.fails_after < 0:
            raise AuditUnavailableError("the disk is full")
        await self.durable.wait()

    def of(self, call: str) -> list[AuditLine]:
        """Return the lines of one method."""
        return [line for line in self.lines if line.call.endswith(call)]


@dataclass
class Scene:
    rpcs: Rpcs
    writer: MemoryWriter
    auditor: Auditor

    def members(self, call: str) -> list[dict[str, Any]]:
        """Return what the lines of a method say."""
        return [line.members() for line in self.writer.of(call)]

    def pipeline(self, messages: Iterator[objects_pb2.CommitPipelineRequest] | None = None) -> Any:
        """Call CommitPipeline."""
        return self.rpcs.channel.stream_stream(
            "/streammeta.v1.ObjectService/CommitPipeline",
            request_serializer=objects_pb2.CommitPipelineRequest.SerializeToString,
            response_deserializer=objects_pb2.CommitPipelineResponse.FromString,
        )(messages)


def record_in_memory(
    on_failure: AuditFailure = AuditFailure.BLOCK_ADMIN, *, leads: bool = True
) -> tuple[MemoryWriter, Auditor]:
    writer = MemoryWriter()
    state = LeadershipState(3, EPOCH, leads=leads)
    return writer, Auditor(writer, ManualClock(), lambda: state, on_failure)


@asynccontextmanager
async def audited(on_failure: AuditFailure = AuditFailure.BLOCK_ADMIN) -> AsyncIterator[Scene]:
    """Yield a server whose calls are recorded; lines are durable at once."""
    writer, auditor = record_in_memory(on_failure)
    writer.durable.set()
    async with serving(auditor) as rpcs:
        yield Scene(rpcs, writer, auditor)


def lock(node_id: int = 1000) -> nodes_pb2.LockNodeRequest:
    return nodes_pb2.LockNodeRequest(request_id="lock-1", node_id=node_id)


async def test_a_guarded_call_has_a_line_before_and_one_with_its_offset() -> None:
    async with audited() as scene:
        await scene.rpcs.register()
        offset = scene.rpcs.controller.committed_end
        await scene.rpcs.ask(lock())
        begun, done = scene.members("LockNode")
    assert (begun["verdict"], done["verdict"]) == ("BEGUN", "OK")
    assert "offset" not in begun
    assert done["offset"] == offset + 1
    for line in (begun, done):
        assert line["target"] == {"node": 1000}
        assert line["request_id"] == "lock-1"
        assert line["principal"] == "anonymous"
        assert line["peer"].startswith("ipv4:127.0.0.1:")
        assert (line["node"], line["epoch"], line["leader"]) == (3, EPOCH, True)
    assert "ms" in done


async def test_a_guarded_call_is_answered_once_its_lines_are_durable() -> None:
    async with audited() as scene:
        await scene.rpcs.register()
        scene.writer.durable.clear()
        answer = asyncio.ensure_future(scene.rpcs.ask(lock()))
        await scene.writer.until("LockNode", 1)
        assert [line.verdict for line in scene.writer.of("LockNode")] == [Verdict.BEGUN]
        assert not await is_locked(scene)
        assert not answer.done()
        scene.writer.durable.set()
        await answer


async def test_a_refused_call_names_the_error() -> None:
    async with audited() as scene:
        await scene.rpcs.ask(lock(4))
        (_, line) = scene.members("LockNode")
    assert (line["verdict"], line["reason"]) == ("REFUSED", "NODE_EPOCH_NOT_EXIST")


async def test_a_malformed_request_fails_without_a_line_before() -> None:
    async with audited() as scene:
        assert (await scene.rpcs.refusal("NodeService/LockNode", b"\xff"))[0] == "INVALID_ARGUMENT"
        (line,) = scene.members("LockNode")
    assert (line["verdict"], line["reason"]) == ("FAILED", "INVALID_FIELD")
    assert "target" not in line


async def test_an_outcome_nobody_knows_is_said_to_be_unknown() -> None:
    async with audited() as scene:
        await scene.rpcs.register()
        scene.rpcs.log.is_held = True
        with pytest.raises(grpc.aio.AioRpcError):
            await scene.rpcs.ask(lock(), timeout=0.5)
        await scene.writer.until("LockNode", 2)
        (_, line) = scene.members("LockNode")
    assert line["verdict"] == "UNKNOWN"
    assert line["reason"] in ("DEADLINE", "CANCELLED")


async def test_writes_of_keys_are_recorded_by_key_and_never_by_value() -> None:
    items = [kv_pb2.KVToPut(namespace="n", key=f"k{index}", value=b"secret") for index in range(3)]
    async with audited() as scene:
        await scene.rpcs.ask(kv_pb2.PutKVsRequest(request_id="r", items=items))
        await scene.rpcs.ask(kv_pb2.DeleteKVsRequest(keys=[kv_pb2.KVKey(namespace="n", key="k1")]))
        (put,) = scene.members("PutKVs")
        (_, deleted) = scene.members("DeleteKVs")
        said = json.dumps([line.members() for line in scene.writer.lines])
    assert put["target"] == {"keys": [["n", "k0"], ["n", "k1"], ["n", "k2"]]}
    assert deleted["target"] == {"keys": [["n", "k1"]]}
    assert deleted["offset"] > put["offset"]
    assert "secret" not in said


async def test_changes_of_state_are_recorded_with_counts_and_first_ids() -> None:
    async with audited() as scene:
        (stream, *_), first = await scene.rpcs.begin(3, 5)
        (created,) = scene.members("CreateStreams")
        (opened,) = scene.members("OpenStreams")
        (prepared,) = scene.members("PrepareObjects")
        (registered,) = scene.members("RegisterNode")
    assert created["target"] == {"node": 1000, "streams": {"count": 3, "first": stream}}
    assert opened["target"] == {"node": 1000, "streams": {"count": 3, "first": stream}}
    assert prepared["target"] == {"node": 1000, "count": 5, "first": first}
    assert registered["target"] == {"node": 1000, "node_epoch": 1}


async def test_items_that_were_refused_are_counted() -> None:
    async with audited() as scene:
        streams, _ = await scene.rpcs.begin(3, 1)
        deletion = [
            streams_pb2.StreamToDelete(stream_id=stream, stream_epoch=epoch)
            for stream, epoch in zip(streams, (1, 0, 0), strict=True)
        ]
        await scene.rpcs.ask(streams_pb2.DeleteStreamsRequest(node=NODE, streams=deletion))
        (_, line) = scene.members("DeleteStreams")
    assert (line["verdict"], line["reason"]) == ("REFUSED", "STREAM_NOT_CLOSED")
    assert line["target"] == {"node": 1000, "streams": streams, "refused": 3}


def commit(object_id: int, stream_id: int, start: int) -> objects_pb2.CommitStreamSetObjectRequest:
    return objects_pb2.CommitStreamSetObjectRequest(
        node=NODE,
        object_id=object_id,
        object_size=10,
        ranges=objects_pb2.RangeColumns(
            stream_id=[stream_id], start_offset=[start], end_offset=[start + 5]
        ),
        on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
    )


async def test_commits_and_reads_are_summed_by_the_minute() -> None:
    async with audited() as scene:
        (stream,), first = await scene.rpcs.begin(1, 3)
        for number in range(3):
            await scene.rpcs.ask(commit(first + number, stream, 5 * number))
        await scene.rpcs.ask(commit(first + 2, stream, 99))
        await scene.rpcs.ask(streams_pb2.DescribeStreamsRequest())
        assert scene.writer.of("CommitStreamSetObject") == []
        scene.auditor.end_minute()
        (commits,) = scene.members("CommitStreamSetObject")
        (reads,) = scene.members("DescribeStreams")
        scene.auditor.end_minute()
        assert len(scene.writer.of("CommitStreamSetObject")) == 1
    assert commits["verdict"] == "SUM"
    assert {**commits["sum"], "since": ""} == {"calls": 4, "rows": 4, "refusals": 1, "since": ""}
    assert commits["offset"] == scene.rpcs.controller.committed_end
    assert reads["sum"]["calls"] == 1


async def test_a_pipeline_is_recorded_at_its_begin_and_end_and_summed_meanwhile() -> None:
    async with audited() as scene:
        (stream,), first = await scene.rpcs.begin(1, 3)
        call = scene.pipeline()
        for number in range(3):
            message = [commit(first + number, stream, 5 * number)]
            await call.write(objects_pb2.CommitPipelineRequest(sequence=number, commits=message))
            await call.read()
        assert [line.verdict for line in scene.writer.of("CommitPipeline")] == [Verdict.BEGUN]
        scene.auditor.end_minute()
        (_, minute) = scene.members("CommitPipeline")
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        (_, _, end) = scene.members("CommitPipeline")
        scene.auditor.end_minute()
        assert len(scene.writer.of("CommitPipeline")) == 3
    assert (minute["sum"]["calls"], minute["sum"]["rows"], minute["sum"]["refusals"]) == (3, 3, 0)
    assert end["verdict"] == "OK"
    assert end["offset"] == minute["offset"] == scene.rpcs.controller.committed_end


async def test_commits_that_put_values_or_trim_streams_are_recorded_each() -> None:
    async with audited() as scene:
        (stream,), first = await scene.rpcs.begin(1, 3)
        await scene.rpcs.controller.write(SetFeatureLevel(level=3))
        put, trim, taken = (commit(first + number, stream, 5 * number) for number in range(3))
        put.kv_puts.add(namespace="n", key="k", value=b"hidden")
        trim.trims.add(stream_id=stream, stream_epoch=1, new_start_offset=1)
        taken.kv_puts.add(namespace="n", key="k", value=b"hidden")
        await scene.rpcs.ask(put)
        message = objects_pb2.CommitPipelineRequest(sequence=1, commits=[trim, taken])
        call = scene.pipeline(iter([message]))
        async for _ in call:
            pass
        (unary,) = scene.members("CommitStreamSetObject")
        (_, trimmed, refused, _) = scene.members("CommitPipeline")
    assert (unary["verdict"], unary["target"]["keys"]) == ("OK", [["n", "k"]])
    assert unary["offset"] <= scene.rpcs.controller.committed_end
    assert (trimmed["verdict"], trimmed["target"]["trims"]) == ("OK", [stream])
    assert (refused["verdict"], refused["reason"]) == ("REFUSED", "KEY_EXIST")
    assert refused["target"]["keys"] == [["n", "k"]]
    assert "hidden" not in json.dumps([unary, trimmed, refused])


async def test_a_watch_is_counted_when_it_begins() -> None:
    async with audited() as scene:
        watch: Any = scene.rpcs.channel.unary_stream(
            "/streammeta.v1.MetadataService/Watch",
            request_serializer=metadata_pb2.WatchRequest.SerializeToString,
        )
        call = watch(metadata_pb2.WatchRequest())
        await scene.rpcs.register()
        await call.read()
        scene.auditor.end_minute()
        (begun,) = scene.members("Watch")
        call.cancel()
    assert begun["sum"]["calls"] == 1


async def test_a_snapshot_is_recorded_with_its_offset() -> None:
    async with audited() as scene:
        await scene.rpcs.register()
        snapshot: Any = scene.rpcs.channel.unary_stream(
            "/streammeta.v1.MetadataService/GetSnapshot",
            request_serializer=metadata_pb2.GetSnapshotRequest.SerializeToString,
        )
        async for _ in snapshot(metadata_pb2.GetSnapshotRequest(hold_ms=1_000)):
            pass
        (line,) = scene.members("GetSnapshot")
    assert line["verdict"] == "OK"
    assert line["target"]["hold_ms"] == 1_000
    assert line["offset"] > 0


# -- when lines can't be written


async def refused(scene: Scene, request: Any) -> tuple[str, str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await scene.rpcs.ask(request)
    failure = read_failure(raised.value)
    return failure.code.name, failure.reason, failure.message


UNAVAILABLE = ("UNAVAILABLE", "AUDIT_UNAVAILABLE")


async def is_locked(scene: Scene) -> bool:
    (node,) = (await scene.rpcs.ask(nodes_pb2.GetNodesRequest())).nodes
    return bool(node.locked)


async def test_guarded_calls_are_refused_and_others_go_on() -> None:
    async with audited() as scene:
        await scene.rpcs.register()
        scene.writer.problem = "no room"
        assert (await refused(scene, lock()))[:2] == UNAVAILABLE
        assert not await is_locked(scene)
        await scene.rpcs.ask(kv_pb2.PutKVsRequest(items=[kv_pb2.KVToPut(key="k")]))
        line = scene.members("LockNode")[-1]
    assert (line["verdict"], line["reason"]) == ("FAILED", "AUDIT_UNAVAILABLE")


@pytest.mark.parametrize(
    ("durable_lines", "effect"), [(0, "nothing was changed"), (1, "may have taken effect")]
)
async def test_a_call_whose_line_fails_says_whether_it_may_have_taken_effect(
    durable_lines: int, effect: str
) -> None:
    async with audited() as scene:
        await scene.rpcs.register()
        scene.writer.fails_after = durable_lines
        code, reason, message = await refused(scene, lock())
        assert (code, reason) == UNAVAILABLE
        assert effect in message
        assert await is_locked(scene) == bool(durable_lines)


@pytest.mark.parametrize(
    "request_",
    [
        kv_pb2.PutKVsRequest(items=[kv_pb2.KVToPut(key="k")]),
        kv_pb2.GetKVsRequest(keys=[kv_pb2.KVKey(key="k")]),
        streams_pb2.DescribeStreamsRequest(),
    ],
    ids=lambda request: type(request).__name__,
)
async def test_all_calls_are_refused_if_that_is_wanted(request_: Any) -> None:
    async with audited(AuditFailure.BLOCK_ALL) as scene:
        await scene.rpcs.register()
        scene.writer.problem = "no room"
        assert (await refused(scene, request_))[:2] == UNAVAILABLE
        await scene.rpcs.ask(nodes_pb2.HeartbeatRequest(node=NODE))


async def test_an_open_pipeline_is_refused_too_if_all_calls_are() -> None:
    async with audited(AuditFailure.BLOCK_ALL) as scene:
        (stream,), first = await scene.rpcs.begin(1, 1)
        call = scene.pipeline()
        await call.write(objects_pb2.CommitPipelineRequest(sequence=1))
        await call.read()
        scene.writer.problem = "no room"
        await call.write(
            objects_pb2.CommitPipelineRequest(sequence=2, commits=[commit(first, stream, 0)])
        )
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
    assert read_failure(raised.value).reason == "AUDIT_UNAVAILABLE"
    (_, end) = scene.members("CommitPipeline")
    assert (end["verdict"], end["reason"]) == ("FAILED", "AUDIT_UNAVAILABLE")


async def test_no_call_is_refused_if_that_is_wanted() -> None:
    async with audited(AuditFailure.DROP) as scene:
        await scene.rpcs.register()
        scene.writer.problem = "no room"
        scene.writer.fails_after = 0
        await scene.rpcs.ask(lock())
        assert await is_locked(scene)


async def test_denials_are_recorded_with_who_was_denied_up_to_a_number_a_minute() -> None:
    writer, auditor = record_in_memory()
    controller = Controller(auditor)
    (method,) = (method for method in METHODS if method.name == "LockNode")
    for _ in range(DENIALS_A_MINUTE + 5):
        await controller.call(method, lock().SerializeToString(), DirectContext(shown(BROKER)))
    denied = [line.members() for line in writer.of("LockNode")]
    assert len(denied) == DENIALS_A_MINUTE
    assert denied[0]["principal"] == "broker/1007"
    assert denied[0]["cert"].startswith("sha256:")
    assert (denied[0]["verdict"], denied[0]["reason"]) == ("DENIED", "ROLE_LACKS_CALL")
    auditor.end_minute()
    rest = writer.of("LockNode")[-1].members()
    assert (rest["verdict"], rest["sum"]["calls"], rest["sum"]["refusals"]) == ("SUM", 5, 5)


async def test_a_stranger_is_recorded_with_its_certificate() -> None:
    writer, auditor = record_in_memory()
    (method,) = (method for method in METHODS if method.name == "GetNodes")
    context = DirectContext(shown("spiffe://elsewhere/x"))
    await Controller(auditor).call(method, b"", context)
    (line,) = (line.members() for line in writer.of("GetNodes"))
    assert (line["principal"], line["reason"]) == ("anonymous", "NO_IDENTITY")
    assert line["cert"].startswith("sha256:")


def test_events_of_the_process_are_recorded() -> None:
    writer, auditor = record_in_memory(leads=False)
    auditor.begin()
    auditor.event("policy.reload", reason="line 3: no such role", target={"hash": "ab"})
    auditor.end()
    start, reload, stop = (line.members() for line in writer.lines)
    assert (start["call"], start["verdict"], start["principal"]) == (
        "audit.start",
        "OK",
        "controller/3",
    )
    assert (reload["verdict"], reload["reason"]) == ("FAILED", "line 3: no such role")
    assert stop["call"] == "audit.stop"


def test_many_sums_end_the_minute_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streammeta.controller.trust.audit.lines.SUMS_MAX", 3)
    writer, auditor = record_in_memory()
    counted: Sequence[str] = [f"broker/{number}" for number in range(7)]
    for principal in counted:
        auditor.count(principal, "ObjectService.GetObjects", 1, 0, 0, -1)
    auditor.end()
    assert [line.origin.principal for line in writer.lines[:-1]] == counted


async def test_deletions_from_the_bucket_are_on_record_before_they_are_let_go() -> None:
    ids = list(range(100))
    async with audited() as scene:
        await scene.rpcs.ask(objects_pb2.CheckObjectsRequest(object_ids=ids))
        assert scene.members("CheckObjects") == []
        await scene.rpcs.ask(objects_pb2.CheckObjectsRequest(object_ids=ids, deleting=True))
        begun, done = scene.members("CheckObjects")
    assert (begun["verdict"], done["verdict"]) == ("BEGUN", "OK")
    assert begun["target"] == done["target"] == {"objects": ids}
    assert done["ms"] >= 0


async def test_deletions_that_can_not_be_recorded_are_refused_and_questions_are_not() -> None:
    async with audited() as scene:
        scene.writer.problem = "the disk is full"
        await scene.rpcs.ask(objects_pb2.CheckObjectsRequest(object_ids=[1]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await scene.rpcs.ask(objects_pb2.CheckObjectsRequest(object_ids=[1], deleting=True))
    assert read_failure(refused.value).reason == "AUDIT_UNAVAILABLE"
