"""Events of the demo, and the checks at its end.

Owns the figures of the summary and the checks. Makes no calls.
"""

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class Story:
    """Events so far, with objects by id and brokers by number."""

    rows_committed: int = 0
    commits: int = 0
    uploaded: set[int] = field(default_factory=set)
    compactions: int = 0
    leader_kills: int = 0
    failover_s: float = -1.0
    killed_objects: set[int] = field(default_factory=set)
    killed_keys: set[str] = field(default_factory=set)
    expired_deleted: int = 0
    refusal: str = ""
    prepared: dict[int, set[int]] = field(default_factory=dict)
    uploaded_keys: dict[int, set[str]] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    orphans: set[str] = field(default_factory=set)
    brokers_done: set[int] = field(default_factory=set)
    acting: dict[int, threading.Thread] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reads:
    """Rows that were read and equal the source, -1 if any differed.

    All rows after compaction, all again after reconciliation, and the rows read during the
    upload, with the first difference there.
    """

    rows: int
    rows_again: int
    rows_beside: int
    failure_beside: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Keys in the bucket before and after reconciliation. One does not belong to the cluster."""

    before: set[str]
    after: set[str]
    foreign_key: str


@dataclass(frozen=True, slots=True)
class MappedKeys:
    """Keys of live objects, and of all objects in the metadata."""

    live: set[str]
    known: set[str]


def summarize(
    story: Story, reads: Reads, bucket: Bucket, mapped: MappedKeys, source: tuple[int, int]
) -> tuple[dict[str, object], list[str]]:
    """Return the figures and the failed checks for a source of so many rows and streams."""
    rows, streams = source
    gone = bucket.before - bucket.after
    checks = {
        "every row was read back after compaction": reads.rows == rows,
        "every row still reads after reconciliation": reads.rows_again == rows,
        "rows were read while objects were compacted": reads.rows_beside > 0,
        f"they equalled the source: {reads.failure_beside}": not reads.failure_beside,
        "compaction left one object for each broker": len(mapped.live) == len(story.brokers_done),
        "the leader was killed and a write was acknowledged after": story.failover_s > 0,
        f"a broker may not act for another: {story.refusal}": story.refusal == "NOT_YOUR_NODE",
        "the killed broker's uploads were deleted once passed": story.expired_deleted > 0,
        "the sleeping broker left orphans": len(story.orphans) > 0,
        "exactly the orphans were deleted": gone == story.orphans,
        "the bucket has every live object": mapped.live <= bucket.after,
        "the metadata contains all keys except the foreign one": (
            bucket.after - mapped.known == {bucket.foreign_key}
        ),
    }
    failed = [check for check, holds in checks.items() if not holds]
    result: dict[str, object] = {
        "rows": rows,
        "rows_read_back": reads.rows,
        "rows_read_during_compaction": reads.rows_beside,
        "streams": streams,
        "objects": len(mapped.live),
        "objects_before_compaction": len(story.uploaded),
        "objects_after_compaction": len(mapped.live),
        "compactions_during_upload": story.compactions,
        "commits": story.commits,
        "leader_kills": story.leader_kills,
        "failover_s": story.failover_s,
        "refused_call": story.refusal,
        "expired_deleted": story.expired_deleted,
        "orphans_planted": len(story.orphans),
        "orphans_deleted": len(gone & story.orphans),
        "foreign_kept": int(bucket.foreign_key in bucket.after),
        "live_deleted": len(gone - story.orphans),
        "ok": not failed,
    }
    return result, failed
