"""Error codes of Kafka's protocol that this broker uses, and errors that carry a code."""

from __future__ import annotations

from enum import IntEnum

from streammeta.brokers.partition import errors as partition
from streammeta.client import errors as client

NO_TRANSACTIONS = "transactions are not supported. Produce without a transactional id"


class Code(IntEnum):
    """Error codes, with Kafka's names and numbers."""

    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    MESSAGE_TOO_LARGE = 10
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC = 17
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    INVALID_PRODUCER_EPOCH = 47
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    MEMBER_ID_REQUIRED = 79
    FENCED_INSTANCE_ID = 82
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNKNOWN_TOPIC_ID = 100
    MISMATCHED_ENDPOINT_TYPE = 114


class KafkaError(Exception):
    """A request, or an item of one, fails with `code`."""

    def __init__(self, code: Code, message: str = "") -> None:
        super().__init__(message or code.name)
        self.code = code
        self.message = message


# The first match wins, so subclasses precede their bases.
_CODES: tuple[tuple[type[Exception], Code], ...] = (
    (partition.CorruptBatchError, Code.CORRUPT_MESSAGE),
    (partition.InvalidTimestampError, Code.INVALID_TIMESTAMP),
    (partition.BatchTooLargeError, Code.MESSAGE_TOO_LARGE),
    (partition.UnsupportedBatchError, Code.INVALID_RECORD),
    (partition.InvalidBatchError, Code.INVALID_RECORD),
    (partition.OutOfOrderSequenceError, Code.OUT_OF_ORDER_SEQUENCE_NUMBER),
    (partition.InvalidProducerEpochError, Code.INVALID_PRODUCER_EPOCH),
    (partition.OffsetOutOfRangeError, Code.OFFSET_OUT_OF_RANGE),
    (partition.PartitionFailedError, Code.NOT_LEADER_OR_FOLLOWER),
    (partition.PartitionClosedError, Code.NOT_LEADER_OR_FOLLOWER),
    (client.OffsetTrimmedError, Code.OFFSET_OUT_OF_RANGE),
    (client.StreamNotFoundError, Code.UNKNOWN_TOPIC_OR_PARTITION),
    (client.LimitExceededError, Code.MESSAGE_TOO_LARGE),
    (client.OutOfOrderSequenceError, Code.OUT_OF_ORDER_SEQUENCE_NUMBER),
    (client.ProducerFencedError, Code.INVALID_PRODUCER_EPOCH),
    (client.OutcomeUnknownError, Code.REQUEST_TIMED_OUT),
    # Without the offset of the first batch, which may not be committed yet.
    (client.DuplicateBatchError, Code.REQUEST_TIMED_OUT),
    # Another broker takes the batch.
    (client.NodeFencedError, Code.NOT_LEADER_OR_FOLLOWER),
    (client.NodeNotRegisteredError, Code.NOT_LEADER_OR_FOLLOWER),
    (client.WriterClosedError, Code.NOT_LEADER_OR_FOLLOWER),
)


def code_of(error: BaseException) -> Code:
    """Return the code for an error, `STORAGE_ERROR` for an unknown one."""
    if isinstance(error, KafkaError):
        return error.code
    return next((code for kind, code in _CODES if isinstance(error, kind)), Code.STORAGE_ERROR)
