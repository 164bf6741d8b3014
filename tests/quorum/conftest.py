"""The quorum of three that most tests over TCP use."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.quorum.tcp_quorum import TcpQuorum


@pytest.fixture
async def quorum(tmp_path: Path) -> AsyncIterator[TcpQuorum]:
    """Three voters, started, and stopped at the end."""
    quorum = TcpQuorum(tmp_path, 3)
    await quorum.start_all()
    yield quorum
    await quorum.stop_all()
