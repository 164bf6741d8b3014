"""Heartbeats go on while there is any use in them, and end what a takeover must end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from streammeta.client import (
    BrokerClientError,
    ControllerUnavailableError,
    Heartbeat,
    NodeEpochExpiredError,
    NodeFencedError,
    StreamWriter,
    UnsupportedError,
)
from streammeta.client.model import HeartbeatAnswer, heartbeat_answer
from streammeta.client.session import BrokerSession
from streammeta.v1 import common_pb2, nodes_pb2
from tests.kit.fake_broker import until, writing


class FakeSession:
    """A session whose heartbeats are answered as told, then as the last one."""

    def __init__(self, outcomes: Sequence[HeartbeatAnswer | Exception]) -> None:
        self.outcomes = list(outcomes)
        self.sent = 0

    async def heartbeat(self) -> HeartbeatAnswer:
        outcome = self.outcomes[min(self.sent, len(self.outcomes) - 1)]
        self.sent += 1
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


SHORT = heartbeat_answer(
    nodes_pb2.HeartbeatResponse(
        session_timeout_ms=8,
        recoveries=[nodes_pb2.Recovery(node_id=1001, node_epoch=3)],
        compactions=[common_pb2.NodeIdentity(node_id=1002, node_epoch=4)],
    )
)
UNAVAILABLE = ControllerUnavailableError("Heartbeat", 1.0, {})


def heartbeat_of(session: FakeSession, told: list[BrokerClientError]) -> Heartbeat:
    return Heartbeat(session, told.append, random.Random(1))  # type: ignore[arg-type]


async def test_it_goes_on_and_names_what_is_to_be_done_for_others() -> None:
    told: list[BrokerClientError] = []
    session = FakeSession([SHORT])
    async with heartbeat_of(session, told) as heartbeat:
        heartbeat.start()
        await until(lambda: session.sent > 5, "heartbeats")
        assert [one.node_id for one in heartbeat.recoveries] == [1001]
        assert [(one.node_id, one.node_epoch) for one in heartbeat.compactions] == [(1002, 4)]
    sent = session.sent
    assert (told, session.sent) == ([], sent)


async def test_one_that_does_not_get_through_is_not_the_last() -> None:
    session = FakeSession([SHORT, UNAVAILABLE, UNAVAILABLE, SHORT])
    async with heartbeat_of(session, []):
        await until(lambda: session.sent > 6, "heartbeats after failures")


@pytest.mark.parametrize(
    "error", [NodeEpochExpiredError("heartbeat"), NodeFencedError("heartbeat")]
)
async def test_a_takeover_ends_it_and_is_told(error: BrokerClientError) -> None:
    told: list[BrokerClientError] = []
    session = FakeSession([SHORT, error])
    async with heartbeat_of(session, told):
        await until(lambda: bool(told), "the news")
        assert told == [error]
    assert session.sent == 2


async def test_controllers_without_sessions_are_asked_once() -> None:
    told: list[BrokerClientError] = []
    session = FakeSession([UnsupportedError("Heartbeat")])
    async with heartbeat_of(session, told):
        await until(lambda: session.sent == 1, "the heartbeat")
    assert told == []


async def test_a_writer_keeps_its_session_alive_and_fails_when_it_is_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[HeartbeatAnswer] = []
    refusals: list[Exception] = []

    async def heartbeat(_: BrokerSession) -> HeartbeatAnswer:
        for refusal in refusals:
            raise refusal
        answers.append(SHORT)
        return SHORT

    monkeypatch.setattr(BrokerSession, "heartbeat", heartbeat)
    async with writing(linger_s=0.01) as (b, writer):
        await (await writer.append(0, b"x"))
        await until(lambda: len(answers) > 2, "heartbeats")
        refusals.append(NodeFencedError("heartbeat"))
        with pytest.raises(NodeFencedError):
            await append_for_ever(writer)
        assert await b.payloads(0)


async def append_for_ever(writer: StreamWriter) -> None:
    while True:
        await (await writer.append(0, b"x"))
