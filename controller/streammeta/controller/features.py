"""Feature levels: the permitted contents of log and checkpoints.

A cluster has one level, in its log. The operator raises it once every controller supports the
level's additions. Until then, each of them can be restarted with its older version. Everything that
an older version would drop or misread, such as a kind of record, a field or a section of a
checkpoint, belongs to a level and is written only at or above it. Unknown contents stop a
controller, so a mistake here costs availability but no data. After KIP-584 and KIP-778 of Kafka.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BASE_LEVEL = 1
"""Level of a cluster whose log does not contain one."""


@dataclass(frozen=True, slots=True)
class Levels:
    """The range of levels that a version supports, inclusive."""

    lowest: int
    highest: int

    def __str__(self) -> str:
        return f"{self.lowest} to {self.highest}"

    def include(self, level: int) -> bool:
        """Return whether a version with these levels supports a level."""
        return self.lowest <= level <= self.highest


@dataclass(frozen=True, slots=True)
class Software:
    """Software of a controller: its version, empty if unknown, and the levels it supports."""

    version: str
    levels: Levels

    def __str__(self) -> str:
        return f"version {self.version or 'unknown'}, levels {self.levels}"


SUPPORTED = Levels(BASE_LEVEL, 5)
"""Levels supported by this version."""

UNTOLD = Software("", Levels(BASE_LEVEL, BASE_LEVEL))
"""Software of a controller that does not announce its own, which only supports level 1."""

ADDED: Mapping[int, str] = {
    1: "everything up to feature levels",
    2: "the level itself: record FeatureLevelSet. Recovery after a restore: section recovery, "
    "records ObjectsReclaimed and RestoreFinished",
    3: "values put and streams trimmed with a commit. Named objects: NamedObjectsCommitted",
    4: "rows left out of a commit, remembered by the commit: field content_digest of "
    "CommitRowsRejected, section left_out_rows. Processes of one node epoch distinguished: field "
    "process_id of NodeRegistered, section node_processes",
    5: "shared streams: field shared of StreamsCreated, state 3 in section streams. Their "
    "idempotent producers: records ProducerBatchesCommitted, ProducerIdsIssued, ProducersExpired, "
    "sections producer_ids, producers, producer_batches",
}
"""Additions of each level."""

RECORDS: Mapping[str, int] = {
    "FeatureLevelSetRecord": 2,
    "ObjectsReclaimedRecord": 2,
    "RestoreFinishedRecord": 2,
    "NamedObjectsCommittedRecord": 3,
    "ProducerBatchesCommittedRecord": 5,
    "ProducerIdsIssuedRecord": 5,
    "ProducersExpiredRecord": 5,
}
"""Levels of messages in records.proto added after level 1."""

FIELDS: Mapping[tuple[str, str], int] = {
    ("Record", "feature_level_set"): 2,
    ("Record", "objects_reclaimed"): 2,
    ("Record", "restore_finished"): 2,
    ("Record", "named_objects_committed"): 3,
    ("Record", "producer_batches_committed"): 5,
    ("Record", "producer_ids_issued"): 5,
    ("Record", "producers_expired"): 5,
    ("CommitRowsRejectedRecord", "content_digest"): 4,
    ("NodeRegisteredRecord", "process_id"): 4,
    ("StreamsCreatedRecord", "shared"): 5,
}
"""Levels of fields added to older messages after level 1, by message and name."""

SECTIONS: Mapping[str, int] = {
    "recovery": 2,
    "left_out_rows": 4,
    "node_processes": 4,
    "producer_ids": 5,
    "producers": 5,
    "producer_batches": 5,
}
"""Levels of the checkpoint's sections added after level 1."""


def data_changes(lower: int, higher: int) -> list[int]:
    """Return the levels above `lower`, up to `higher`, that changed the format of stored data.

    A version without such a level cannot read the data, so a cluster cannot go back below it.
    """
    # A level without stored additions does not prevent a return.
    changed = {*RECORDS.values(), *FIELDS.values(), *SECTIONS.values()}
    return sorted(level for level in changed if lower < level <= higher)
