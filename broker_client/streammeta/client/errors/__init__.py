"""Errors of the client, one exception for each different reaction of a broker.

A message names the rejected stream, node, object or file, the reason, and the next step.
`retriable` of a `BrokerClientError` says whether a retry of the same call, unchanged, may succeed.
The failed call may still have had an effect. Failures of the object store are `StorageError`s.
"""

from __future__ import annotations

import os
from collections import abc

from streammeta.client.errors.base import BrokerClientError as BrokerClientError
from streammeta.client.errors.base import RejectedError as RejectedError
from streammeta.client.errors.base import code_name as code_name
from streammeta.client.errors.logs import DamagedLogError as DamagedLogError
from streammeta.client.errors.logs import DamagedSlotError as DamagedSlotError
from streammeta.client.errors.logs import FailoverSupersededError as FailoverSupersededError
from streammeta.client.errors.logs import FailoverUnsettledError as FailoverUnsettledError
from streammeta.client.errors.logs import LogLockedError as LogLockedError
from streammeta.client.errors.logs import LogMissingError as LogMissingError
from streammeta.client.errors.logs import LogSealedError as LogSealedError
from streammeta.client.errors.logs import LogSweptError as LogSweptError
from streammeta.client.errors.logs import ObjectLogFailedError as ObjectLogFailedError
from streammeta.client.errors.logs import UnfitStoreError as UnfitStoreError
from streammeta.client.errors.logs import WriteAheadLogBrokenError as WriteAheadLogBrokenError
from streammeta.client.errors.logs import WriteAheadLogClosedError as WriteAheadLogClosedError
from streammeta.client.errors.logs import WriteAheadLogError as WriteAheadLogError
from streammeta.client.errors.logs import WriteAheadLogFullError as WriteAheadLogFullError
from streammeta.client.errors.logs import WrongLogError as WrongLogError
from streammeta.client.errors.shared import DuplicateBatchError as DuplicateBatchError
from streammeta.client.errors.shared import OffsetsUnknownError as OffsetsUnknownError
from streammeta.client.errors.shared import OutOfOrderSequenceError as OutOfOrderSequenceError
from streammeta.client.errors.shared import ProducerFencedError as ProducerFencedError
from streammeta.client.errors.shared import (
    SharedStreamsUnsupportedError as SharedStreamsUnsupportedError,
)
from streammeta.client.errors.shared import StreamKindMismatchError as StreamKindMismatchError
from streammeta.client.errors.shared import StreamRowsRejectedError as StreamRowsRejectedError
from streammeta.rpc import advice as rpc_advice
from streammeta.storage.errors import AccessDeniedError as AccessDeniedError
from streammeta.storage.errors import BucketNotFoundError as BucketNotFoundError
from streammeta.storage.errors import DeadlineExceededError as DeadlineExceededError
from streammeta.storage.errors import InvalidKeyError as InvalidKeyError
from streammeta.storage.errors import MissingPackageError as MissingPackageError
from streammeta.storage.errors import ObjectExistsError as ObjectExistsError
from streammeta.storage.errors import ObjectNotFoundError as ObjectNotFoundError
from streammeta.storage.errors import PayloadError as PayloadError
from streammeta.storage.errors import RangeNotSatisfiableError as RangeNotSatisfiableError
from streammeta.storage.errors import StorageError as StorageError
from streammeta.storage.errors import StoreRejectedError as StoreRejectedError
from streammeta.storage.errors import StoreUnavailableError as StoreUnavailableError
from streammeta.storage.errors import UploadNotFoundError as UploadNotFoundError
from streammeta.storage.errors import WrongBucketError as WrongBucketError
from streammeta.tls.files import TlsError as TlsError
from streammeta.v1 import common_pb2


class InvalidRequestError(RejectedError):
    """The request contradicts itself or breaks a rule of the contract."""

    advice = "correct the named field. A retry of the same request fails again"


class LimitExceededError(RejectedError):
    """The request is larger than a limit of the controller. Nothing was changed."""

    advice = "send less in one request"


class PermissionDeniedError(RejectedError):
    """The controller doesn't allow this caller to do this."""

    advice = "check the credentials and the controller's access rules"


class UnsupportedError(RejectedError):
    """The controller does not have this call."""

    advice = "upgrade the controllers, or use a client of their version"


class ControllerDefectError(RejectedError):
    """The controller failed in an unexpected way."""

    advice = "nothing was changed. Report it together with the controller's log"


class ProtocolViolationError(RejectedError):
    """The answer breaks the contract: an undefined code, or rows that do not match."""

    advice = "check that client and controllers have matching versions"


class BucketRejectedError(RejectedError):
    """The bucket belongs to another cluster, so the controllers issue no object ids."""

    advice = "start the controllers with their own bucket and namespace"


class MetadataOlderThanBucketError(RejectedError):
    """The controllers were restored to an earlier state and issue no object ids."""

    advice = (
        "start the controllers with their newest data directories. See docs/operations/bucket.md"
    )


class StreamNotFoundError(RejectedError):
    """The stream was never created, or was deleted."""

    advice = "check the id, or create the stream"


class StreamFencedError(RejectedError):
    """Another node, or a newer epoch of the stream, owns the stream."""

    advice = "stop writing to it. To take it back, open it with a larger stream epoch"


class StreamNotOpenedError(RejectedError):
    """The stream is closed."""

    advice = "open the stream and attach it before writing to it"


class StreamNotClosedError(RejectedError):
    """The stream is open, or its former owner has pending uploads."""

    advice = "wait until its owner has closed it, then retry"
    retriable = True


class StreamEpochMismatchError(RejectedError):
    """The request's epoch contradicts the stream and its current range."""

    advice = "describe the stream, then open it with a larger stream epoch"


class StreamFailedError(RejectedError):
    """An earlier write to the stream failed, so this one would leave a gap."""

    advice = "open the stream again and attach it, then continue at its next offset"


class ObjectExpiredError(RejectedError):
    """A commit came after the object's deadline, or for an id that was never prepared."""

    advice = "reconciliation removes the uploaded bytes. Prepare new ids and upload again"


class ObjectNotCommittedError(RejectedError):
    """The object exists but is not committed."""

    advice = "commit it first, or choose another source"


class ObjectContentMismatchError(RejectedError):
    """The object id was committed before, with other content."""

    advice = "commit under newly prepared ids. Only an identical commit may be repeated"


class CompactedObjectsNotFoundError(RejectedError):
    """A source of a compaction is no longer committed: another process has compacted it."""

    advice = "discard the result and plan the compaction again"


class NodeFencedError(RejectedError):
    """Another node is recovering the node's streams."""

    advice = "stop writing as this node. Restart the broker with a larger node epoch"


class NodeEpochExpiredError(NodeFencedError):
    """A newer process of this node, or another one with the same epoch, has registered."""

    advice = (
        "stop this process: a newer one replaces it, or another one has its epoch. Start with a"
        " larger node epoch"
    )


class NodeNotRegisteredError(RejectedError):
    """The node has not registered."""

    advice = "register the node, then retry"


class NodeLockedError(RejectedError):
    """The previous owner of the stream is locked. Only it may open the stream."""

    advice = "wait until the lock is removed, then retry"
    retriable = True


class KeyConflictError(RejectedError):
    """Put-if-absent or compare-and-set found another version."""

    advice = "read the stored value, decide again and put with its version"


class KeyNotFoundError(RejectedError):
    """The key does not exist."""

    advice = "check namespace and key"


class OffsetMismatchError(RejectedError):
    """A range does not start at the end of its stream.

    `got` is the start of the rejected range, `wanted` the stream's end offset, None if unknown.
    """

    advice = "open the stream again to get its next offset, then write from there"

    def __init__(self, stream_id: int, wanted: int | None, got: int) -> None:
        self.stream_id = stream_id
        self.wanted = wanted
        self.got = got
        end = "its end offset" if wanted is None else f"offset {wanted}"
        super().__init__(
            f"stream {stream_id}",
            code=common_pb2.ErrorCode.ERROR_CODE_OFFSET_NOT_MATCHED,
            detail=f"the range starts at offset {got}, expected {end}",
        )


class OffsetTrimmedError(RejectedError):
    """A read starts below the first visible offset of its stream."""

    advice = "read from the stream's start offset. Earlier records are trimmed"

    def __init__(self, stream_id: int, got: int, start_offset: int) -> None:
        self.stream_id = stream_id
        self.got = got
        self.start_offset = start_offset
        super().__init__(
            f"read of stream {stream_id}",
            code=common_pb2.ErrorCode.ERROR_CODE_OFFSET_NOT_MATCHED,
            detail=f"it starts at offset {got}, the stream at {start_offset}",
        )


class ControllerUnavailableError(BrokerClientError):
    """No controller completed the call within the deadline.

    A call that changes something may have taken effect. A read, `is_read`, changes nothing.
    `over_tls` says whether TLS was used, None if unknown. `tried` has the last failure at each
    endpoint. `reason` is the last temporary `google.rpc.ErrorInfo` reason of a controller, such as
    DISK_FULL or BUSY, empty without one.
    """

    retriable = True

    def __init__(
        self,
        method: str,
        deadline_s: float,
        tried: abc.Mapping[str, str],
        reason: str = "",
        *,
        is_read: bool = False,
        over_tls: bool | None = None,
    ) -> None:
        self.method = method
        self.deadline_s = deadline_s
        # A copy: other calls continue the search.
        self.tried = dict(tried)
        self.reason = reason
        seen = "; ".join(f"{endpoint}: {failure}" for endpoint, failure in tried.items())
        what = f"was rejected with {reason} for" if reason else "got no answer in"
        advice = _UNAVAILABLE_ADVICE.get(reason, _UNKNOWN_REASON_ADVICE)
        # Without a reason no controller answered, so the connections themselves may be wrong.
        if not reason and over_tls is not None:
            advice = rpc_advice.connection_advice(tried.values(), over_tls=over_tls) or advice
        super().__init__(
            f"{method} {what} {deadline_s:g} s ({seen or 'no endpoint was tried'}). {advice}."
            f" {_AFTER_READ if is_read else _AFTER_CHANGE}"
        )


_UNAVAILABLE_ADVICE = {
    "": "check that a majority of the controllers runs and that these endpoints are theirs",
    "DISK_FULL": "free space on the disks of the controllers",
    "BUSY": "have fewer requests in flight, or a longer deadline",
    "OBJECT_IDS_NOT_READY": "check that the controllers reach their bucket",
    "MARKER_UNSEEN": "check that the controllers reach their bucket",
    "FENCE_PENDING": "wait until the former cluster is fenced, at most half a minute",
}
_AFTER_READ = "The call changed nothing: retry it"
_AFTER_CHANGE = (
    "The call may have taken effect: retry it with the same request id, or open the stream again"
)
_UNKNOWN_REASON_ADVICE = "the controllers answer: their message names the obstacle"
"""For reasons that a later version of the controllers may have."""


class OutcomeUnknownError(BrokerClientError):
    """A commit got no answer in time: either all of its records are committed, or none.

    The next offset of their streams, opened again with larger epochs, shows which.
    """

    def __init__(self, subject: str, cause: Exception) -> None:
        self.subject = subject
        self.__cause__ = cause
        super().__init__(
            f"the outcome of {subject} is unknown ({cause}). Open the stream again with a larger"
            " epoch: its next offset shows whether the records are committed"
        )


class UploadFailedError(BrokerClientError):
    """The object store rejected an object. No record of it was committed."""

    def __init__(self, key: str, object_id: int, reason: str) -> None:
        self.key = key
        self.object_id = object_id
        super().__init__(
            f"object {object_id} could not be uploaded as {key!r}: {reason}. Once the store accepts"
            " writes, open the streams again and continue at their next offsets"
        )


class ClientClosedError(BrokerClientError):
    """The controllers' client was closed before, or during, a call."""

    def __init__(self, call: str) -> None:
        super().__init__(f"{call}: the client is closed. Create a new one")


class ForkedProcessError(BrokerClientError):
    """The process was forked from one that had connected to controllers. Nothing was done."""

    def __init__(self, call: str) -> None:
        super().__init__(
            f"{call}: process {os.getpid()} was forked from one that had connected to controllers,"
            " and has no threads for its connections. Start the process by spawn or exec,"
            " as multiprocessing.get_context('spawn') does, and open a client in it"
        )


class WriterClosedError(BrokerClientError):
    """The writer is closed and accepts no more records."""


class ChangesLostError(BrokerClientError):
    """No controller keeps the next change of a watch any longer. `position` is its offset."""

    def __init__(self, position: int) -> None:
        self.position = position
        super().__init__(
            f"the changes from offset {position} on are compacted away on every controller. Read"
            " the state again in a new watch without a from_offset"
        )


class RecoveryNeededError(BrokerClientError):
    """The write-ahead log has records of an earlier process that may not be committed."""

    def __init__(self) -> None:
        super().__init__(
            "the write-ahead log has records of an earlier process. Attach the session's inherited"
            " streams and await recover() before the first append"
        )


class ReaderClosedError(BrokerClientError):
    """The reader was closed during, or before, a read."""

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        super().__init__(f"read of stream {stream_id}: the reader is closed. Create a new one")


class ReadDeadlineError(BrokerClientError):
    """A read did not complete before its deadline. It changed nothing."""

    retriable = True

    def __init__(self, subject: str, deadline_s: float) -> None:
        self.subject = subject
        self.deadline_s = deadline_s
        super().__init__(
            f"{subject} did not complete in {deadline_s:g} s. Check that the object store answers,"
            " then retry it, with a smaller read or a longer deadline"
        )


class CorruptObjectError(BrokerClientError):
    """The bytes of an object do not match its metadata."""

    def __init__(self, key: str, object_id: int, stream_id: int, problem: str) -> None:
        self.key = key
        self.object_id = object_id
        self.stream_id = stream_id
        self.problem = problem
        super().__init__(
            f"object {object_id} ({key!r}), read for stream {stream_id}, is corrupt: {problem}."
            " keep it, and restore it from a copy of the bucket"
        )


class MissingObjectError(BrokerClientError):
    """The metadata lists an object that the store does not have."""

    def __init__(self, key: str, object_id: int, stream_id: int) -> None:
        self.key = key
        self.object_id = object_id
        self.stream_id = stream_id
        super().__init__(
            f"object {object_id} ({key!r}), listed for stream {stream_id}, is not in the store."
            " check that this is the cluster's bucket, then run the reconciliation report"
        )


ERRORS_BY_CODE: abc.Mapping[int, type[RejectedError]] = {
    common_pb2.ErrorCode.ERROR_CODE_INVALID_REQUEST: InvalidRequestError,
    common_pb2.ErrorCode.ERROR_CODE_STREAM_NOT_EXIST: StreamNotFoundError,
    common_pb2.ErrorCode.ERROR_CODE_STREAM_FENCED: StreamFencedError,
    common_pb2.ErrorCode.ERROR_CODE_OBJECT_NOT_EXIST: ObjectExpiredError,
    common_pb2.ErrorCode.ERROR_CODE_STREAM_NOT_OPENED: StreamNotOpenedError,
    common_pb2.ErrorCode.ERROR_CODE_STREAM_NOT_CLOSED: StreamNotClosedError,
    common_pb2.ErrorCode.ERROR_CODE_COMPACTED_OBJECTS_NOT_FOUND: CompactedObjectsNotFoundError,
    common_pb2.ErrorCode.ERROR_CODE_OFFSET_NOT_MATCHED: OffsetMismatchError,
    common_pb2.ErrorCode.ERROR_CODE_NODE_EPOCH_EXPIRED: NodeEpochExpiredError,
    common_pb2.ErrorCode.ERROR_CODE_NODE_EPOCH_NOT_EXIST: NodeNotRegisteredError,
    common_pb2.ErrorCode.ERROR_CODE_KEY_EXIST: KeyConflictError,
    common_pb2.ErrorCode.ERROR_CODE_KEY_NOT_EXIST: KeyNotFoundError,
    common_pb2.ErrorCode.ERROR_CODE_NODE_FENCED: NodeFencedError,
    common_pb2.ErrorCode.ERROR_CODE_NODE_LOCKED: NodeLockedError,
    common_pb2.ErrorCode.ERROR_CODE_OBJECT_NOT_COMMITTED: ObjectNotCommittedError,
    common_pb2.ErrorCode.ERROR_CODE_STREAM_INNER_ERROR: StreamEpochMismatchError,
    common_pb2.ErrorCode.ERROR_CODE_OBJECT_CONTENT_MISMATCH: ObjectContentMismatchError,
    common_pb2.ErrorCode.ERROR_CODE_STREAM_KIND_MISMATCH: StreamKindMismatchError,
    common_pb2.ErrorCode.ERROR_CODE_DUPLICATE_BATCH: DuplicateBatchError,
    common_pb2.ErrorCode.ERROR_CODE_OUT_OF_ORDER_SEQUENCE: OutOfOrderSequenceError,
    common_pb2.ErrorCode.ERROR_CODE_PRODUCER_FENCED: ProducerFencedError,
    common_pb2.ErrorCode.ERROR_CODE_STREAM_ROWS_REJECTED: StreamRowsRejectedError,
    common_pb2.ErrorCode.ERROR_CODE_OFFSETS_UNKNOWN: OffsetsUnknownError,
}


def rejection(code: int, subject: str) -> RejectedError:
    """Build the exception for `code`, which must not be NONE. An unknown code is a violation.

    An `OFFSET_NOT_MATCHED` becomes a plain `RejectedError`: a caller that knows the offsets raises
    `OffsetMismatchError` itself.
    """
    if code == common_pb2.ErrorCode.ERROR_CODE_NONE:
        raise ValueError(f"{subject} was not rejected: the code is NONE")
    # A newer controller may know more codes than this client.
    if code not in common_pb2.ErrorCode.values():
        return ProtocolViolationError(subject, detail=f"unknown error code {code}")
    kind = ERRORS_BY_CODE[code]
    # Its constructor needs the offsets, which the code alone does not have.
    if kind is OffsetMismatchError:
        return RejectedError(subject, code=code)
    return kind(subject, code=code)
