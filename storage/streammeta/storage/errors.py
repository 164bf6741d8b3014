"""Errors and deviations of stored objects.

Every call on a store or a file format raises one of these errors; no botocore, OSError or struct
error escapes. A message names the object or bucket, what was found, what was wanted, and what to do
next. `StoreUnavailableError` and its subclass `DeadlineExceededError` may be repeated at once.
`AccessDeniedError` may pass too, but by an operator's action: `object_store.patience` has the rule.

A deviation is a breach of the format that AutoMQ's own reader passes over. Objects of other writers
may have a few and still hold every record. Readers are strict unless given a list for deviations;
then those of the kinds below are noted, and everything else stays an error:

- a data block flag other than 0x02, and reserved footer bytes that are not zero;
- a gap in the offsets between two records under one index entry;
- a data block without records, and a composite object without links.
"""

from __future__ import annotations

from dataclasses import dataclass


class StorageError(Exception):
    """The common base: catch it to handle every failure of the storage package.

    `may_pass`: the same call may succeed later although nothing is changed by its caller.
    `retry_after_s` is the wait in seconds that the store asked for; None if it asked for none.
    """

    may_pass: bool = False
    retry_after_s: float | None = None


class CorruptObjectError(StorageError):
    """The bytes of an object break its format.

    `source` is the key or name of the object and `position` the byte position in it where the
    format is broken; `found` is what is there and `expected` what the format wants, both as text.
    `problem` says both in one sentence.
    """

    def __init__(
        self, source: str, position: int, what: str, found: object, expected: object
    ) -> None:
        self.source = source
        self.position = position
        self.found = str(found)
        self.expected = str(expected)
        self.problem = f"{what} is {found}, wanted {expected}"
        super().__init__(
            f"object {source} is corrupt at byte {position}: {self.problem}; keep the object,"
            " compare it with another copy, and do not compact or delete it before it is explained"
        )


class ObjectNotFoundError(StorageError):
    """There is no object with this key."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(
            f"object {key!r} is not in the store; look its stream up again, as compaction replaces"
            " objects, and check that the bucket or path is the right one"
        )


class ObjectExistsError(StorageError):
    """A put that was to create an object found another one under its key, and changed nothing."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(
            f"object {key!r} exists already and was left as it is; read it to learn its creator, or"
            " use another key"
        )


class UploadNotFoundError(StorageError):
    """There is no unfinished multipart upload with this id: it was completed or aborted."""

    def __init__(self, key: str, upload_id: str) -> None:
        self.key = key
        self.upload_id = upload_id
        super().__init__(
            f"multipart upload {upload_id!r} of {key!r} does not exist (completed or aborted);"
            " start a new upload"
        )


class BucketNotFoundError(StorageError):
    """The bucket, or the root directory of a local store, does not exist."""

    def __init__(
        self, bucket: str, advice: str = "create it, or correct the address of the store"
    ) -> None:
        self.bucket = bucket
        super().__init__(f"bucket {bucket!r} does not exist; {advice}")


class AccessDeniedError(StorageError):
    """The store refused the credentials, or they do not allow this operation.

    It may pass: a clock is set right, keys are rotated, a policy is corrected.
    """

    may_pass = True


class RangeNotSatisfiableError(StorageError):
    """The range asked for starts at or behind the end of the object."""

    def __init__(self, key: str, start: int) -> None:
        self.key = key
        self.start = start
        super().__init__(
            f"object {key!r} ends at or before byte {start}, where the range asked for starts;"
            " compare its recorded size with its size in the store"
        )


class ObjectChangedError(StorageError):
    """The key holds another object than the one that was meant; nothing was written."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(
            f"object {key!r} is not the one that was meant: it was replaced meanwhile; look at it"
            " again"
        )


class InvalidKeyError(StorageError):
    """The key can't be stored here, whatever the data; nothing was read or written."""

    def __init__(self, key: str, problem: str) -> None:
        self.key = key
        super().__init__(f"key {key!r} is refused: {problem}; use another key")


class StoreRejectedError(StorageError):
    """The store understood the request and will never accept it."""


class StoreUnavailableError(StorageError):
    """The store did not answer, or can't serve now; the call is retriable.

    The call may have taken effect. `throttled`: the store asked for fewer requests;
    `retry_after_s`: the wait in seconds that it asked for.
    """

    may_pass = True

    def __init__(
        self, message: str, *, throttled: bool = False, retry_after_s: float | None = None
    ) -> None:
        self.throttled = throttled
        self.retry_after_s = retry_after_s
        super().__init__(message)


class DeadlineExceededError(StoreUnavailableError):
    """The deadline of the call has passed, retries and waiting included.

    Its cause, if there is one, is the failure of the last attempt.
    """


class MissingPackageError(StorageError):
    """An optional package is not installed; `extra` of this distribution brings it."""

    def __init__(self, purpose: str, package: str, extra: str, command: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed; install"
            f" streammeta[{extra}]: {command}"
        )


class WrongBucketError(StorageError):
    """The namespace of the bucket does not belong to the cluster that was to use it.

    `found` says whose it is and `expected` whose it had to be, both as text.
    """

    def __init__(self, namespace: str, found: str, expected: str) -> None:
        self.namespace = namespace
        self.found = found
        self.expected = expected
        super().__init__(
            f"namespace {namespace!r} of the bucket is not that of {expected}: {found}; nothing was"
            " written or deleted; name the bucket and namespace that the cluster's controllers"
            " were started with (`streammeta shell -- cat /cluster` names the namespace)"
        )


@dataclass(frozen=True, slots=True)
class Deviation:
    """One deviation: its byte position in the object, what is there and what the format wants."""

    position: int
    what: str
    found: str
    expected: str

    @property
    def problem(self) -> str:
        """Found and wanted, in one sentence."""
        return f"{self.what} is {self.found}, wanted {self.expected}"


@dataclass(frozen=True, slots=True)
class Source:
    """Provenance of bytes that are decoded: the object's `name`, and their position in it.

    `origin` is the byte position in the object of the first byte that the decoder is given.
    `noted` collects deviations; without it, they are refused.
    """

    name: str
    origin: int = 0
    noted: list[Deviation] | None = None

    def corrupt(self, at: int, what: str, found: object, expected: object) -> CorruptObjectError:
        """Return the error for what is found `at` bytes behind the origin."""
        return CorruptObjectError(self.name, self.origin + at, what, found, expected)

    def deviate(
        self, at: int, what: str, found: object, expected: object, *, is_allowed: bool = True
    ) -> None:
        """Note a deviation `at` bytes behind the origin.

        Raises `CorruptObjectError` with the same content if deviations are refused, or this one is
        not allowed.
        """
        if self.noted is None or not is_allowed:
            raise self.corrupt(at, what, found, expected)
        self.noted.append(Deviation(self.origin + at, what, str(found), str(expected)))


UNNAMED = Source("in memory")
"""The source of bytes that are of no stored object."""


class PayloadError(StorageError):
    """A payload is of another kind than it was decoded as, or is damaged.

    `position` is the byte position in the payload, `found` and `expected` say what is wrong there.
    """

    def __init__(self, position: int, what: str, found: object, expected: object) -> None:
        self.position = position
        self.found = str(found)
        self.expected = str(expected)
        super().__init__(f"{what} at byte {position} is {found}, wanted {expected}")
