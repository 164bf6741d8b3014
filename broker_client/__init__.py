"""The broker's side: write records into objects, register them with the controllers, read them.

Start with `ControllerClient` and `BrokerSession.register`, then use a `StreamWriter` or
`StreamReader` with any `storage.object_store`.
"""

from broker_client.commit_messages import Upload, UploadVerdict
from broker_client.commit_pipeline import CommitPipeline
from broker_client.controller_client import ControllerClient
from broker_client.errors import (
    BrokerClientError,
    CompactedObjectsNotFoundError,
    ControllerDefectError,
    ControllerUnavailableError,
    CorruptObjectError,
    InvalidRequestError,
    KeyConflictError,
    KeyNotFoundError,
    LimitExceededError,
    MissingObjectError,
    NodeEpochExpiredError,
    NodeFencedError,
    NodeLockedError,
    NodeNotRegisteredError,
    ObjectExpiredError,
    ObjectNotCommittedError,
    OffsetMismatchError,
    OffsetTrimmedError,
    PermissionDeniedError,
    ProtocolViolationError,
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
from broker_client.object_source import ReaderStats
from broker_client.observer import SilentObserver, UploadObserver
from broker_client.reader import ReaderConfig, StreamQuery, StreamReader
from broker_client.session import BrokerSession, OpenedStream, Outcomes
from broker_client.writer import StreamWriter, WriterConfig

__all__ = [
    "BrokerClientError",
    "BrokerSession",
    "CommitPipeline",
    "CompactedObjectsNotFoundError",
    "ControllerClient",
    "ControllerDefectError",
    "ControllerUnavailableError",
    "CorruptObjectError",
    "Heartbeat",
    "InvalidRequestError",
    "KeyConflictError",
    "KeyNotFoundError",
    "LimitExceededError",
    "MissingObjectError",
    "NodeEpochExpiredError",
    "NodeFencedError",
    "NodeLockedError",
    "NodeNotRegisteredError",
    "ObjectExpiredError",
    "ObjectNotCommittedError",
    "OffsetMismatchError",
    "OffsetTrimmedError",
    "OpenedStream",
    "Outcomes",
    "PermissionDeniedError",
    "ProtocolViolationError",
    "ReaderConfig",
    "ReaderStats",
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
    "StreamWriter",
    "UnsupportedError",
    "Upload",
    "UploadFailedError",
    "UploadObserver",
    "UploadVerdict",
    "WriterClosedError",
    "WriterConfig",
]
