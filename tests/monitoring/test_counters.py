"""Counters that calls move, over a real gRPC server in the test's own process."""

from __future__ import annotations

from streammeta.controller.rpc.calls import error_mapping
from streammeta.controller.runtime.writer.submission import CommitTally
from streammeta.v1 import common_pb2, objects_pb2
from tests.server.rpc_server import NODE, serving


def commit(object_id: int, stream_id: int, start: int) -> objects_pb2.CommitStreamSetObjectRequest:
    return objects_pb2.CommitStreamSetObjectRequest(
        request_id=f"commit {object_id}",
        node=NODE,
        object_id=object_id,
        order_id=object_id,
        object_size=100,
        on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
        ranges=objects_pb2.RangeColumns(
            stream_id=[stream_id], stream_epoch=[1], start_offset=[start], end_offset=[start + 10]
        ),
    )


async def test_single_commits_are_counted_by_verdict() -> None:
    async with serving() as rpcs:
        (stream_id,), first = await rpcs.begin(streams=1, objects=3)
        answers = [
            await rpcs.ask(commit(first + number, stream_id, start))
            for number, start in enumerate((0, 10, 50))
        ]
    assert [answer.error == common_pb2.ERROR_CODE_NONE for answer in answers] == [True, True, False]
    assert rpcs.controller.commits == CommitTally(accepted=2, refused=1)
    assert sum(rpcs.controller.commits.times) == 3


async def test_calls_that_end_with_an_error_are_counted_by_reason() -> None:
    before = error_mapping.refused["INVALID_FIELD"]
    async with serving() as rpcs:
        refused = await rpcs.refusal("StreamService/CreateStreams", b"\xff\xff\xff")
    assert refused[1] == "INVALID_FIELD"
    assert error_mapping.refused["INVALID_FIELD"] == before + 1
