"""The broker's side: write records into objects, register them with the controllers, read them.

Start with `ControllerClient` and `BrokerSession.register`, then use a `StreamWriter` or
`StreamReader` with any `storage.object_store`.
"""

from broker_client.commit_messages import Upload, UploadVerdict
from broker_client.commit_pipeline import CommitPipeline
from broker_client.controller_client import ControllerClient
from broker_client.errors import (
    BrokerClientError,
    BucketRefusedError,
    CompactedObjectsNotFoundError,
    ControllerDefectError,
    ControllerUnavailableError,
    CorruptObjectError,
    InvalidRequestError,
    KeyConflictError,
    KeyNotFoundError,
    LimitExceededError,
    MapOlderThanBucketError,
    MissingObjectError,
    NodeEpochExpiredError,
    NodeFencedError,
    NodeLockedError,
    NodeNotRegisteredError,
    ObjectContentMismatchError,
    ObjectExpiredError,
    ObjectNotCommittedError,
    OffsetMismatchError,
    OffsetTrimmedError,
    OutcomeUnknownError,
    PermissionDeniedError,
    ProtocolViolationError,
    ReadDeadlineError,
    ReaderClosedError,
    RecoveryNeededError,
    RefusedError,
    StreamEpochMismatchError,
    StreamFailedError,
    StreamFencedError,
    StreamNotClosedError,
    StreamNotFoundError,
    StreamNotOpenedError,
    UnsupportedError,
    UploadFailedError,
    WriterClosedError,
)
from broker_client.heartbeat import Heartbeat
from broker_client.observer import SilentObserver, UploadObserver
from broker_client.reader import StreamReader
from broker_client.reader_config import ReaderConfig
from broker_client.reading.lookups import StreamQuery
from broker_client.reading.range_reader import Fetched
from broker_client.reading.reader_stats import ReaderStats
from broker_client.reading.stream_tail import StreamTail
from broker_client.reading.time_lookup import OffsetAtTime, kafka_timestamp
from broker_client.session import BrokerSession, OpenedStream, Outcomes
from broker_client.write_ahead_log.config import LogConfig
from broker_client.write_ahead_log.identity import LogIdentity
from broker_client.write_ahead_log.log import WriteAheadLog
from broker_client.write_ahead_log.recovery import RecoveryReport
from broker_client.writer import StreamWriter
from broker_client.writer_config import WriterConfig

__all__ = [
    "BrokerClientError",
    "BrokerSession",
    "BucketRefusedError",
    "CommitPipeline",
    "CompactedObjectsNotFoundError",
    "ControllerClient",
    "ControllerDefectError",
    "ControllerUnavailableError",
    "CorruptObjectError",
    "Fetched",
    "Heartbeat",
    "InvalidRequestError",
    "KeyConflictError",
    "KeyNotFoundError",
    "LimitExceededError",
    "LogConfig",
    "LogIdentity",
    "MapOlderThanBucketError",
    "MissingObjectError",
    "NodeEpochExpiredError",
    "NodeFencedError",
    "NodeLockedError",
    "NodeNotRegisteredError",
    "ObjectContentMismatchError",
    "ObjectExpiredError",
    "ObjectNotCommittedError",
    "OffsetAtTime",
    "OffsetMismatchError",
    "OffsetTrimmedError",
    "OpenedStream",
    "OutcomeUnknownError",
    "Outcomes",
    "PermissionDeniedError",
    "ProtocolViolationError",
    "ReadDeadlineError",
    "ReaderClosedError",
    "ReaderConfig",
    "ReaderStats",
    "RecoveryNeededError",
    "RecoveryReport",
    "RefusedError",
    "SilentObserver",
    "StreamEpochMismatchError",
    "StreamFailedError",
    "StreamFencedError",
    "StreamNotClosedError",
    "StreamNotFoundError",
    "StreamNotOpenedError",
    "StreamQuery",
    "StreamReader",
    "StreamTail",
    "StreamWriter",
    "UnsupportedError",
    "Upload",
    "UploadFailedError",
    "UploadObserver",
    "UploadVerdict",
    "WriteAheadLog",
    "WriterClosedError",
    "WriterConfig",
    "kafka_timestamp",
]
