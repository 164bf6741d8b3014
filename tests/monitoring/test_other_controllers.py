"""Channels to other controllers, while several pages ask for them at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streammeta.controller.monitoring.status import peer_status as module
from streammeta.controller.monitoring.status.peer_status import PeerStatusClient


class Channel:
    """A channel that answers nothing, and takes some turns to close."""

    made: list[Channel]

    def __init__(self, *_: Any) -> None:
        self.closes = 0
        type(self).made.append(self)

    async def close(self) -> None:
        self.closes += 1
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    Channel.made = []

    class Stub:
        def __init__(self, channel: Channel) -> None:
            self._channel = channel

        async def DescribeQuorum(self, *_: Any, **__: Any) -> str:  # noqa: N802
            await asyncio.sleep(0)
            assert not self._channel.closes
            return "a view"

    monkeypatch.setattr(module, "client_channel", Channel)
    monkeypatch.setattr(module, "QuorumServiceStub", Stub)


@pytest.mark.usefixtures("asked")
async def test_requests_at_once_may_need_other_controllers() -> None:
    others = PeerStatusClient(lambda: None)
    await others.ask({1: "a", 2: "b", 3: "c"})
    found = await asyncio.gather(*(others.ask({4: "d"}) for _ in range(3)))
    assert [answers[4].view for answers in found] == ["a view"] * 3
    await others.close()
    assert [channel.closes for channel in Channel.made] == [1] * len(Channel.made)


@pytest.mark.usefixtures("asked")
async def test_a_renewed_certificate_leaves_no_channel_open() -> None:
    certificates: list[Any] = [None]
    others = PeerStatusClient(lambda: certificates[0])
    await others.ask({1: "a", 2: "b"})
    certificates[0] = object()
    await asyncio.gather(others.ask({1: "a"}), others.ask({1: "a"}))
    await others.close()
    assert [channel.closes for channel in Channel.made] == [1] * len(Channel.made)
