"""Errors and deviations of stored objects.

Every call on a store or a file format raises one of these errors. No botocore, OSError or struct
error escapes. A message names the object or bucket, the problem and the next step. A caller may
retry `StoreUnavailableError` and its subclass `DeadlineExceededError` at once. `AccessDeniedError`
may pass too, after an operator's action (see `object_store.patience`).

A deviation is a breach of the format that AutoMQ's own reader ignores. Objects of other writers may
have a few and still contain every record. Readers are strict unless the caller passes a list for
deviations. They then add the following kinds to the list, and everything else stays an error:

- a data block flag other than 0x02, and reserved footer bytes that are not zero,
- a gap in the offsets between two records under one index entry,
- a data block without records, and a composite object without links.
"""

from __future__ import annotations

from dataclasses import dataclass


class StorageError(Exception):
    """Base class of every failure of the storage package.

    `may_pass` says whether the same call may succeed later without a change by its caller.
    `retry_after_s` is the wait in seconds that the store asked for, or None.
    """

    may_pass: bool = False
    retry_after_s: float | None = None


class CorruptObjectError(StorageError):
    """The bytes of an object break its format.

    `source` is the key or name of the object, and `position` the byte position of the fault.
    `what` names the faulty part, `found` is the actual and `expected` the required content, both as
    text. `problem` combines them in a sentence.
    """

    def __init__(
        self, source: str, position: int, what: str, found: object, expected: object
    ) -> None:
        self.source = source
        self.position = position
        self.what = what
        self.found = str(found)
        self.expected = str(expected)
        self.problem = f"{what} is {found}, expected {expected}"
        super().__init__(
            f"object {source} is corrupt at byte {position}: {self.problem}. Keep the object,"
            " compare it with another copy, and do not compact or delete it before it is explained"
        )


class ObjectNotFoundError(StorageError):
    """No object with this key exists."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(
            f"object {key!r} does not exist. Look up its stream again, because compaction replaces"
            " objects, and check that the bucket or path is correct"
        )


class ObjectExistsError(StorageError):
    """A conditional put found an existing object under its key, and changed nothing."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(
            f"object {key!r} exists already and is unchanged. Read it to find its creator, or use"
            " another key"
        )


class UploadNotFoundError(StorageError):
    """No unfinished multipart upload has this id, because it was completed or aborted."""

    def __init__(self, key: str, upload_id: str) -> None:
        self.key = key
        self.upload_id = upload_id
        super().__init__(
            f"multipart upload {upload_id!r} of {key!r} does not exist (completed or aborted)."
            " Start a new upload"
        )


class BucketNotFoundError(StorageError):
    """The bucket, or the root directory of a local store, does not exist."""

    def __init__(
        self, bucket: str, advice: str = "create it, or correct the address of the store"
    ) -> None:
        self.bucket = bucket
        super().__init__(f"bucket {bucket!r} does not exist. {advice}")


class AccessDeniedError(StorageError):
    """The store rejected the credentials, or they do not allow this operation.

    The error may pass: a clock is corrected, keys are rotated, a policy is fixed.
    """

    may_pass = True


class RangeNotSatisfiableError(StorageError):
    """The requested range starts at or after the end of the object."""

    def __init__(self, key: str, start: int) -> None:
        self.key = key
        self.start = start
        super().__init__(
            f"object {key!r} ends at or before byte {start}, where the requested range starts."
            " Compare its recorded size with its size in the store"
        )


class ObjectChangedError(StorageError):
    """The key names another object than the expected one. Nothing was written."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"object {key!r} was replaced since it was described. Describe it again")


class InvalidKeyError(StorageError):
    """The store cannot contain this key. Nothing was read or written."""

    def __init__(self, key: str, problem: str) -> None:
        self.key = key
        super().__init__(f"key {key!r} is invalid: {problem}; use another key")


class StoreRejectedError(StorageError):
    """The store understood the request and will never accept it."""


class StoreUnavailableError(StorageError):
    """The store did not answer or cannot serve the call now. The call may be retried.

    The call may have taken effect. `throttled` is set if the store asked for fewer requests, and
    `retry_after_s` is the wait in seconds that it asked for.
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

    Its cause, if set, is the failure of the last attempt.
    """


class MissingPackageError(StorageError):
    """An optional package is not installed. The extra `extra` of this distribution installs it."""

    def __init__(self, purpose: str, package: str, extra: str, command: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed. Install"
            f" streammeta[{extra}]: {command}"
        )


class WrongBucketError(StorageError):
    """The namespace of the bucket does not belong to the expected cluster.

    `found` names the actual owner and `expected` the required one, both as text.
    """

    def __init__(self, namespace: str, found: str, expected: str) -> None:
        self.namespace = namespace
        self.found = found
        self.expected = expected
        super().__init__(
            f"namespace {namespace!r} of the bucket does not belong to {expected}: {found}."
            " Nothing was written or deleted. Use the bucket and namespace of the cluster's"
            " controllers (`streammeta shell -- cat /cluster` shows the namespace)"
        )


@dataclass(frozen=True, slots=True)
class Deviation:
    """A deviation: its byte position in the object, the actual and the required content."""

    position: int
    what: str
    found: str
    expected: str

    @property
    def problem(self) -> str:
        """Actual and required content in one sentence."""
        return f"{self.what} is {self.found}, expected {self.expected}"


@dataclass(frozen=True, slots=True)
class Source:
    """Provenance of decoded bytes: the object's `name`, and their position in it.

    `origin` is the position in the object of the decoder's first byte. `noted` collects deviations.
    Without it, they are errors.
    """

    name: str
    origin: int = 0
    noted: list[Deviation] | None = None

    def corrupt(self, at: int, what: str, found: object, expected: object) -> CorruptObjectError:
        """Return the error for the content `at` bytes after the origin."""
        return CorruptObjectError(self.name, self.origin + at, what, found, expected)

    def deviate(
        self, at: int, what: str, found: object, expected: object, *, is_allowed: bool = True
    ) -> None:
        """Note a deviation `at` bytes after the origin.

        Raises `CorruptObjectError` with the same content if deviations are errors or this one is
        not allowed.
        """
        # Strict by default: a writer of this format must not produce deviations.
        if self.noted is None or not is_allowed:
            raise self.corrupt(at, what, found, expected)
        self.noted.append(Deviation(self.origin + at, what, str(found), str(expected)))


UNNAMED = Source("in memory")
"""Source of bytes that do not come from a stored object."""


class PayloadError(StorageError):
    """A payload has another kind than expected, or is damaged.

    `position` is the byte position in the payload, `found` the actual content and `expected` the
    required one.
    """

    def __init__(self, position: int, what: str, found: object, expected: object) -> None:
        self.position = position
        self.found = str(found)
        self.expected = str(expected)
        super().__init__(f"{what} at byte {position} is {found}, expected {expected}")
