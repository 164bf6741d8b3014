"""The cluster that most scenarios break."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chaos.chaos_scene import Scene, scene_in


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """Three controllers that serve, of which nothing is left at the end."""
    async with scene_in(tmp_path) as scene:
        yield scene
