"""The recovery of a node, step by step as docs/protocol.md describes it, and each of its errors."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables.values import NodeIdentity, column
from tests.metadata.small_world import NODE, OTHER, World, upload

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
SECTION = PAGE.read_text().split("## Recovering a node\n")[1].split("\n## ")[0]
IDENTITIES = {"own": OTHER, "dead": NODE, "": None}
OPEN, PENDING = 0, 1


def table(first_column: str) -> list[list[str]]:
    """Return the cells of the rows of a table of the section, without marks of code."""
    lines = SECTION.split(f"| {first_column} |")[1].splitlines()[2:]
    rows = [line for line in lines[: lines.index("")] if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows]


STEPS = {call: (node, recoverer) for _, call, node, recoverer, _ in table("step")}


def dead_node() -> World:
    """Return a world whose NODE, with an open stream and a pending upload, is to be recovered."""
    world = World(streams=2)
    world.commit(0, (OPEN, 0, 10), (PENDING, 0, 10))
    closing = r.StreamToClose(PENDING, 1, end_offset=20)
    world.write(r.CloseStreams(node=NODE, streams=(closing,)))
    world.write(r.AssignRecoveries(targets=(r.RecoveryTarget(NODE.node_id, 1, OTHER.node_id),)))
    return world


def as_described(request: Any) -> Any:
    """Return a request with the identities of the page."""
    node, recoverer = STEPS[type(request).__name__]
    if not recoverer:
        return replace(request, node=IDENTITIES[node])
    return replace(request, node=IDENTITIES[node], recoverer=IDENTITIES[recoverer])


def opening() -> Any:
    return as_described(r.GetOpeningStreams(node=NODE, failover=True))


def prepare() -> Any:
    return as_described(
        r.PrepareObjects(request_id="of the recovery", node=NODE, count=1, ttl_ms=60_000)
    )


def commit(object_id: int, *rows: tuple[int, int, int]) -> Any:
    epochs = (1,) * len(rows)
    return as_described(upload(object_id, *rows, epochs=epochs, failover=True))


def close() -> Any:
    return as_described(r.CloseStreams(node=NODE, streams=(r.StreamToClose(OPEN, 1),)))


def open_streams() -> Any:
    streams = (r.StreamToOpen(OPEN, 2), r.StreamToOpen(PENDING, 2))
    return as_described(r.OpenStreams(node=NODE, streams=streams))


def error_of(answer: Any) -> ErrorCode:
    """Return the first error of an answer."""
    if hasattr(answer, "streams") and not hasattr(answer, "error"):
        return next((stream.error for stream in answer.streams if stream.error), ErrorCode.NONE)
    return answer.errors[0] if hasattr(answer, "errors") else answer.error  # type: ignore[no-any-return]


def test_the_steps_of_the_page_recover_a_node() -> None:
    assert list(STEPS) == [
        *("Heartbeat", "GetOpeningStreams", "PrepareObjects", "CommitStreamSetObject"),
        *("CloseStreams", "OpenStreams"),
    ]
    assert STEPS["Heartbeat"] == ("own", "")
    world = dead_node()
    left = world.write(opening())
    found = {stream.stream_id: (stream.epoch, stream.end_offset) for stream in left.streams}
    ends = {stream.stream_id: stream.upload_end_offset for stream in left.streams}
    assert found == {OPEN: (1, 10), PENDING: (1, 10)}
    assert ends == {OPEN: -1, PENDING: 20}

    object_id = world.write(prepare()).first_object_id
    for _ in range(2):  # a repeat of each step changes nothing
        assert error_of(world.write(commit(object_id, (OPEN, 10, 15), (PENDING, 10, 20)))) == 0
        assert error_of(world.write(close())) == 0
    assert error_of(world.write(open_streams())) is ErrorCode.NONE
    assert world.ends() == [15, 20]
    described: Any = world.map.query(r.GetNodes(node_ids=(NODE.node_id,)))
    node = described.nodes[0]
    assert (node.has_opening_streams, node.pending_upload_count) == (False, 0)


def with_dead_identity(world: World) -> Any:
    world.write(opening())
    return replace(prepare(), node=NODE)


def without_failover(world: World) -> Any:
    world.write(opening())
    return replace(commit(1, (OPEN, 10, 15)), failover=False, recoverer=None)


def assigned_to_another(world: World) -> Any:
    third = NodeIdentity(2, 1)
    world.write(r.RegisterNode(node=third))
    targets = (r.RecoveryTarget(NODE.node_id, 1, third.node_id),)
    world.write(r.AssignRecoveries(targets=targets))
    return opening()


def returned(world: World) -> Any:
    world.write(opening())
    world.write(r.RegisterNode(node=NodeIdentity(NODE.node_id, 2)))
    return commit(1, (OPEN, 10, 15))


def committed_before(world: World) -> Any:
    world.write(opening())
    assert error_of(world.write(commit(1, (OPEN, 10, 15)))) is ErrorCode.NONE
    return commit(2, (OPEN, 10, 15))


def expired(world: World) -> Any:
    world.write(opening())
    return commit(10_000, (OPEN, 10, 15))


def too_early(world: World) -> Any:
    world.write(opening())
    return open_streams()


SITUATIONS: dict[str, Callable[[World], Any]] = {
    "the dead identity was used": with_dead_identity,
    "without failover, after step 2": without_failover,
    "the recovery is assigned to another broker, or this broker is fenced itself": (
        assigned_to_another
    ),
    "the dead node has returned with a larger epoch, and recovers itself": returned,
    "an earlier recoverer has committed these records": committed_before,
    "the prepared id has expired": expired,
    "the stream is still open, or has a pending upload": too_early,
}


@pytest.mark.parametrize(
    ("error", "call", "situation"),
    [row[:3] for row in table("error")],
    ids=lambda cell: re.sub(r"\W+", "-", cell)[:40],
)
def test_each_error_of_the_page_is_answered(error: str, call: str, situation: str) -> None:
    world = dead_node()
    request = SITUATIONS[situation](world)
    assert type(request).__name__ == call
    answer = world.write(request)
    codes = {error_of(answer), *(getattr(answer, "range_errors", column()).tolist())}
    assert ErrorCode[error] in codes


def test_every_situation_is_on_the_page() -> None:
    assert {row[2] for row in table("error")} == set(SITUATIONS)
