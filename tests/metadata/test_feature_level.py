"""Feature levels: bounds of a change, and one for each addition to records and checkpoints."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from streammeta.controller import features
from streammeta.controller.errors import InvariantError, NewerLogError
from streammeta.controller.ids import ClusterId, EndOffset, Epoch, SnapshotId
from streammeta.controller.journal.errors import NewerVersionError
from streammeta.controller.metadata.api.requests import SetFeatureLevel
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.registries import cluster_modes
from streammeta.controller.metadata.sections.frozen import FrozenMetadata
from streammeta.controller.metadata.sections.rules import SECTIONS as SECTION_RULES
from streammeta.controller.records.record import FeatureLevelSet
from streammeta.controller.runtime.persistence.metadata_checkpoint import snapshot_check
from streammeta.controller.snapshot.checkpoint_file import write_checkpoint
from streammeta.v1 import records_pb2
from tests.metadata.small_world import World

BEYOND = features.SUPPORTED.highest + 1
LEVEL_1 = Path(__file__).with_name("level_1.json")
"""Fields by message of records.proto, and sections of checkpoints, as of level 1; never changes."""


def test_a_level_is_raised_once_and_undone_with_its_entry() -> None:
    world = World()
    assert world.map.feature_level == features.BASE_LEVEL
    before = world.map.state_hash()
    answer: Any = world.write(SetFeatureLevel(level=2))
    assert (answer.before, answer.level, world.map.feature_level) == (1, 2, 2)
    assert world.map.state_hash() != before
    end = world.map.applied_end_offset
    again: Any = world.write(SetFeatureLevel(level=2))
    lower: Any = world.write(SetFeatureLevel(level=1))
    assert (again.level, lower.level, world.map.applied_end_offset) == (2, 2, end)
    world.map.undo_to(0)
    assert world.map.feature_level == features.BASE_LEVEL


def test_a_level_is_lowered_where_none_between_has_changed_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_modes, "SUPPORTED", features.Levels(1, 8))
    world = World()
    for level in (8, 6):
        world.map.apply(world.map.applied_end_offset, [FeatureLevelSet(level=level)])
        assert world.map.feature_level == level
    end = world.map.applied_end_offset
    lower: Any = world.write(SetFeatureLevel(level=1))
    assert (lower.before, lower.level, world.map.applied_end_offset) == (6, 6, end)
    with pytest.raises(InvariantError, match=r"level 1.*6"):
        world.map.apply(end, [FeatureLevelSet(level=1)])


def test_levels_that_changed_data_are_those_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert features.data_changes(1, 2) == [2]
    assert features.data_changes(2, 2) == []
    monkeypatch.setattr(features, "FIELDS", {("KVsPut", "colour"): 5})
    monkeypatch.setattr(features, "SECTIONS", {"links": 4})
    assert features.data_changes(1, 5) == [2, 3, 4, 5]
    assert features.data_changes(4, 5) == [5]


@pytest.mark.parametrize(
    ("level", "error", "told"),
    [
        (BEYOND, NewerLogError, f"start a version that runs at level {BEYOND}"),
        (1, InvariantError, "sets feature level 1, but it is 1"),
    ],
)
def test_a_record_of_a_level_that_is_not_above_or_not_known_is_refused(
    level: int, error: type[Exception], told: str
) -> None:
    cluster_metadata = ClusterMetadata()
    with pytest.raises(error, match=told):
        cluster_metadata.apply(0, [FeatureLevelSet(level=level)])
    assert cluster_metadata.feature_level == features.BASE_LEVEL


def test_a_checkpoint_of_a_higher_level_is_that_of_a_newer_version() -> None:
    cluster_metadata = ClusterMetadata()
    sections = {
        **cluster_metadata.freeze().sections(),
        "feature_level": {"level": level_column(BEYOND)},
    }
    snapshot_id, file = SnapshotId(EndOffset(1), Epoch(1)), io.BytesIO()
    write_checkpoint(file, snapshot_id, "c", sections)
    with pytest.raises(NewerVersionError, match=f"{BEYOND}.*{BEYOND - 1}"):
        snapshot_check(ClusterId("c"))(snapshot_id, file)


def level_column(level: int) -> Any:
    column = FrozenMetadata.sections(ClusterMetadata().freeze())["feature_level"]["level"]
    return column * 0 + level  # type: ignore[operator]


def test_all_that_came_after_level_1_has_a_level() -> None:
    """Nothing that an older version would drop may be written before all can read it."""
    first = json.loads(LEVEL_1.read_text())
    messages = records_pb2.DESCRIPTOR.message_types_by_name
    added_messages = set(messages) - set(first["records"])
    assert added_messages == set(features.RECORDS)
    added_fields = {
        (name, field)
        for name, fields in first["records"].items()
        for field in set(messages[name].fields_by_name) - set(fields)
    }
    assert added_fields == set(features.FIELDS)
    assert set(SECTION_RULES) - set(first["sections"]) == set(features.SECTIONS)
    assert set(ClusterMetadata().freeze().sections()) == set(first["sections"])
    levels = {*features.RECORDS.values(), *features.FIELDS.values(), *features.SECTIONS.values()}
    assert levels <= set(features.ADDED)
    assert set(features.ADDED) == set(range(1, features.SUPPORTED.highest + 1))


def test_nothing_of_level_1_has_changed_its_number_or_gone() -> None:
    first = json.loads(LEVEL_1.read_text())
    for name, fields in first["records"].items():
        now = records_pb2.DESCRIPTOR.message_types_by_name[name].fields_by_name
        assert {field: now[field].number for field in fields} == fields
    assert set(first["sections"]) <= set(ClusterMetadata().freeze().sections())
