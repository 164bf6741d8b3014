"""Errors of a partition log; each says what is wrong and what would be right."""

from __future__ import annotations


class PartitionError(Exception):
    """Base of all errors of this package."""


class CorruptBatchError(PartitionError):
    """The bytes are no record batch of format 2, or their checksum does not hold."""


class InvalidBatchError(PartitionError):
    """A well-formed batch that producers may not send."""


class UnsupportedBatchError(PartitionError):
    """A batch of a kind that is not offered: transactional ones."""


class InvalidTimestampError(PartitionError):
    """The records of a batch are later than the topic allows."""


class BatchTooLargeError(PartitionError):
    """A batch is larger than the topic allows."""


class OutOfOrderSequenceError(PartitionError):
    """A sequence number does not continue that of its producer."""


class InvalidProducerEpochError(PartitionError):
    """A producer epoch is older than one that was seen."""


class OffsetOutOfRangeError(PartitionError):
    """An offset lies before the start of the log, or behind its end."""


class SegmentError(PartitionError):
    """A segment can't begin at the offset asked for."""


class MetaStreamClosedError(PartitionError):
    """A change of a MetaStream came after it was closed."""


class DamagedPartitionError(PartitionError):
    """A value of a partition's MetaStream can't be read; nothing older is used in its place."""


class PartitionFailedError(PartitionError):
    """An append failed, so the log takes no more: it must be opened again with a larger epoch."""


class PartitionClosedError(PartitionError):
    """The log was closed, or another owner has opened it."""
