"""The metadata stops, instead of deciding or undoing, when its caller breaks an invariant."""

import pytest

from streammeta.controller.metadata.api import requests
from tests.metadata.small_world import NODE, NOW, World


def test_a_decision_never_precedes_applied_entries() -> None:
    world = World()
    before = world.map.state_hash()

    with pytest.raises(AssertionError):
        world.map.decide(requests.RegisterNode(node=NODE), NOW, world.map.applied_end_offset - 1)

    assert world.map.state_hash() == before


def test_undoing_leaves_no_entry_above_the_new_end() -> None:
    world = World()
    end = world.map.applied_end_offset
    world.map.applied_end_offset = end + 2  # an entry that no undo belongs to

    with pytest.raises(AssertionError):
        world.map.undo_to(end + 1)
