"""The quorum of three that most tests over gRPC use."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.quorum.grpc_quorum import GrpcQuorum


@pytest.fixture
async def quorum(tmp_path: Path) -> AsyncIterator[GrpcQuorum]:
    """Three voters, started, and stopped at the end."""
    quorum = GrpcQuorum(tmp_path, 3)
    await quorum.start_all()
    yield quorum
    await quorum.stop_all()
