"""Errors of a partition log. Each names the problem and the expected value."""

from __future__ import annotations


class PartitionError(Exception):
    """Base of all errors of this package."""


class CorruptBatchError(PartitionError):
    """The bytes are not a record batch of format 2, or its checksum does not match."""


class InvalidBatchError(PartitionError):
    """A well-formed batch that producers may not send."""


class UnsupportedBatchError(PartitionError):
    """An unsupported kind of batch: a transactional one."""


class InvalidTimestampError(PartitionError):
    """The records of a batch are later than the topic allows."""


class BatchTooLargeError(PartitionError):
    """A batch is larger than the topic allows."""


class OutOfOrderSequenceError(PartitionError):
    """A sequence number does not continue its producer's sequence."""


class InvalidProducerEpochError(PartitionError):
    """A producer epoch is older than a known one."""


class OffsetOutOfRangeError(PartitionError):
    """An offset is before the start of the log, or after its end."""


class SegmentError(PartitionError):
    """A segment can't begin at the requested offset."""


class MetaStreamClosedError(PartitionError):
    """A MetaStream was changed after it was closed."""


class DamagedPartitionError(PartitionError):
    """A value of a partition's MetaStream is unreadable. No older value replaces it."""


class PartitionFailedError(PartitionError):
    """An append failed. The log must be opened again with a larger epoch."""


class PartitionClosedError(PartitionError):
    """The log was closed, or another owner has opened it."""
