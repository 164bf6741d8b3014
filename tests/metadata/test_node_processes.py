"""Processes of one node epoch: the first that registers has it, and may repeat its registration."""

from __future__ import annotations

from typing import Any

import pytest

from streammeta.controller import features
from streammeta.controller.errors import ErrorCode, InvalidRequestError
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables.values import NodeIdentity
from tests.metadata.small_world import World

LEVEL = features.SECTIONS["node_processes"]
NODE_ID = 5


@pytest.fixture
def world() -> World:
    made = World()
    made.write(r.SetFeatureLevel(level=LEVEL))
    return made


def register(world: World, process_id: str, epoch: int = 1, **changes: Any) -> ErrorCode:
    request = r.RegisterNode(node=NodeIdentity(NODE_ID, epoch), process_id=process_id, **changes)
    error: ErrorCode = world.write(request).error
    return error


def test_another_process_of_the_same_epoch_is_refused_and_changes_nothing(world: World) -> None:
    assert register(world, "a", wal_config="mine") is ErrorCode.NONE
    for asked in (world, world.restored()):
        before = asked.map.state_hash()
        refused = register(asked, "b", wal_config="other")
        assert refused is ErrorCode.NODE_EPOCH_EXPIRED
        assert asked.map.state_hash() == before


def test_the_same_process_repeats_and_changes_its_registration(world: World) -> None:
    assert register(world, "a") is ErrorCode.NONE
    before = world.map.state_hash()
    assert register(world, "a") is ErrorCode.NONE
    assert world.map.state_hash() == before
    assert register(world, "a", wal_config="moved") is ErrorCode.NONE
    assert register(world, "b") is ErrorCode.NODE_EPOCH_EXPIRED


def test_a_larger_epoch_is_any_process_s(world: World) -> None:
    register(world, "a")
    assert register(world, "b", epoch=2) is ErrorCode.NONE
    assert register(world, "a", epoch=2) is ErrorCode.NODE_EPOCH_EXPIRED
    assert register(world, "a", epoch=1) is ErrorCode.NODE_EPOCH_EXPIRED
    world.write(r.GetOpeningStreams(node=NodeIdentity(NODE_ID, 3)))
    assert register(world, "c", epoch=3) is ErrorCode.NONE


def test_a_process_that_does_not_say_which_it_is_changes_no_owner(world: World) -> None:
    register(world, "a")
    assert register(world, "", wal_config="moved") is ErrorCode.NONE
    assert register(world, "b") is ErrorCode.NODE_EPOCH_EXPIRED
    assert register(world, "a") is ErrorCode.NONE


def test_below_the_level_processes_are_not_told_apart() -> None:
    world = World()
    world.write(r.SetFeatureLevel(level=LEVEL - 1))
    assert register(world, "a") is ErrorCode.NONE
    before = world.map.state_hash()
    assert register(world, "b") is ErrorCode.NONE
    assert world.map.state_hash() == before
    world.write(r.SetFeatureLevel(level=LEVEL))
    assert register(world, "b") is ErrorCode.NONE
    assert register(world, "a") is ErrorCode.NODE_EPOCH_EXPIRED


def test_a_process_id_is_bounded(world: World) -> None:
    assert register(world, "p" * 64) is ErrorCode.NONE
    with pytest.raises(InvalidRequestError, match="process_id"):
        register(world, "p" * 65, epoch=2)
