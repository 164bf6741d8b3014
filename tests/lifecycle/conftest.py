"""Fixtures of the lifecycle's tests."""

import pytest

from tests.lifecycle.lifecycle_world import World


@pytest.fixture
async def world() -> World:
    return await World().start()
