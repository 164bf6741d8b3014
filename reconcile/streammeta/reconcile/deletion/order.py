"""Order to delete candidates of a plan, and what became of each of them: values alone.

Sent to wherever a task runs, so nothing here is open or connected.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from streammeta.reconcile.cluster.identity import ClusterIdentity
from streammeta.storage.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    StoreUnavailableError,
)
from streammeta.tls.files import CallerFiles

ORPHAN_TAG = {"streammeta-reconcile": "orphan"}
"""Tag of objects that a rule of the bucket is to delete."""


class Outcome(enum.StrEnum):
    """Outcome of one candidate."""

    DELETED = "deleted"
    QUARANTINED = "quarantined"  # deleted, with a copy in quarantine
    TAGGED = "tagged"  # still there, for a rule of the bucket to delete
    WOULD_DELETE = "would_delete"  # a dry run; with --yes it would be gone
    KEPT = "kept"  # the map still knows it
    AHEAD_OF_MAP = "ahead_of_map"  # it has records that the map's streams have not reached
    CHANGED = "changed"  # the key holds another object than the plan recorded
    GONE = "gone"  # absent from the bucket
    REFUSED = "refused"  # the plan's key is not the key of the plan's id
    FAILED = "failed"  # an error; not deleted unless `detail` says that deleting began
    SKIPPED = "skipped"  # not tried, because of an error before


@dataclass(frozen=True, slots=True)
class Candidate:
    """A key to delete, as recorded in the plan: bytes, Unix ms, the store's etag."""

    key: str
    object_id: int
    size: int
    modified_ms: int
    etag: str


@dataclass(frozen=True, slots=True)
class DeletionOrder:
    """Parameters of every task of a run. `keys_per_s` is one task's share of the rate limit.

    In `signals_folder` tasks and driver tell each other what concerns all; see `run_signals`.

    The files of `tls` are read where the task runs. `identity`, `next_object_id` and
    `next_stream_id` are those of the plan. With `delete` False nothing is deleted and no undo
    record is written. `run` is the one that has to hold the lease when something is deleted. With
    `quarantine` an object is copied to quarantine before it is deleted; with `tag` it is tagged,
    and not deleted.
    """

    store: str
    connect: tuple[str, ...]
    patience_s: float
    identity: ClusterIdentity
    next_object_id: int
    next_stream_id: int
    undo_folder: str
    audit_folder: str
    signals_folder: str
    keys_per_s: float
    delete: bool
    run: str
    tls: CallerFiles | None = None
    quarantine: bool = False
    tag: bool = False

    @property
    def done(self) -> Outcome:
        """Outcome of a candidate to which all was done."""
        if self.tag:
            return Outcome.TAGGED
        return Outcome.QUARANTINED if self.quarantine else Outcome.DELETED


@dataclass(frozen=True, slots=True)
class Judged:
    """A candidate and its outcome; `is_busy` if the store asked for fewer requests.

    `may_concern_all`: the reason of a failure is a right or the store itself, not this object.
    """

    candidate: Candidate
    outcome: Outcome
    detail: str = ""
    is_busy: bool = False
    may_concern_all: bool = False


def failed(candidate: Candidate, detail: str, error: Exception) -> Judged:
    """Return the outcome of a candidate for which the store raised an error."""
    is_busy = isinstance(error, StoreUnavailableError) and error.throttled
    may_concern_all = isinstance(
        error, (StoreUnavailableError, AccessDeniedError, BucketNotFoundError)
    )
    return Judged(candidate, Outcome.FAILED, f"{detail}: {error}", is_busy, may_concern_all)
