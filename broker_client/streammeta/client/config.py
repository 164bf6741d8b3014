"""Configuration of writer and reader, the upload observer, and the statistics of a reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from streammeta.client.arguments import at_least, check_fields, seconds
from streammeta.storage.object_format.index_block import StreamRange

_MIB = 1024 * 1024

RECORD_OVERHEAD = 64
"""Bytes that a record costs in addition to its payload, for the buffer's limit."""

ACK_OVERHEAD = 256
"""Bytes that an append costs until it is settled."""

RUN_OVERHEAD = 1024
"""Bytes that a stream costs in each of its batches."""


UPLOAD_BYTES_MAX = 1_000_000_000
"""Bytes of a batch and of a record: together they fit the 32-bit size of a data block."""

STREAMS_MAX = 20_000
"""Ranges that the controllers accept in one commit."""

TTL_S_MIN, TTL_S_MAX = 1.0, 604_800.0
"""Shortest and longest validity of prepared ids that the controllers grant, in seconds."""

_CHECKS = {
    "upload_bytes": at_least(1, UPLOAD_BYTES_MAX),
    "linger_s": seconds(may_be_zero=True),
    "shared_linger_ms": at_least(0),
    "shared_batch_bytes": at_least(1, UPLOAD_BYTES_MAX),
    "max_streams": at_least(1, STREAMS_MAX),
    "ttl_s": seconds(TTL_S_MIN, TTL_S_MAX),
    "close_deadline_s": seconds(may_be_zero=True),
    "reupload_attempts": at_least(0),
    "block_cache_bytes": at_least(0),
    "index_cache_bytes": at_least(0),
    "max_staleness_s": seconds(may_be_zero=True),
    "verified_bytes": at_least(0),
}
"""Checks of the fields that may be 0, or have other limits than to be positive."""


@dataclass(frozen=True, slots=True)
class WriterConfig:
    """Limits and triggers of a writer. Sizes are in bytes, times in seconds unless named otherwise.

    `durability`: appends are acknowledged when their object is committed ("object"), or when a
    local write-ahead log has them on disk ("wal"). Appends to shared streams are acknowledged when
    their object is committed, and have a buffer of `max_buffer_bytes` of their own.
    """

    max_buffer_bytes: int = 128 * _MIB  # of records, their overhead, and objects being uploaded
    upload_bytes: int = 16 * _MIB  # size of the open batch that starts its upload, with headers
    linger_s: float = 0.25  # latest time from a batch's first record to its upload
    max_streams: int = STREAMS_MAX  # streams in a batch
    split_bytes: int = 8 * _MIB  # a stream with this much payload gets a stream object
    block_bytes: int = 512 * 1024  # payload after which a data block ends
    parallel_uploads: int = 4  # batches prepared or uploading at the same time
    upload_threads: int = 8  # objects uploading at the same time
    ttl_s: float = 600.0  # validity of prepared ids, 1..604800
    commit_deadline_s: float = 60.0  # how long commits, preparations and uploads are each retried
    close_deadline_s: float = 120.0  # default deadline of `close`
    reupload_attempts: int = 3  # new uploads of a batch with expired ids; 0: fail instead
    durability: Literal["object", "wal"] = "object"
    shared_linger_ms: int = 50  # latest time from a shared batch's first record to its upload
    shared_batch_bytes: int = 8 * _MIB  # size of the open shared batch that starts its upload

    def __post_init__(self) -> None:
        """Reject contradictory limits."""
        check_fields(self, _CHECKS)
        # A smaller buffer could never fill a batch, or accept any record.
        least = max(self.upload_bytes, RUN_OVERHEAD + RECORD_OVERHEAD + ACK_OVERHEAD)
        if self.max_buffer_bytes < least:
            raise ValueError(
                f"max_buffer_bytes is {self.max_buffer_bytes}, expected at least {least}:"
                f" upload_bytes, {self.upload_bytes}, and the overhead of a record"
            )
        if self.durability not in ("object", "wal"):
            raise ValueError(f"durability is {self.durability!r}, expected 'object' or 'wal'")

    def check_log(self, log: object | None) -> None:
        """Raise `ValueError` unless there is a write-ahead log if, and only if, one is wanted."""
        # A forgotten log would silently weaken the durability.
        if (self.durability == "wal") != (log is not None):
            given = "no log is given" if log is None else "a log is given"
            raise ValueError(f"durability is {self.durability!r}, but {given}")


class UploadObserver(Protocol):
    """Callbacks of a `StreamWriter` about its uploads. The upload waits for each of them.

    Calls about one batch come in the order of the methods below. A batch whose objects expired
    starts over with new ids. An observer's exception is logged and changes nothing.
    """

    async def on_prepared(self, object_ids: Sequence[int], deadline_ms: int) -> None:
        """A batch has ids. Uncommitted ones expire at `deadline_ms`, by the leader's clock."""

    async def on_uploaded(self, keys: Sequence[str]) -> None:
        """The objects with these keys are in the store, and not yet committed."""

    async def on_committed(self, object_ids: Sequence[int], ranges: Sequence[StreamRange]) -> None:
        """The metadata contains these objects with these ranges."""

    async def on_rejected(self, object_ids: Sequence[int], error: Exception) -> None:
        """These objects are not known to be committed. Without a commit they expire."""


class SilentObserver:
    """An observer that does nothing."""

    async def on_prepared(self, object_ids: Sequence[int], deadline_ms: int) -> None:
        """Do nothing."""

    async def on_uploaded(self, keys: Sequence[str]) -> None:
        """Do nothing."""

    async def on_committed(self, object_ids: Sequence[int], ranges: Sequence[StreamRange]) -> None:
        """Do nothing."""

    async def on_rejected(self, object_ids: Sequence[int], error: Exception) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    """Limits of a reader. Sizes are in bytes, times in seconds unless named otherwise.

    A reader uses at most `index_cache_bytes`, `block_cache_bytes` and `read_bytes` together, in
    addition to returned records and, while `read_streams` is used, `bulk_bytes` and their records.
    A larger single block is read alone. An object of at most `verified_bytes` with a recorded
    checksum is read from end to end, 4 MiB at a time per thread, before any of its blocks is
    returned. 0 disables that. In larger objects a read does not detect changed payload bytes, but
    compaction and `reconcile --deep` do.
    """

    index_cache_bytes: int = 64 * _MIB  # indexes kept for the next read
    block_cache_bytes: int = 64 * _MIB  # prefetched and partly read blocks
    read_bytes: int = 128 * _MIB  # blocks in flight, and their records
    readahead_bytes: int = 512 * 1024  # initial prefetch window of a sequential reader
    max_readahead_bytes: int = 32 * _MIB  # largest window; at most half of the block cache
    max_slices: int = 100_000  # cached slices: parts of streams and their objects
    max_staleness_s: float = 5.0  # maximum age of a slice without a healthy watch; 0: unused
    poll_interval_s: float = 1.0  # poll interval of waiting reads while the watch is down
    bulk_bytes: int = 64 * _MIB  # blocks of one group of `read_streams`
    verified_bytes: int = 128 * 1024  # objects up to this size are read whole once and compared
    fetch_threads: int = 8  # requests to the store at the same time
    request_timeout_s: float = 30.0  # of one request to the store, retries included
    deadline_s: float = 60.0  # of one call, unless the call has its own

    def __post_init__(self) -> None:
        """Reject contradictory limits."""
        check_fields(self, _CHECKS)


@dataclass(slots=True)
class ReaderStats:
    """Counters of a reader. `requests` and `bytes_fetched` count traffic with the object store."""

    requests: int = 0
    bytes_fetched: int = 0
    indexes_fetched: int = 0
    index_hits: int = 0
    block_hits: int = 0  # requested blocks that were in memory or in flight
    block_misses: int = 0
    blocks_read_ahead: int = 0
    blocks_evicted_unread: int = 0  # prefetched without use
    metadata_hits: int = 0  # ranges whose objects were known
    lookups: int = 0  # ranges looked up at the controllers
    vanished_objects: int = 0  # objects that were deleted before they were read
    lost_offsets: int = 0  # skipped offsets that their writer abandoned
