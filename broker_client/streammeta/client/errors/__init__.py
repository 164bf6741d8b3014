"""Errors of the client, one exception for each different reaction of a broker.

A message names the rejected stream, node, object or file, the reason, and the next step.
`retriable` of a `BrokerClientError` says whether a retry of the same call, unchanged, may succeed.
The failed call may still have had an effect. Failures of the object store are `StorageError`s.
"""

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
from streammeta.client.errors.rejections import ERRORS_BY_CODE as ERRORS_BY_CODE
from streammeta.client.errors.rejections import BrokerClientError as BrokerClientError
from streammeta.client.errors.rejections import BucketRejectedError as BucketRejectedError
from streammeta.client.errors.rejections import ChangesLostError as ChangesLostError
from streammeta.client.errors.rejections import ClientClosedError as ClientClosedError
from streammeta.client.errors.rejections import (
    CompactedObjectsNotFoundError as CompactedObjectsNotFoundError,
)
from streammeta.client.errors.rejections import ControllerDefectError as ControllerDefectError
from streammeta.client.errors.rejections import (
    ControllerUnavailableError as ControllerUnavailableError,
)
from streammeta.client.errors.rejections import CorruptObjectError as CorruptObjectError
from streammeta.client.errors.rejections import ForkedProcessError as ForkedProcessError
from streammeta.client.errors.rejections import InvalidRequestError as InvalidRequestError
from streammeta.client.errors.rejections import KeyConflictError as KeyConflictError
from streammeta.client.errors.rejections import KeyNotFoundError as KeyNotFoundError
from streammeta.client.errors.rejections import LimitExceededError as LimitExceededError
from streammeta.client.errors.rejections import (
    MetadataOlderThanBucketError as MetadataOlderThanBucketError,
)
from streammeta.client.errors.rejections import MissingObjectError as MissingObjectError
from streammeta.client.errors.rejections import NodeEpochExpiredError as NodeEpochExpiredError
from streammeta.client.errors.rejections import NodeFencedError as NodeFencedError
from streammeta.client.errors.rejections import NodeLockedError as NodeLockedError
from streammeta.client.errors.rejections import NodeNotRegisteredError as NodeNotRegisteredError
from streammeta.client.errors.rejections import (
    ObjectContentMismatchError as ObjectContentMismatchError,
)
from streammeta.client.errors.rejections import ObjectExpiredError as ObjectExpiredError
from streammeta.client.errors.rejections import ObjectNotCommittedError as ObjectNotCommittedError
from streammeta.client.errors.rejections import OffsetMismatchError as OffsetMismatchError
from streammeta.client.errors.rejections import OffsetTrimmedError as OffsetTrimmedError
from streammeta.client.errors.rejections import OutcomeUnknownError as OutcomeUnknownError
from streammeta.client.errors.rejections import PermissionDeniedError as PermissionDeniedError
from streammeta.client.errors.rejections import ProtocolViolationError as ProtocolViolationError
from streammeta.client.errors.rejections import ReadDeadlineError as ReadDeadlineError
from streammeta.client.errors.rejections import ReaderClosedError as ReaderClosedError
from streammeta.client.errors.rejections import RecoveryNeededError as RecoveryNeededError
from streammeta.client.errors.rejections import RejectedError as RejectedError
from streammeta.client.errors.rejections import StreamEpochMismatchError as StreamEpochMismatchError
from streammeta.client.errors.rejections import StreamFailedError as StreamFailedError
from streammeta.client.errors.rejections import StreamFencedError as StreamFencedError
from streammeta.client.errors.rejections import StreamNotClosedError as StreamNotClosedError
from streammeta.client.errors.rejections import StreamNotFoundError as StreamNotFoundError
from streammeta.client.errors.rejections import StreamNotOpenedError as StreamNotOpenedError
from streammeta.client.errors.rejections import UnsupportedError as UnsupportedError
from streammeta.client.errors.rejections import UploadFailedError as UploadFailedError
from streammeta.client.errors.rejections import WriterClosedError as WriterClosedError
from streammeta.client.errors.rejections import code_name as code_name
from streammeta.client.errors.rejections import rejection as rejection
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
