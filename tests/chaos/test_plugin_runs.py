"""The harness of `scripts/chaos --plugin`, with brokers that need no Java."""

import random
from pathlib import Path

import pytest

from tests.chaos.plugin_run import SHAPES, run_plugins


@pytest.mark.process
@pytest.mark.timeout(600)
def test_brokers_of_all_shapes_lose_nothing_in_one_bucket(tmp_path: Path) -> None:
    report = run_plugins(tmp_path, random.randrange(1 << 31), [SHAPES], 1.0)

    assert report.messages[SHAPES] > 0
    assert report.deleted_orphans > 0
