"""What must be true after a run: nothing acknowledged lost, one order explains all, maps equal.

Judges histories, and asks the healed controllers. Knows no fault. A failed check is an
`AssertionError` that says what was wanted and what was got.
"""

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from streammeta.rpc.connections import client_channel
from streammeta.v1 import admin_pb2, admin_pb2_grpc
from tests.chaos.chaos_cluster import ChaosCluster
from tests.linearizability import models
from tests.linearizability.history import Operation, Unknown
from tests.linearizability.report import assert_linearizable

History = Sequence[Operation[Any, Any]]

_ASK_S = 2.0
_EQUAL_S = 30.0
_BAD_LEVELS = ('"level": "critical"', '"level": "error"', "Traceback (most recent call last)")


def check_histories(kv: History, stream: History) -> None:
    """All that is checked of what clients saw."""
    check_no_write_lost(kv)
    check_no_commit_lost(stream)
    assert_linearizable(kv, models.MODELS["kv"])
    assert_linearizable(stream, models.MODELS["stream"])


def check_no_write_lost(history: History) -> None:
    """The last value read of each key was written by a write that no acknowledged one came after.

    Said by the linearizable verdict too; said here without a search, so that the two check each
    other.
    """
    by_key: dict[str, list[Operation[Any, Any]]] = {}
    for operation in history:
        by_key.setdefault(operation.key, []).append(operation)
    for key, operations in by_key.items():
        last = operations[-1]
        assert isinstance(last.request, models.Get), (
            f"{key}: the run ends with {last}, not with a read"
        )
        assert not isinstance(last.answer, Unknown), f"{key}: the last read was not answered"
        _check_last_value(key, last.answer.value, operations[:-1])


def _check_last_value(key: str, value: str | None, operations: History) -> None:
    writes = [call for call in operations if isinstance(call.request, models.Put | models.Delete)]
    if value is None:
        sources = [write for write in writes if isinstance(write.request, models.Delete)]
        begun_at_last = max((_end_of(source) for source in sources), default=0)
    else:
        source = next((write for write in writes if _puts(write, value)), None)
        assert source is not None, f"{key}: it ends as {value}, which was never written"
        begun_at_last = _end_of(source)
    for write in writes:
        if _was_applied(write) and write.invoked > begun_at_last:
            raise AssertionError(
                f"{key}: it ends as {value}, an acknowledged write is lost: {write}"
            )


def _puts(operation: Operation[Any, Any], value: str) -> bool:
    return isinstance(operation.request, models.Put) and operation.request.value == value


def _was_applied(operation: Operation[Any, Any]) -> bool:
    return not isinstance(operation.answer, Unknown) and operation.answer.applied


def _end_of(operation: Operation[Any, Any]) -> float:
    """When the operation had taken effect at the latest."""
    return float("inf") if operation.returned is None else operation.returned


def check_no_commit_lost(history: History) -> None:
    """Every acknowledged commit is in its stream; one of several streams is in all or in none."""
    ends = {
        call.key: set(call.answer.object_ids)
        for call in history
        if isinstance(call.request, models.ReadObjects) and isinstance(call.answer, models.Objects)
    }
    streams_of: dict[int, set[str]] = {}
    for operation in history:
        if not isinstance(operation.request, models.CommitRange):
            continue
        object_id = operation.request.object_id
        if isinstance(operation.answer, models.Committed):
            assert object_id in ends[operation.key], (
                f"stream {operation.key} lost an acknowledged commit: {operation}"
            )
        if isinstance(operation.answer, models.Committed | Unknown):
            streams_of.setdefault(object_id, set()).add(operation.key)
    for object_id, streams in streams_of.items():
        there = {stream for stream in streams if object_id in ends[stream]}
        assert there in (set(), streams), (
            f"object {object_id} was committed to {sorted(there)} of the streams {sorted(streams)}"
        )


async def check_healed(cluster: ChaosCluster, expected_in_logs: Sequence[str] = ()) -> None:
    """All maps are equal, no process ended by itself, no log tells of a defect."""
    endpoints = cluster.direct_endpoints
    await check_equal_states({node: endpoints[node] for node in cluster.running})
    cluster.note_surprises()
    assert not cluster.surprises, "\n".join(cluster.surprises)
    check_logs(cluster.log_paths, expected_in_logs)


async def check_equal_states(endpoints: Mapping[int, str]) -> None:
    """All controllers' maps are equal at an equal offset, reached before a deadline."""
    deadline = time.monotonic() + _EQUAL_S
    at_offset: int | None = None
    answers: dict[int, admin_pb2.StateHashResponse | None] = {}
    while time.monotonic() < deadline:
        answers = dict(
            zip(
                endpoints,
                await asyncio.gather(*(_state_hash(at, at_offset) for at in endpoints.values())),
                strict=True,
            )
        )
        known = [answer for answer in answers.values() if answer is not None]
        offsets = {answer.offset for answer in known}
        if len(known) == len(answers) and len(offsets) == 1:
            hashes = {node: answer.hash.hex() for node, answer in answers.items() if answer}
            assert len(set(hashes.values())) == 1, f"maps differ at offset {offsets}: {hashes}"
            return
        if offsets:
            at_offset = max(offsets)
        await asyncio.sleep(0.1)
    raise AssertionError(f"not within {_EQUAL_S:.0f} s at one offset: {answers}")


async def _state_hash(endpoint: str, at_offset: int | None) -> admin_pb2.StateHashResponse | None:
    """Ask one controller; None if it has not got so far, or can't say."""
    async with client_channel(endpoint) as channel:
        try:
            answer: admin_pb2.StateHashResponse = await admin_pb2_grpc.AdminServiceStub(
                channel
            ).StateHash(admin_pb2.StateHashRequest(at_offset=at_offset), timeout=_ASK_S)
        except grpc.aio.AioRpcError:
            return None
        return answer


def check_logs(paths: Sequence[Path], expected: Sequence[str] = ()) -> None:
    """No process logged an error or a traceback, but for lines that hold a text of `expected`."""
    bad = [
        f"{path.name}: {line}"
        for path in paths
        for line in path.read_text(errors="replace").splitlines()
        if any(sign in line for sign in _BAD_LEVELS) and not any(text in line for text in expected)
    ]
    assert not bad, "logged without reason:\n" + "\n".join(bad[:20])


def longest_gap_s(histories: Sequence[History]) -> float:
    """Longest time in which no operation was acknowledged, in seconds."""
    times = sorted(
        call.returned for history in histories for call in history if call.returned is not None
    )
    gaps = (later - earlier for earlier, later in itertools.pairwise(times))
    return max(gaps, default=0) / 1e9
