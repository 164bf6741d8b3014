"""Ownership of the bucket and claims of object ids, both settled before an id is issued.

In each term a leader agrees on the cluster's UUID in the log, creates or checks the marker in the
bucket, and runs `claim_round`. Only then are object ids issued and bytes deleted. Commits only wait
for the lease on the marker, which `marker_watch` renews. Failed bucket calls are retried. A state
that only an operator can correct is checked again from time to time. See `storage.bucket_marker`
for the objects.

`claim_round` is the protocol as steps without I/O. A round yields its next step and is sent the
result, and the caller may stop after any step. The order makes it safe: a bound is committed in the
log before it is claimed in the bucket, and ids below it are issued only after that. The claims in
the bucket therefore never exceed the committed log while all leaders share one log, even with late
puts of deposed leaders. Metadata restored from before the last claim is below it.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

import structlog

from streammeta.controller import errors
from streammeta.controller.lifecycle.marker_watch import RECHECK_MS, MarkerWatch
from streammeta.controller.lifecycle.tasks import LeaderTask, TermOverError
from streammeta.controller.metadata.api.answers import ClaimBucketAnswer
from streammeta.controller.metadata.api.requests import ClaimBucket
from streammeta.controller.runtime.clock import Clock
from streammeta.controller.runtime.writer.bucket_permits import ObjectIdGate
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.storage import errors as storage_errors
from streammeta.storage.cluster_files import bucket_marker
from streammeta.storage.object_store.protocol.base import ObjectStore

_log = structlog.get_logger(component="lifecycle")

# Large enough that a busy cluster claims rarely, and far below the 2^63 ids there are.
CLAIM_STEP = 1_000_000
"""Number of object ids claimed ahead of the issued ones."""

_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ReadClaims:
    """Read the highest bound claimed in the bucket."""


@dataclass(frozen=True, slots=True)
class ProveLeadership:
    """Prove that this node leads now and that its metadata is committed."""


@dataclass(frozen=True, slots=True)
class CommitBound:
    """Commit in the log that ids below the bound may be issued."""

    issued_below: int


@dataclass(frozen=True, slots=True)
class PutClaim:
    """Create the claim of the bound in the bucket."""

    issued_below: int


Step: TypeAlias = ReadClaims | ProveLeadership | CommitBound | PutClaim


@dataclass(frozen=True, slots=True)
class Issued:
    """The leader's metadata: the next id to issue, and the bound of issuable ids."""

    next_object_id: int
    issued_below: int


def claim_round(read_metadata: Callable[[], Issued]) -> Generator[Step, Any, int]:
    """Claim a new bound and return it. Ids below it may be issued from then on.

    Raises:
        MetadataOlderThanBucketError: the bucket has a claim that is missing in the committed log.
    """
    claimed = yield ReadClaims()
    if claimed > read_metadata().issued_below:
        # A leader that has not noticed its end sees the claims of its successor.
        yield ProveLeadership()
        issued_below = read_metadata().issued_below
        if claimed > issued_below:
            raise errors.MetadataOlderThanBucketError(issued_below, claimed)
    bound = next_bound(read_metadata())
    # The log first: a claim in the bucket must never exceed the committed bound.
    yield CommitBound(bound)
    yield PutClaim(bound)
    return bound


def next_bound(issued: Issued) -> int:
    """Return the bound to claim: one step ahead, and above every committed bound."""
    # Above every committed bound, so that no claim is ever repeated.
    return min(_INT64_MAX, max(issued.next_object_id + CLAIM_STEP, issued.issued_below + 1))


CLAIM_AGE_MS_MAX = 10_000
"""Age in milliseconds at which a claim is renewed if the metadata has changed since. It limits the
changes that restored metadata can miss without being detected as older than the bucket. Such
metadata would issue ids again, and would let committed uploads expire and be deleted."""


CHECK_INTERVAL_MS_MAX = 1_000
"""Longest wait in milliseconds until due checks and claims begin, whatever the configured interval
of expiry and deletion is: a lease and a claim both need them within seconds."""


@dataclass(slots=True, eq=False)
class _Term:
    """State of the bucket as the leader knows it in one term."""

    cluster_uuid: str = ""
    is_marked: bool = False
    is_safe: bool = False
    claimed_at_ms: int = 0
    claimed_at_offset: int = 0
    """End of the log at the last claim. The claim does not cover later entries."""
    written_to: int = 0
    """End of the log after this task's last entry."""
    is_claim_wanted: bool = True
    refused: str = ""
    retry_at_ms: int = 0


class BucketClaims(LeaderTask[_Term]):
    """The leader's task that checks the bucket and controls the gate of object ids."""

    def __init__(
        self,
        controller: MetadataController,
        store: ObjectStore,
        gate: ObjectIdGate,
        clock: Clock,
        *,
        cluster_id: str,
        node_id: int,
        namespace: str,
        interval_ms: int,
    ) -> None:
        self._controller = controller
        self._store = store
        self._gate = gate
        self._clock = clock
        self._cluster_id = cluster_id
        self._node_id = node_id
        self._namespace = namespace
        self._interval_ms = min(interval_ms, CHECK_INTERVAL_MS_MAX)
        self._watch = MarkerWatch(
            store,
            controller.lease,
            lambda: controller.cluster_metadata.bucket_claim,
            clock.wall_ms,
            cluster_id=cluster_id,
            namespace=namespace,
            interval_ms=self._interval_ms,
            on_refusal=gate.wanted.set,
        )

        controller.on_leadership(self._on_leadership)

    @property
    def may_delete(self) -> bool:
        """Whether this node leads, owns the bucket, and has metadata that is not older than it."""
        term = self._term
        return term is not None and term.is_safe and self._controller.lease.is_held

    def is_undecided(self, object_id: int) -> bool:
        """Whether an unknown object may be from before a restore."""
        return any(start <= object_id < end for start, end in self._watch.undecided)

    @property
    def cluster_uuid(self) -> str:
        """The cluster's committed UUID, empty if it is not agreed on or not known here yet."""
        if self._term is not None:
            return self._term.cluster_uuid
        return self._controller.cluster_metadata.bucket_claim.cluster_uuid

    @property
    def problem(self) -> str:
        """Reason why this leader issues no object ids or acknowledges no changes.

        Empty if it does both, or does not lead.
        """
        if self._term is None:
            return ""
        ids_problem = self._gate.problem(self._controller.cluster_metadata.next_object_id)
        return ids_problem or self._controller.lease.problem

    def claim_soon(self) -> None:
        """Make a new claim soon: a snapshot was copied, and restoring it must be detectable."""
        if self._term is not None:
            self._term.is_claim_wanted = True
            self._gate.wanted.set()

    async def run(self) -> None:
        """Check the markers, also after each election, and claim ids when due, until cancelled."""
        # Together, so that no claim is made by a process that no longer watches the marker.
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch.run())
            await self._claim_when_due()

    async def _claim_when_due(self) -> None:
        while True:
            self._gate.wanted.clear()
            if self._term is not None:
                await self._work(self._term)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_ms / 1000):
                    await self._gate.wanted.wait()

    def _on_leadership(self, leads: bool) -> None:
        self._term = _Term() if leads else None
        why = "a new leader has just been elected" if leads else "leadership was lost"
        self._gate.close(errors.ObjectIdsNotReadyError(why), is_final=not leads)
        self._gate.wanted.set()

    # -- one check

    async def _work(self, term: _Term) -> None:
        if self._clock.monotonic_ms() < term.retry_at_ms:
            return

        try:
            if not term.is_marked:
                await self._check_marker(term)
            self._require_ownership()
            if self._is_claim_due(term):
                await self._claim(term)
        # The next leader checks for itself.
        except TermOverError:
            return
        except (storage_errors.WrongBucketError, storage_errors.CorruptObjectError) as error:
            self._refuse(term, errors.BucketRejectedError(str(error)))
        except errors.MetadataOlderThanBucketError as error:
            self._refuse(term, error)
        except errors.SupersededError as error:
            self._refuse(term, error)
        except (errors.ApiError, storage_errors.StorageError) as error:
            # A deposed leader must not close the gate of its own next term.
            if self._term is term:
                self._postpone(term, error)

    def _require_ownership(self) -> None:
        """Require that no check has found another cluster restored over this one.

        Raises:
            SupersededError: a check has found one.
        """
        if isinstance(refusal := self._controller.lease.refusal, errors.SupersededError):
            raise refusal

    async def _check_marker(self, term: _Term) -> None:
        answer = await self._write(
            term, ClaimBucket(cluster_uuid=str(uuid.uuid4()), issued_below=0)
        )
        term.cluster_uuid = answer.cluster_uuid
        await self._look(term)
        marker = bucket_marker.BucketMarker(
            cluster_id=self._cluster_id,
            cluster_uuid=answer.cluster_uuid,
            namespace=self._namespace,
            created_ms=self._clock.wall_ms(),
        )
        if answer.issued_below:
            # Ids were claimed before, and the marker had existed before that.
            found = await self._call(
                term, lambda store: bucket_marker.read_marker(store, self._namespace)
            )
        else:
            found = await self._call(term, lambda store: bucket_marker.create_marker(store, marker))

        bucket_marker.check_marker(
            found,
            cluster_id=self._cluster_id,
            cluster_uuid=answer.cluster_uuid,
            namespace=self._namespace,
        )
        term.is_marked = True
        if not self._controller.lease.is_held:
            self._watch.check_soon()  # the previous check may have found no marker yet
        _log.info("bucket_checked", namespace=self._namespace, cluster_uuid=answer.cluster_uuid)

    async def _look(self, term: _Term) -> None:
        """Check the markers in this term, regardless of earlier checks.

        Raises:
            SupersededError: another cluster was restored over this one.
        """
        try:
            with contextlib.suppress(
                errors.FencePendingError
            ):  # ids are claimed before the first lease
                await self._watch.check()
        finally:
            self._require(term)

    def _is_claim_due(self, term: _Term) -> bool:
        next_id = self._controller.cluster_metadata.next_object_id
        # Half a step ahead, so that ids never run out while a slow bucket answers.
        is_short = next_id > self._gate.bound - CLAIM_STEP // 2
        age_ms = self._clock.monotonic_ms() - term.claimed_at_ms
        # An idle cluster makes no claims: a restore would miss nothing.
        is_changed = self._controller.cluster_metadata.applied_end_offset > term.claimed_at_offset
        return term.is_claim_wanted or is_short or (is_changed and age_ms >= CLAIM_AGE_MS_MAX)

    async def _claim(self, term: _Term) -> None:
        # Cleared before the round, so that a wish that arrives during it is not lost.
        term.is_claim_wanted, was_wanted = False, term.is_claim_wanted
        next_id = self._controller.cluster_metadata.next_object_id
        try:
            bound = await self._claim_round(term)
        except Exception:
            term.is_claim_wanted |= was_wanted
            raise
        self._gate.open(bound)
        if term.refused:
            _log.info("bucket_accepted", namespace=self._namespace)
        term.refused = ""
        term.claimed_at_ms = self._clock.monotonic_ms()
        _log.info("object_ids_claimed", next_id=next_id, issued_below=bound)
        # After the new claim, so that the bucket always has one.
        await self._call(
            term, lambda store: bucket_marker.delete_old_claims(store, self._namespace)
        )

    async def _claim_round(self, term: _Term) -> int:
        steps = claim_round(self._issued)
        result: Any = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration as end:
                bound: int = end.value
                return bound
            result = await self._do(term, step)

    def _issued(self) -> Issued:
        cluster_metadata = self._controller.cluster_metadata
        return Issued(cluster_metadata.next_object_id, cluster_metadata.bucket_claim.issued_below)

    async def _do(self, term: _Term, step: Step) -> int | None:
        match step:
            case ReadClaims():
                return await self._call(
                    term, lambda store: bucket_marker.read_claimed(store, self._namespace)
                )
            case ProveLeadership():
                await self._controller.submit(()).committed()
                self._require(term)
            case CommitBound(bound):
                term.is_safe = True  # the round continues only if the metadata is not older
                uuid_ = term.cluster_uuid
                await self._write(term, ClaimBucket(cluster_uuid=uuid_, issued_below=bound))
                term.claimed_at_offset = term.written_to
            case PutClaim(bound):
                await self._put_claim(term, bound)
        return None

    async def _put_claim(self, term: _Term, bound: int) -> None:
        claim = bucket_marker.IdClaim(
            cluster_uuid=term.cluster_uuid,
            issued_below=bound,
            node_id=self._node_id,
            token=uuid.uuid4().hex,
            created_ms=self._clock.wall_ms(),
        )
        try:
            await self._call(
                term, lambda store: bucket_marker.put_claim(store, self._namespace, claim)
            )
        except storage_errors.ObjectExistsError:
            # Each bound is committed once, so another log has produced the same one.
            raise errors.MetadataOlderThanBucketError(bound - 1, bound) from None

    # -- helpers

    async def _write(self, term: _Term, request: ClaimBucket) -> ClaimBucketAnswer:
        # Not by `write`: it waits for the first check, which needs the cluster's UUID.
        submission = self._controller.submit((request,))
        await submission.committed()
        (answer,) = submission.answers
        self._require(term)
        term.written_to = submission.offset
        assert isinstance(answer, ClaimBucketAnswer)
        return answer

    def _refuse(self, term: _Term, refusal: errors.ApiError) -> None:
        term.is_marked = term.is_safe = False
        term.retry_at_ms = self._clock.monotonic_ms() + RECHECK_MS
        self._gate.close(refusal, is_final=True)
        # The check repeats for as long as the operator takes, and one line is enough.
        if term.refused != str(refusal):
            term.refused = str(refusal)
            _log.error("bucket_refused", namespace=self._namespace, reason=str(refusal))

    def _postpone(self, term: _Term, error: errors.ApiError | storage_errors.StorageError) -> None:
        term.retry_at_ms = self._clock.monotonic_ms() + self._interval_ms
        self._gate.fail(str(error))
        _log.warning("object_ids_not_claimed", reason=str(error))
