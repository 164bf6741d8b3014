"""Feature levels: what log and checkpoints may hold.

A cluster has one level, in its log. It is raised by the operator, once every controller can read
what the level adds; until then any of them can be started in its older version again. Whatever an
older version would drop or misread, be it a kind of record, a field of one or a section of a
checkpoint, belongs to a level and is written at or above it alone. Anything unknown stops a
controller, so a mistake here costs availability and no data. After KIP-584 and KIP-778 of Kafka.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BASE_LEVEL = 1
"""Level of a cluster whose log names none."""


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels that one version can run at, both included."""

    lowest: int
    highest: int

    def __str__(self) -> str:
        return f"{self.lowest} to {self.highest}"

    def include(self, level: int) -> bool:
        """Return whether a version with these can run at a level."""
        return self.lowest <= level <= self.highest


@dataclass(frozen=True, slots=True)
class Software:
    """Software of a controller: its version, empty if unknown, and the levels it can run at."""

    version: str
    levels: Levels

    def __str__(self) -> str:
        return f"version {self.version or 'unknown'}, levels {self.levels}"


SUPPORTED = Levels(BASE_LEVEL, 4)
"""The levels of this version."""

UNTOLD = Software("", Levels(BASE_LEVEL, BASE_LEVEL))
"""Software of a controller that does not announce its own: it knows no more than level 1."""

ADDED: Mapping[int, str] = {
    1: "everything up to feature levels",
    2: "the level itself: record FeatureLevelSet; recovery after a restore: section recovery, "
    "records ObjectsReclaimed and RestoreFinished",
    3: "values put and streams trimmed with a commit; named objects: NamedObjectsCommitted",
    4: "rows left out of a commit, remembered by the commit: field content_digest of "
    "CommitRowsRejected, section left_out_rows; processes of one node epoch told apart: field "
    "process_id of NodeRegistered, section node_processes",
}
"""Additions of each level."""

RECORDS: Mapping[str, int] = {
    "FeatureLevelSetRecord": 2,
    "ObjectsReclaimedRecord": 2,
    "RestoreFinishedRecord": 2,
    "NamedObjectsCommittedRecord": 3,
}
"""Levels of the messages of records.proto that came after level 1."""

FIELDS: Mapping[tuple[str, str], int] = {
    ("Record", "feature_level_set"): 2,
    ("Record", "objects_reclaimed"): 2,
    ("Record", "restore_finished"): 2,
    ("Record", "named_objects_committed"): 3,
    ("CommitRowsRejectedRecord", "content_digest"): 4,
    ("NodeRegisteredRecord", "process_id"): 4,
}
"""Levels of the fields, by message and name, that older messages got after level 1."""

SECTIONS: Mapping[str, int] = {"recovery": 2, "left_out_rows": 4, "node_processes": 4}
"""Levels of the checkpoint's sections that came after level 1."""


def data_changes(lower: int, higher: int) -> list[int]:
    """Return the levels above `lower`, up to `higher`, that changed what log or checkpoints hold.

    A version without such a level reads neither, so that a cluster can't go back below it.
    """
    changed = {*RECORDS.values(), *FIELDS.values(), *SECTIONS.values()}
    return sorted(level for level in changed if lower < level <= higher)
