"""Fixtures of the lifecycle's tests."""

import pytest_asyncio

from tests.lifecycle.lifecycle_world import World


@pytest_asyncio.fixture
async def world() -> World:
    started = World()
    await started.start()
    return started
