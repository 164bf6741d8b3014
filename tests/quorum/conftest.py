"""The quorum that most tests over TCP use."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.quorum.tcp_quorum import TcpQuorum


@pytest.fixture
async def quorum(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[TcpQuorum]:
    """Three voters, unless the test's parameter says otherwise; started, stopped at the end."""
    quorum = TcpQuorum(tmp_path, **{"size": 3, **getattr(request, "param", {})})
    await quorum.start_all()
    yield quorum
    await quorum.stop_all()
