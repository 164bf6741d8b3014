"""Lease in the bucket: of the runs that delete in one namespace, one at a time goes on.

The lease is a row of terms, each a small object named by its number. A term is created and never
replaced, so that no store needs a compare-and-swap; the creator of the highest has the lease until
the moment that it names, and the highest is never deleted. That moment is by the clock of another
machine: it may refuse a run for `LEASE_MS` at most. Beyond that the observer watches the lease, and
takes it if nobody renews it meanwhile. No deletion is right because of the lease: it keeps two runs
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
from streammeta.storage import json_files
from streammeta.storage.errors import ObjectExistsError, ObjectNotFoundError, StorageError
from streammeta.storage.object_store.protocol.base import ObjectStore

LEASE_MS = 60_000
"""Time after which the lease of a run that no longer renews it may be taken, in milliseconds."""

_RENEWALS = 3
_READS = 5
_LOOKS = 12
_RELEASED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Possession of the lease by a run until `expires_ms`, in ms since 1970; 0: given back.

    `run` tells it from every other run; `machine` and `process` are where it works.
    """

    run: str
    machine: str
    process: int
    expires_ms: int


def new_run(kind: str) -> str:
    """Make the name of a run that begins now: unlike any other, and in the order of time."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return f"{now}-{kind}-{secrets.token_hex(2)}"


def lease_prefix(namespace: str) -> str:
    """Return the prefix under which the terms of a namespace's lease lie."""
    return f"{namespace}/leases/reconcile/"


def is_lease_key(key: str, namespace: str) -> bool:
    """True if a key is that of a term."""
    return re.fullmatch(re.escape(lease_prefix(namespace)) + r"[0-9]{20}\.json", key) is not None


def check_held(store: ObjectStore, namespace: str, run: str) -> None:
    """Raise `LeaseError` unless the newest term is of `run`.

    One that is over counts all the same: nobody else has taken the lease.
    """
    _, newest = _newest(store, namespace)
    if newest is None or newest.run != run:
        holder = "nobody has it" if newest is None else f"run {newest.run} on {newest.machine} does"
        raise LeaseError(
            f"run {run} has not or no longer the lease {lease_prefix(namespace)}, {holder}; apply"
            " the plan again once no other run is at work"
        )


@contextmanager
def held_lease(store: ObjectStore, namespace: str, run: str) -> Iterator[None]:
    """Have `run` hold the lease during the block; a thread renews it.

    Raises:
        LeaseError: another run has it.
        StorageError: the bucket does not take a term.
    """
    lease = Lease(store, namespace, run)
    lease.take()
    is_over = threading.Event()
    renewing = threading.Thread(target=_renew, args=(lease, is_over), daemon=True)
    renewing.start()
    try:
        yield
    finally:
        is_over.set()
        renewing.join()
        lease.release()


def _renew(lease: Lease, is_over: threading.Event) -> None:
    while not is_over.wait(LEASE_MS / 1000 / _RENEWALS):
        # Tasks look at the lease themselves before they delete: a loss needs no other messenger.
        with suppress(StorageError):
            lease.renew()


class Lease:
    """The lease of a namespace, as one run takes, renews and gives it back."""

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
        """Take the lease if it is free, over, or of a process that has ended on this machine.

        Watches the lease for `LEASE_MS` where this machine's clock can't say whether it is over.

        Raises:
            LeaseError: another run has it.
        """
        number, newest = _newest(self._store, self._namespace)
        if newest is not None and newest.expires_ms != _RELEASED and not _has_ended(newest):
            left_ms = newest.expires_ms - self._now_ms()
            if 0 < left_ms <= LEASE_MS:
                raise _held_error(newest, left_ms)
            number = self._watch(number)
        self._create(number + 1, self._now_ms() + LEASE_MS)

    def _watch(self, number: int) -> int:
        """Return the highest term once nobody has renewed it for `LEASE_MS`, or once it is free.

        The time is measured by this machine's timer.

        Raises:
            LeaseError: another run has renewed or taken it.
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
        """Begin the next term. Raises `LeaseError` if another run has the lease."""
        check_held(self._store, self._namespace, self._run)
        self._create(self._number + 1, self._now_ms() + LEASE_MS)

    def release(self) -> None:
        """Give the lease back, if it is still this run's; a bucket that fails lets it run out."""
        with suppress(StorageError):
            check_held(self._store, self._namespace, self._run)
            self._create(self._number + 1, _RELEASED)

    def _create(self, number: int, expires_ms: int) -> None:
        term = Term(
            run=self._run, machine=socket.gethostname(), process=os.getpid(), expires_ms=expires_ms
        )
        # A term of this number that was deleted, with a higher one after it, would not be refused
        # by the store: the second look finds the higher one.
        with suppress(ObjectExistsError):
            self._store.put(
                _term_key(self._namespace, number), json_files.encode(term), if_absent=True
            )
        check_held(self._store, self._namespace, self._run)
        self._number = number
        older = [key for key in _term_keys(self._store, self._namespace) if _number(key) < number]
        self._store.delete_many(older)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def _held_error(term: Term, left_ms: int) -> LeaseError:
    return LeaseError(
        f"run {term.run} of process {term.process} on {term.machine} deletes in this"
        f" bucket; wait for its end, or {left_ms // 1000 + 1} s if it was killed"
    )


def _newest(store: ObjectStore, namespace: str) -> tuple[int, Term | None]:
    """The highest term and its number; 0 and None before the first.

    Raises:
        LeaseError: it changes all the time.
        CorruptObjectError: it is none that this version can read.
    """
    for _ in range(_READS):
        keys = _term_keys(store, namespace)
        if not keys:
            return 0, None
        with suppress(ObjectNotFoundError):  # the next term has just replaced it
            data = store.get_range(keys[-1])
            return _number(keys[-1]), json_files.decode(Term, keys[-1], data)
    raise LeaseError(
        f"the lease {lease_prefix(namespace)} changes faster than it can be read; wait for the end"
        " of the other run"
    )


def _term_keys(store: ObjectStore, namespace: str) -> list[str]:
    listed = (info.key for info in store.list_objects(lease_prefix(namespace)))
    return sorted(key for key in listed if is_lease_key(key, namespace))


def _term_key(namespace: str, number: int) -> str:
    return f"{lease_prefix(namespace)}{number:020}.json"


def _number(key: str) -> int:
    return int(key[-25:-5])


def _has_ended(term: Term) -> bool:
    if term.machine != socket.gethostname():
        return False
    try:
        os.kill(term.process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
