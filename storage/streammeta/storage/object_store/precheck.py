"""Precheck of a store: every kind of request once, and a race of conditional puts.

Of any number of concurrent creators of one key exactly one must succeed. No feature list tells:
some servers ignore the condition, others check and store in two steps. Works on any store, under
keys of its own that are deleted at the end; no other key is read, written or listed.
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
from streammeta.storage.object_store.protocol.address import Checksum
from streammeta.storage.object_store.protocol.base import (
    MIN_PART_SIZE,
    MultipartUpload,
    ObjectStore,
)

FOLDER = "streammeta-precheck"
CREATORS = 16
ROUNDS = 6
STEP_S = 30.0

_TEXT = b"streammeta writes this object to see whether it can, and deletes it again\n"
_RACE = "Create an object once"


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step: `reason` says why it failed, empty if it did not."""

    name: str
    reason: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether the step succeeded."""
        return not self.reason


@dataclass(frozen=True, slots=True)
class PrecheckReport:
    """Result of a precheck: the steps in order, and what could not be deleted, with the reason.

    `enforced` are the checksums by which the server refuses damaged bytes; None: it has no say.
    """

    steps: tuple[StepOutcome, ...]
    enforced: tuple[Checksum, ...] | None
    left_behind: str

    @property
    def failures(self) -> tuple[StepOutcome, ...]:
        """The steps that failed; a store without any is suitable."""
        return tuple(step for step in self.steps if not step.is_ok)


@runtime_checkable
class ChecksumProbe(Protocol):
    """A store whose server may or may not verify checksums."""

    def enforces_checksum(self, key: str, checksum: Checksum) -> bool:
        """See `S3ObjectStore.enforces_checksum`."""
        ...


def run_precheck(
    store: ObjectStore,
    on_step: Callable[[StepOutcome], None] = lambda _: None,
    *,
    step_s: float = STEP_S,
) -> PrecheckReport:
    """Try everything, one step after the other, each for at most `step_s` seconds.

    `on_step` is called after each step. Failures of the store are in the report and not raised.
    """
    check = _Precheck(store, step_s)
    steps: list[StepOutcome] = []
    left_behind = ""
    enforced = None
    try:
        for name, run in check.steps():
            outcome = _outcome(name, run)
            steps.append(outcome)
            on_step(outcome)
        if all(step.is_ok for step in steps):
            enforced = check.enforced_checksums()
    finally:
        left_behind = check.clean_up()
    return PrecheckReport(tuple(steps), enforced, left_behind)


class _FailedError(Exception):
    """A step failed; the message is the reason."""


def _outcome(name: str, run: Callable[[], None]) -> StepOutcome:
    try:
        run()
    except (StorageError, _FailedError) as error:
        return StepOutcome(name, str(error))
    return StepOutcome(name)


@dataclass(slots=True)
class _Precheck:
    store: ObjectStore
    step_s: float
    _prefix: str = field(default_factory=lambda: f"{FOLDER}/{uuid.uuid4().hex}")
    _begun: list[str] = field(default_factory=list)
    _written: set[str] = field(default_factory=set)
    _unfinished: MultipartUpload | None = None

    def steps(self) -> tuple[tuple[str, Callable[[], None]], ...]:
        """Return the steps and their names, in order."""
        plain, source, joined = "object", "source", "multipart"
        body = MIN_PART_SIZE * b"m" + _TEXT
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
        """Return the checksums that the server enforces; None if the store has no server."""
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
            return None  # neither taken nor refused; nothing depends on it

    def clean_up(self) -> str:
        """Delete all that may have been written; return what may be left, and why."""
        try:
            if self._unfinished is not None:
                self._now.abort_multipart(self._unfinished)
            failed = self._now.delete_many(self._begun).failed if self._begun else {}
        except StorageError as error:
            return f"objects below {self._prefix}/ may be left: {error}"
        return "; ".join(f"{key} is left: {why}" for key, why in failed.items())

    @property
    def _now(self) -> ObjectStore:
        return self.store.until(time.monotonic() + self.step_s)

    def _key(self, name: str) -> str:
        key = f"{self._prefix}/{name}"
        self._begun.append(key)
        return key

    def _wants(self, name: str) -> str:
        if name not in self._written:
            raise _FailedError("not tried: an earlier step did not write the object it needs")
        return f"{self._prefix}/{name}"

    def _write(self, name: str) -> None:
        self._now.put(self._key(name), _TEXT)
        self._written.add(name)

    def _read(self, name: str, body: bytes) -> None:
        key = self._wants(name)
        store = self._now
        _expect(key, store.get_range(key), body)
        middle = (len(body) - len(_TEXT) // 2, len(body) + 10)
        _expect(key, store.get_range(key, *middle), body[slice(*middle)])

    def _delete(self, name: str) -> None:
        key = self._wants(name)
        store = self._now
        for failed, why in store.delete_many([key]).failed.items():
            raise _FailedError(f"{failed} was not deleted: {why}")
        try:
            store.head(key)
        except ObjectNotFoundError:
            return
        raise _FailedError(f"{key} is still there after its deletion was confirmed")

    def _upload(self, name: str, source: str) -> None:
        """Make an object of one part that is sent and one that is copied."""
        source_key = self._wants(source)
        store = self._now
        self._unfinished = store.start_multipart(self._key(name))
        parts = [
            store.upload_part(self._unfinished, 1, MIN_PART_SIZE * b"m"),
            store.copy_part(self._unfinished, 2, source_key, 0, len(_TEXT)),
        ]
        store.complete_multipart(self._unfinished, parts)
        self._unfinished = None
        self._written.add(name)

    def _race(self) -> None:
        self._wants("object")
        for number in range(ROUNDS):
            self._one_race(self._key(f"race-{number}"))

    def _one_race(self, key: str) -> None:
        store = self._now
        start = threading.Barrier(CREATORS)

        def create(creator: int) -> bool:
            start.wait(self.step_s)
            try:
                store.put(key, _named(creator), if_absent=True)
            except ObjectExistsError:
                return False
            return True

        with ThreadPoolExecutor(CREATORS) as pool:
            created = list(pool.map(create, range(CREATORS)))
        if created.count(True) != 1:
            raise _FailedError(
                f"{created.count(True)} of {CREATORS} concurrent creators of one object succeeded,"
                " wanted 1: this server does not check and store in one step (If-None-Match), so"
                " one node would overwrite the object of another; use another server"
            )
        _expect(key, store.get_range(key), _named(created.index(True)))
        try:
            store.put(key, _named(CREATORS), if_absent=True)
        except ObjectExistsError:
            return
        raise _FailedError(
            "an object that was there already was created again: this server ignores the condition"
            " of a put (If-None-Match); use another server"
        )


def _named(creator: int) -> bytes:
    return b"made by creator %d\n" % creator


def _expect(key: str, got: bytes, wanted: bytes) -> None:
    if got != wanted:
        raise _FailedError(
            f"{key} has other bytes than were written: {len(got)} of them instead of"
            f" {len(wanted)}, the first difference at byte {_first_difference(got, wanted)}"
        )


def _first_difference(one: bytes, other: bytes) -> int:
    lengths = range(min(len(one), len(other)) + 1)
    return bisect.bisect_left(lengths, True, key=lambda n: one[:n] != other[:n]) - 1
