"""Fixtures of the lifecycle's tests."""

import pytest

from tests.lifecycle.lifecycle_world import World


@pytest.fixture
async def world() -> World:
    started = World()
    await started.start()
    return started
