"""Lease in the bucket: at most one run at a time deletes in a namespace.

The lease is a sequence of terms, small objects named by their numbers. A term is created and never
replaced, so no store needs compare-and-swap. The creator of the highest term has the lease until
the term's expiry, and the highest term is never deleted. The expiry is by another machine's clock,
so it can keep a run out for at most `LEASE_MS`. After that an observer watches the lease, and takes
it if no run renews it. The safety of deletions does not depend on the lease. It only keeps two runs
from doing the same work.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from streammeta.reconcile.vocabulary.errors import LeaseError
from streammeta.storage import errors, json_files
from streammeta.storage.object_store.protocol.base import ObjectStore

LEASE_MS = 60_000
"""Time without a renewal after which another run may take the lease, in milliseconds."""

# Two renewals may fail before the lease can expire.
_RENEWALS = 3
# Each failed read means that a term was replaced within milliseconds.
_READS = 5
# Frequent enough to see a release early, at the cost of one listing in 5 s.
_LOOKS = 12
_RELEASED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A run's term of the lease until `expires_ms`, in ms since 1970, or 0 after its release.

    `run` is unique. `machine` and `process` identify the process of the run.
    """

    run: str
    machine: str
    process: int
    expires_ms: int


def new_run(kind: str) -> str:
    """Return a unique name for a run that begins now. Names sort by time."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return f"{now}-{kind}-{secrets.token_hex(2)}"


def lease_prefix(namespace: str) -> str:
    """Return the key prefix of the terms of a namespace's lease."""
    return f"{namespace}/leases/reconcile/"


def is_lease_key(key: str, namespace: str) -> bool:
    """Return whether a key belongs to a term."""
    return re.fullmatch(re.escape(lease_prefix(namespace)) + r"[0-9]{20}\.json", key) is not None


def check_held(store: ObjectStore, namespace: str, run: str) -> None:
    """Raise `LeaseError` unless the newest term belongs to `run`.

    An expired term counts too, because no other run has taken the lease.
    """
    _, newest = _newest(store, namespace)
    if newest is None or newest.run != run:
        holder = "nobody has it" if newest is None else f"run {newest.run} on {newest.machine} does"
        raise LeaseError(
            f"run {run} does not have the lease {lease_prefix(namespace)}, {holder}. Apply the plan"
            " again after the end of any other run"
        )


@contextmanager
def held_lease(store: ObjectStore, namespace: str, run: str) -> Iterator[None]:
    """Hold the lease for `run` during the block, renewed by a thread.

    Raises:
        LeaseError: another run has the lease.
        StorageError: the bucket rejects a term.
    """
    lease = Lease(store, namespace, run)
    # Before the thread: an error of the first term belongs to the caller.
    lease.take()
    is_over = threading.Event()
    renewing = threading.Thread(target=_renew, args=(lease, is_over), daemon=True)
    renewing.start()
    try:
        yield
    finally:
        is_over.set()
        # A renewal after the release would take the lease again for nobody.
        renewing.join()
        lease.release()


def _renew(lease: Lease, is_over: threading.Event) -> None:
    while not is_over.wait(LEASE_MS / 1000 / _RENEWALS):
        # Tasks check the lease themselves before they delete, so a failure needs no report here.
        with suppress(errors.StorageError):
            lease.renew()


class Lease:
    """Lease of a namespace for a run: take, renew and release it."""

    def __init__(
        self,
        store: ObjectStore,
        namespace: str,
        run: str,
        clock: Callable[[], float] = time.time,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._wait = wait
        self._store = store
        self._namespace = namespace
        self._run = run
        self._clock = clock
        self._number = 0

    def take(self) -> None:
        """Take the lease if it is free, expired, or held by a dead process of this machine.

        Watches the lease for `LEASE_MS` if this machine's clock can't decide whether it has
        expired.

        Raises:
            LeaseError: another run has the lease.
        """
        number, newest = _newest(self._store, self._namespace)
        if newest is not None and newest.expires_ms != _RELEASED and not _has_ended(newest):
            # An expiry in the past or too far in the future may come from a wrong clock.
            left_ms = newest.expires_ms - self._now_ms()
            if 0 < left_ms <= LEASE_MS:
                raise _held_error(newest, left_ms)
            number = self._watch(number)
        self._create(number + 1, self._now_ms() + LEASE_MS)

    def _watch(self, number: int) -> int:
        """Return the highest term after `LEASE_MS` without a renewal, or as soon as it is free.

        This machine's timer measures the time.

        Raises:
            LeaseError: another run renewed or took the lease.
        """
        for _ in range(_LOOKS):
            self._wait(LEASE_MS / 1000 / _LOOKS)
            found, newest = _newest(self._store, self._namespace)
            if newest is None or newest.expires_ms == _RELEASED:
                return found
            if found != number:
                raise _held_error(newest, LEASE_MS)
        return number

    def renew(self) -> None:
        """Start the next term. Raises `LeaseError` if another run has the lease."""
        check_held(self._store, self._namespace, self._run)
        self._create(self._number + 1, self._now_ms() + LEASE_MS)

    def release(self) -> None:
        """Release the lease if this run still has it. If the bucket fails, the lease expires."""
        with suppress(errors.StorageError):
            check_held(self._store, self._namespace, self._run)
            self._create(self._number + 1, _RELEASED)

    def _create(self, number: int, expires_ms: int) -> None:
        term = Term(
            run=self._run, machine=socket.gethostname(), process=os.getpid(), expires_ms=expires_ms
        )
        # If a term of this number was deleted, after a higher one, the put succeeds. The check
        # after it finds the higher term.
        with suppress(errors.ObjectExistsError):
            self._store.put(
                _term_key(self._namespace, number), json_files.encode(term), if_absent=True
            )
        check_held(self._store, self._namespace, self._run)
        self._number = number
        # The highest term stays, so numbers never restart and an old process can't win with a
        # reused number.
        older = [key for key in _term_keys(self._store, self._namespace) if _number(key) < number]
        self._store.delete_many(older)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def _held_error(term: Term, left_ms: int) -> LeaseError:
    return LeaseError(
        f"run {term.run} of process {term.process} on {term.machine} deletes in this bucket. Wait"
        f" for its end, or {left_ms // 1000 + 1} s if it was killed"
    )


def _newest(store: ObjectStore, namespace: str) -> tuple[int, Term | None]:
    """Return the number of the highest term and the term, or 0 and None before the first.

    Raises:
        LeaseError: the lease changes too fast to read.
        CorruptObjectError: this version can't read the term.
    """
    for _ in range(_READS):
        keys = _term_keys(store, namespace)
        if not keys:
            return 0, None
        with suppress(errors.ObjectNotFoundError):  # deleted after the start of the next term
            data = store.get_range(keys[-1])
            return _number(keys[-1]), json_files.decode(Term, keys[-1], data)
    raise LeaseError(
        f"lease {lease_prefix(namespace)} changes faster than it can be read. Wait for the end of"
        " the other run"
    )


def _term_keys(store: ObjectStore, namespace: str) -> list[str]:
    listed = (info.key for info in store.list_objects(lease_prefix(namespace)))
    return sorted(key for key in listed if is_lease_key(key, namespace))


def _term_key(namespace: str, number: int) -> str:
    return f"{lease_prefix(namespace)}{number:020}.json"


def _number(key: str) -> int:
    # Keys end with 20 digits and .json, see `is_lease_key`.
    return int(key[-25:-5])


def _has_ended(term: Term) -> bool:
    if term.machine != socket.gethostname():
        return False
    try:
        # Signal 0 only tests for existence. A reused process id keeps the lease until it expires,
        # which is safe.
        os.kill(term.process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
