"""Fixtures of the runtime's tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.kit.memory_cluster import MemoryCluster


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MemoryCluster]:
    """Yield three controllers in this process."""
    async with MemoryCluster(tmp_path) as started:
        yield started


@pytest_asyncio.fixture
async def lone(tmp_path: Path) -> AsyncIterator[MemoryCluster]:
    """Yield a cluster of one controller."""
    async with MemoryCluster(tmp_path, size=1) as started:
        yield started
