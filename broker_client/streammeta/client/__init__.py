"""The broker's client: write records into objects, register them with the controllers, read them.

Start with `async with StreamClient.open(...) as client` and `client.create_stream()`, which returns
a `Stream`. Parts can be used separately. Those that need I/O are opened by `await X.open(...)` or
`async with X.open(...)`, all others by their constructors. All parts are async context managers
with an idempotent `await x.close()`, except a session, which has no resources. Durations are
seconds and end in `_s`, times are ms since 1970 and end in `_ms`.
"""

import typing as _typing

from streammeta.client.api.client_config import StreamClientConfig as StreamClientConfig
from streammeta.client.api.key_values import KeyValue as KeyValue
from streammeta.client.api.key_values import KeyValues as KeyValues
from streammeta.client.api.named_objects import NamedObject as NamedObject
from streammeta.client.api.named_objects import NamedObjects as NamedObjects
from streammeta.client.api.named_objects import OwnerKey as OwnerKey
from streammeta.client.api.named_objects import OwnerStream as OwnerStream
from streammeta.client.api.stream import Stream as Stream
from streammeta.client.api.stream_client import NodeCompaction as NodeCompaction
from streammeta.client.api.stream_client import StreamClient as StreamClient
from streammeta.client.api.watch import EntityChange as EntityChange
from streammeta.client.api.watch import KeyChange as KeyChange
from streammeta.client.api.watch import Watch as Watch
from streammeta.client.commits.effects import EffectsVerdict as EffectsVerdict
from streammeta.client.commits.effects import PutResult as PutResult
from streammeta.client.commits.effects import StreamTrim as StreamTrim
from streammeta.client.commits.effects import UploadWithEffects as UploadWithEffects
from streammeta.client.commits.effects import ValueToPut as ValueToPut
from streammeta.client.commits.messages import Upload as Upload
from streammeta.client.commits.messages import UploadVerdict as UploadVerdict
from streammeta.client.commits.pipeline import CommitPipeline as CommitPipeline
from streammeta.client.compaction.config import CompactionConfig as CompactionConfig
from streammeta.client.compaction.report import CompactionReport as CompactionReport
from streammeta.client.compaction.report import GroupReport as GroupReport
from streammeta.client.config import ReaderConfig as ReaderConfig
from streammeta.client.config import ReaderStats as ReaderStats
from streammeta.client.config import SilentObserver as SilentObserver
from streammeta.client.config import UploadObserver as UploadObserver
from streammeta.client.config import WriterConfig as WriterConfig
from streammeta.client.controllers.controller_client import ControllerClient as ControllerClient
from streammeta.client.deprecations import find_renamed
from streammeta.client.errors import BrokerClientError as BrokerClientError
from streammeta.client.errors import BucketRejectedError as BucketRejectedError
from streammeta.client.errors import ChangesLostError as ChangesLostError
from streammeta.client.errors import ClientClosedError as ClientClosedError
from streammeta.client.errors import CompactedObjectsNotFoundError as CompactedObjectsNotFoundError
from streammeta.client.errors import ControllerDefectError as ControllerDefectError
from streammeta.client.errors import ControllerUnavailableError as ControllerUnavailableError
from streammeta.client.errors import CorruptObjectError as CorruptObjectError
from streammeta.client.errors import ForkedProcessError as ForkedProcessError
from streammeta.client.errors import InvalidRequestError as InvalidRequestError
from streammeta.client.errors import KeyConflictError as KeyConflictError
from streammeta.client.errors import KeyNotFoundError as KeyNotFoundError
from streammeta.client.errors import LimitExceededError as LimitExceededError
from streammeta.client.errors import MetadataOlderThanBucketError as MetadataOlderThanBucketError
from streammeta.client.errors import MissingObjectError as MissingObjectError
from streammeta.client.errors import NodeEpochExpiredError as NodeEpochExpiredError
from streammeta.client.errors import NodeFencedError as NodeFencedError
from streammeta.client.errors import NodeLockedError as NodeLockedError
from streammeta.client.errors import NodeNotRegisteredError as NodeNotRegisteredError
from streammeta.client.errors import ObjectContentMismatchError as ObjectContentMismatchError
from streammeta.client.errors import ObjectExpiredError as ObjectExpiredError
from streammeta.client.errors import ObjectNotCommittedError as ObjectNotCommittedError
from streammeta.client.errors import OffsetMismatchError as OffsetMismatchError
from streammeta.client.errors import OffsetTrimmedError as OffsetTrimmedError
from streammeta.client.errors import OutcomeUnknownError as OutcomeUnknownError
from streammeta.client.errors import PermissionDeniedError as PermissionDeniedError
from streammeta.client.errors import ProtocolViolationError as ProtocolViolationError
from streammeta.client.errors import ReadDeadlineError as ReadDeadlineError
from streammeta.client.errors import ReaderClosedError as ReaderClosedError
from streammeta.client.errors import RecoveryNeededError as RecoveryNeededError
from streammeta.client.errors import RejectedError as RejectedError
from streammeta.client.errors import StreamEpochMismatchError as StreamEpochMismatchError
from streammeta.client.errors import StreamFailedError as StreamFailedError
from streammeta.client.errors import StreamFencedError as StreamFencedError
from streammeta.client.errors import StreamNotClosedError as StreamNotClosedError
from streammeta.client.errors import StreamNotFoundError as StreamNotFoundError
from streammeta.client.errors import StreamNotOpenedError as StreamNotOpenedError
from streammeta.client.errors import UnsupportedError as UnsupportedError
from streammeta.client.errors import UploadFailedError as UploadFailedError
from streammeta.client.errors import WriterClosedError as WriterClosedError
from streammeta.client.model import ClusterDescription as ClusterDescription
from streammeta.client.model import HeartbeatAnswer as HeartbeatAnswer
from streammeta.client.model import NodeDescription as NodeDescription
from streammeta.client.model import NodeIdentity as NodeIdentity
from streammeta.client.model import Recovery as Recovery
from streammeta.client.model import StreamDescription as StreamDescription
from streammeta.client.model import StreamRange as StreamRange
from streammeta.client.nodes.session import BrokerSession as BrokerSession
from streammeta.client.nodes.session import Heartbeat as Heartbeat
from streammeta.client.nodes.session import OpenedStream as OpenedStream
from streammeta.client.nodes.session import Outcomes as Outcomes
from streammeta.client.reading.lookups import Located as Located
from streammeta.client.reading.lookups import Slice as Slice
from streammeta.client.reading.lookups import StreamQuery as StreamQuery
from streammeta.client.reading.metadata_follower import StreamTail as StreamTail
from streammeta.client.reading.range_reader import Fetched as Fetched
from streammeta.client.reading.reader import StreamReader as StreamReader
from streammeta.client.reading.time_lookup import OffsetAtTime as OffsetAtTime
from streammeta.client.reading.time_lookup import kafka_timestamp as kafka_timestamp
from streammeta.client.resources.tally import ClientMetrics as ClientMetrics
from streammeta.client.resources.tally import TimesSeen as TimesSeen
from streammeta.client.wal.bucket.config import ObjectLogConfig as ObjectLogConfig
from streammeta.client.wal.bucket.errors import DamagedSlotError as DamagedSlotError
from streammeta.client.wal.bucket.errors import LogSealedError as LogSealedError
from streammeta.client.wal.bucket.errors import LogSweptError as LogSweptError
from streammeta.client.wal.bucket.errors import ObjectLogFailedError as ObjectLogFailedError
from streammeta.client.wal.bucket.errors import UnfitStoreError as UnfitStoreError
from streammeta.client.wal.bucket.failover import FailoverReport as FailoverReport
from streammeta.client.wal.bucket.failover import (
    FailoverSupersededError as FailoverSupersededError,
)
from streammeta.client.wal.bucket.failover import FailoverUnsettledError as FailoverUnsettledError
from streammeta.client.wal.bucket.failover import FailoverWorker as FailoverWorker
from streammeta.client.wal.bucket.log import ObjectLog as ObjectLog
from streammeta.client.wal.bucket.setting_aside import read_aside as read_aside
from streammeta.client.wal.disk.config import LogConfig as LogConfig
from streammeta.client.wal.disk.config import LogIdentity as LogIdentity
from streammeta.client.wal.disk.errors import DamagedLogError as DamagedLogError
from streammeta.client.wal.disk.errors import LogLockedError as LogLockedError
from streammeta.client.wal.disk.errors import LogMissingError as LogMissingError
from streammeta.client.wal.disk.errors import (
    WriteAheadLogBrokenError as WriteAheadLogBrokenError,
)
from streammeta.client.wal.disk.errors import (
    WriteAheadLogClosedError as WriteAheadLogClosedError,
)
from streammeta.client.wal.disk.errors import WriteAheadLogError as WriteAheadLogError
from streammeta.client.wal.disk.errors import (
    WriteAheadLogFullError as WriteAheadLogFullError,
)
from streammeta.client.wal.disk.errors import WrongLogError as WrongLogError
from streammeta.client.wal.disk.log import WriteAheadLog as WriteAheadLog
from streammeta.client.wal.disk.recovery import AsideRun as AsideRun
from streammeta.client.wal.disk.recovery import RecoveryReport as RecoveryReport
from streammeta.client.writing.writer import StreamWriter as StreamWriter
from streammeta.storage.errors import AccessDeniedError as AccessDeniedError
from streammeta.storage.errors import BucketNotFoundError as BucketNotFoundError
from streammeta.storage.errors import DeadlineExceededError as DeadlineExceededError
from streammeta.storage.errors import Deviation as Deviation
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
from streammeta.storage.object_format.record import RecordBatch as RecordBatch
from streammeta.tls.files import TlsError as TlsError
from streammeta.tls.files import TlsFiles as TlsFiles

if not _typing.TYPE_CHECKING:  # for type checkers former names do not exist

    def __getattr__(name: str) -> object:
        """Return what a former name stands for. See `deprecations`."""
        return find_renamed(__name__, name)
