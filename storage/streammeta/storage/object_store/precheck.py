"""Precheck of a store: every kind of request once, and a race of conditional puts.

Exactly one of any number of concurrent creators of a key must succeed. Only a test can find out,
because some servers ignore the condition, and others check and store in two steps. The precheck
works on any store. It uses unique keys, deletes them at the end, and touches no other key.
"""

from __future__ import annotations

import bisect
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from streammeta.storage.errors import ObjectExistsError, ObjectNotFoundError, StorageError
from streammeta.storage.object_store.protocol import base as protocol
from streammeta.storage.object_store.protocol.address import Checksum

FOLDER = "streammeta-precheck"
# Enough to overlap on a fast server, and below the connections of a default pool.
CREATORS = 16
# A server that checks and stores in two steps may pass one race by luck.
ROUNDS = 6
STEP_S = 30.0

_TEXT = b"streammeta writes this object to see whether it can, and deletes it again\n"
_RACE = "Create an object once"


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Outcome of a step. `reason` is the reason of a failure, empty on success."""

    name: str
    reason: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether the step succeeded."""
        return not self.reason


@dataclass(frozen=True, slots=True)
class PrecheckReport:
    """Result of a precheck: the steps in order, and objects that could not be deleted.

    `enforced` are the checksums by which the server rejects damaged bytes, or None if unknown.
    """

    steps: tuple[StepOutcome, ...]
    enforced: tuple[Checksum, ...] | None
    left_behind: str

    @property
    def failures(self) -> tuple[StepOutcome, ...]:
        """The failed steps. A store without any is suitable."""
        return tuple(step for step in self.steps if not step.is_ok)


@runtime_checkable
class ChecksumProbe(Protocol):
    """A store whose server may or may not verify checksums."""

    def enforces_checksum(self, key: str, checksum: Checksum) -> bool:
        """See `S3ObjectStore.enforces_checksum`."""
        ...


def run_precheck(
    store: protocol.ObjectStore,
    on_step: Callable[[StepOutcome], None] = lambda _: None,
    *,
    step_s: float = STEP_S,
) -> PrecheckReport:
    """Run all steps in order, each for at most `step_s` seconds.

    `on_step` is called after each step. The report contains the failures of the store.
    """
    check = _Precheck(store, step_s)
    steps: list[StepOutcome] = []
    left_behind = ""
    enforced = None
    try:
        # All steps run even after a failure, so that one report shows every problem of the server.
        for name, run in check.steps():
            outcome = _run_step(name, run)
            steps.append(outcome)
            on_step(outcome)
        # Checksums of a server that fails basic steps would only confuse.
        if all(step.is_ok for step in steps):
            enforced = check.enforced_checksums()
    finally:
        # Also after an interrupt. The operator learns which keys may remain in the bucket.
        left_behind = check.clean_up()
    return PrecheckReport(tuple(steps), enforced, left_behind)


class _FailedError(Exception):
    """A step failed. The message is the reason."""


def _run_step(name: str, run: Callable[[], None]) -> StepOutcome:
    try:
        run()
    except (StorageError, _FailedError) as error:
        return StepOutcome(name, str(error))
    return StepOutcome(name)


@dataclass(slots=True)
class _Precheck:
    store: protocol.ObjectStore
    step_s: float
    _prefix: str = field(default_factory=lambda: f"{FOLDER}/{uuid.uuid4().hex}")
    _begun: list[str] = field(default_factory=list)
    _written: set[str] = field(default_factory=set)
    _unfinished: protocol.MultipartUpload | None = None

    def steps(self) -> tuple[tuple[str, Callable[[], None]], ...]:
        """Return names and functions of the steps, in order."""
        plain, source, joined = "object", "source", "multipart"
        body = protocol.MIN_PART_SIZE * b"m" + _TEXT
        return (
            ("Write object", lambda: self._write(plain)),
            ("Read object", lambda: self._read(plain, _TEXT)),
            ("Delete object", lambda: self._delete(plain)),
            ("Write object to copy from", lambda: self._write(source)),
            ("Upload multipart object", lambda: self._upload(joined, source)),
            ("Read multipart object", lambda: self._read(joined, body)),
            ("Delete multipart object", lambda: self._delete(joined)),
            (_RACE, self._race),
        )

    def enforced_checksums(self) -> tuple[Checksum, ...] | None:
        """Return the checksums that the server enforces, or None if the store has no server."""
        probe = self._now
        if not isinstance(probe, ChecksumProbe):
            return None
        try:
            return tuple(
                checksum
                for checksum in Checksum
                if probe.enforces_checksum(self._key(f"checksum-{checksum}"), checksum)
            )
        except StorageError:
            return None  # unknown, and only informative

    def clean_up(self) -> str:
        """Delete all objects that may exist, and return a description of remaining ones."""
        try:
            if self._unfinished is not None:
                self._now.abort_multipart(self._unfinished)
            failed = self._now.delete_many(self._begun).failed if self._begun else {}
        except StorageError as error:
            return f"objects below {self._prefix}/ may remain: {error}"
        return "; ".join(f"{key} remains: {why}" for key, why in failed.items())

    @property
    def _now(self) -> protocol.ObjectStore:
        return self.store.until(time.monotonic() + self.step_s)

    def _key(self, name: str) -> str:
        key = f"{self._prefix}/{name}"
        # Before the request: a put without a response may have created the object.
        self._begun.append(key)
        return key

    def _require(self, name: str) -> str:
        if name not in self._written:
            raise _FailedError("skipped, an earlier step did not write the required object")
        return f"{self._prefix}/{name}"

    def _write(self, name: str) -> None:
        self._now.put(self._key(name), _TEXT)
        self._written.add(name)

    def _read(self, name: str, body: bytes) -> None:
        key = self._require(name)
        store = self._now
        _expect(key, store.get_range(key), body)
        # Past the end on purpose: a server has to shorten the range, not reject it.
        middle = (len(body) - len(_TEXT) // 2, len(body) + 10)
        _expect(key, store.get_range(key, *middle), body[slice(*middle)])

    def _delete(self, name: str) -> None:
        key = self._require(name)
        store = self._now
        for failed, why in store.delete_many([key]).failed.items():
            raise _FailedError(f"{failed} was not deleted: {why}")
        try:
            store.head(key)
        except ObjectNotFoundError:
            return
        raise _FailedError(f"{key} still exists after the store confirmed its deletion")

    def _upload(self, name: str, source: str) -> None:
        """Create an object from a sent and a copied part."""
        source_key = self._require(source)
        store = self._now
        self._unfinished = store.start_multipart(self._key(name))
        parts = [
            store.upload_part(self._unfinished, 1, protocol.MIN_PART_SIZE * b"m"),
            # Compaction copies blocks this way, and some servers do not implement it.
            store.copy_part(self._unfinished, 2, source_key, 0, len(_TEXT)),
        ]
        store.complete_multipart(self._unfinished, parts)
        self._unfinished = None
        self._written.add(name)

    def _race(self) -> None:
        self._require("object")
        for number in range(ROUNDS):
            self._race_for(self._key(f"race-{number}"))

    def _race_for(self, key: str) -> None:
        store = self._now
        start = threading.Barrier(CREATORS)

        def create(creator: int) -> bool:
            start.wait(self.step_s)  # all creators send their put at the same time
            try:
                store.put(key, _content_of(creator), if_absent=True)
            except ObjectExistsError:
                return False
            return True

        with ThreadPoolExecutor(CREATORS) as pool:
            created = list(pool.map(create, range(CREATORS)))
        if created.count(True) != 1:
            raise _FailedError(
                f"{created.count(True)} of {CREATORS} concurrent creators of an object succeeded,"
                " expected 1. Use another server: this one does not check and store atomically"
                " (If-None-Match), so a node would overwrite another node's object"
            )
        # The winner's bytes must be stored: a server may confirm one put and keep another.
        _expect(key, store.get_range(key), _content_of(created.index(True)))
        try:
            store.put(key, _content_of(CREATORS), if_absent=True)
        except ObjectExistsError:
            return
        raise _FailedError(
            "an existing object was created again. Use another server: this one ignores the"
            " condition of a put (If-None-Match)"
        )


def _content_of(creator: int) -> bytes:
    return b"created by creator %d\n" % creator


def _expect(key: str, got: bytes, wanted: bytes) -> None:
    if got != wanted:
        raise _FailedError(
            f"{key} differs from the written bytes: {len(got)} bytes instead of"
            f" {len(wanted)}, first difference at byte {_first_difference(got, wanted)}"
        )


def _first_difference(got: bytes, wanted: bytes) -> int:
    # Bisection over prefixes, because bytes have no method for a common prefix.
    lengths = range(min(len(got), len(wanted)) + 1)
    return bisect.bisect_left(lengths, True, key=lambda n: got[:n] != wanted[:n]) - 1
