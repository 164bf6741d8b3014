"""The broker's side: write records into objects, register them with the controllers, read them.

Start with `ControllerClient` and `BrokerSession.open`, then use a `StreamWriter` or
`StreamReader` with any `streammeta.storage.object_store`.
"""

from streammeta.client.commit_messages import Upload, UploadVerdict
from streammeta.client.commit_pipeline import CommitPipeline
from streammeta.client.config import (
    ReaderConfig,
    ReaderStats,
    SilentObserver,
    UploadObserver,
    WriterConfig,
)
from streammeta.client.controller_client import ControllerClient
from streammeta.client.errors import (
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
from streammeta.client.reader import StreamReader
from streammeta.client.reading.lookups import StreamQuery
from streammeta.client.reading.map_follower import StreamTail
from streammeta.client.reading.range_reader import Fetched
from streammeta.client.reading.time_lookup import OffsetAtTime, kafka_timestamp
from streammeta.client.session import BrokerSession, Heartbeat, OpenedStream, Outcomes
from streammeta.client.stream_client import NodeCompaction, StreamClient, StreamClientConfig
from streammeta.client.write_ahead_log.config import LogConfig, LogIdentity
from streammeta.client.write_ahead_log.log import WriteAheadLog
from streammeta.client.write_ahead_log.recovery import RecoveryReport
from streammeta.client.writer import StreamWriter

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
    "NodeCompaction",
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
    "StreamClient",
    "StreamClientConfig",
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
