"""Values of a deletion: the order to delete candidates of a plan, and each candidate's outcome.

The order is sent to the executors, so it contains no open files or connections.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from streammeta.reconcile.cluster.identity import ClusterIdentity
from streammeta.storage import errors
from streammeta.storage.object_store.protocol.address import StoreAddress
from streammeta.tls.files import CallerFiles

ORPHAN_TAG = {"streammeta-reconcile": "orphan"}
"""Tag of objects that a rule of the bucket will delete."""


class Outcome(enum.StrEnum):
    """Outcome of one candidate."""

    DELETED = "deleted"
    QUARANTINED = "quarantined"  # deleted, with a copy in quarantine
    TAGGED = "tagged"  # tagged for a rule of the bucket to delete
    WOULD_DELETE = "would_delete"  # dry run: --yes would delete it
    KEPT = "kept"  # the metadata still knows it
    AHEAD_OF_METADATA = "ahead_of_map"  # its records are beyond the ends of the metadata's streams
    CHANGED = "changed"  # the key has another object than the plan recorded
    GONE = "gone"  # absent from the bucket
    REFUSED = "refused"  # the plan's key does not match the plan's id
    FAILED = "failed"  # an error; not deleted unless `detail` says that deletion began
    SKIPPED = "skipped"  # not tried, because of an earlier error


@dataclass(frozen=True, slots=True)
class Candidate:
    """A key to delete, as recorded in the plan: size in bytes, Unix ms, etag."""

    key: str
    object_id: int
    size: int
    modified_ms: int
    etag: str


@dataclass(frozen=True, slots=True)
class DeletionOrder:
    """Parameters of every task of a run. `keys_per_s` is a task's share of the rate limit.

    Tasks and driver exchange signals in `signals_folder`, see `run_signals`. The files of `tls` are
    read on the task's machine. `identity`, `next_object_id` and `next_stream_id` come from the
    plan. With `delete` False, nothing is deleted and no undo record is written. `run` has to hold
    the lease during deletions. With `quarantine`, an object is copied to quarantine before its
    deletion. With `tag`, it is tagged and not deleted.
    """

    store: StoreAddress
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
        """Outcome of a completely processed candidate."""
        if self.tag:
            return Outcome.TAGGED
        return Outcome.QUARANTINED if self.quarantine else Outcome.DELETED


@dataclass(frozen=True, slots=True)
class Judged:
    """A candidate and its outcome. `is_busy` is set if the store asked for fewer requests.

    `may_concern_all` is set if a failure's reason is a permission or the store, not this object.
    """

    candidate: Candidate
    outcome: Outcome
    detail: str = ""
    is_busy: bool = False
    may_concern_all: bool = False


def failed(candidate: Candidate, detail: str, error: Exception) -> Judged:
    """Return the outcome for a candidate after an error of the store."""
    is_busy = isinstance(error, errors.StoreUnavailableError) and error.throttled
    may_concern_all = isinstance(
        error, (errors.StoreUnavailableError, errors.AccessDeniedError, errors.BucketNotFoundError)
    )
    return Judged(candidate, Outcome.FAILED, f"{detail}: {error}", is_busy, may_concern_all)
