"""Configuration of writer and reader, the upload observer, and the statistics of a reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from streammeta.client.arguments import at_least, check_fields, seconds
from streammeta.storage.object_format.index_block import StreamRange

_MIB = 1024 * 1024

RECORD_OVERHEAD = 64
"""Bytes that a record costs beside its payload, for the buffer's bound."""

ACK_OVERHEAD = 256
"""Bytes that an append costs until its caller is answered."""

RUN_OVERHEAD = 1024
"""Bytes that a stream costs in each batch that it is in."""


UPLOAD_BYTES_MAX = 1_000_000_000
"""Bytes of a batch and of a record: both together fit the 32-bit size of a data block."""

STREAMS_MAX = 20_000
"""Ranges that the controllers take in one commit."""

TTL_S_MIN, TTL_S_MAX = 1.0, 604_800.0
"""Shortest and longest validity of prepared ids that the controllers grant, in seconds."""

_CHECKS = {
    "upload_bytes": at_least(1, UPLOAD_BYTES_MAX),
    "linger_s": seconds(may_be_zero=True),
    "max_streams": at_least(1, STREAMS_MAX),
    "ttl_s": seconds(TTL_S_MIN, TTL_S_MAX),
    "close_deadline_s": seconds(may_be_zero=True),
    "reupload_attempts": at_least(0),
    "block_cache_bytes": at_least(0),
    "index_cache_bytes": at_least(0),
    "max_staleness_s": seconds(may_be_zero=True),
    "verified_bytes": at_least(0),
}
"""Checks of the fields that may be 0, or have other bounds than to be positive."""


@dataclass(frozen=True, slots=True)
class WriterConfig:
    """Bounds and triggers of a writer; sizes in bytes, times in seconds unless named otherwise.

    `durability`: appends are acknowledged when the object that holds them is committed ("object"),
    or when a local write-ahead log has them on disk ("wal").
    """

    max_buffer_bytes: int = 128 * _MIB  # all that is held: records, overhead, objects uploading
    upload_bytes: int = 16 * _MIB  # this much in the open batch, headers included, uploads it
    linger_s: float = 0.25  # a batch uploads this long after its first record, at the latest
    max_streams: int = STREAMS_MAX  # a batch has no more
    split_bytes: int = 8 * _MIB  # a stream with this much payload gets a stream object
    block_bytes: int = 512 * 1024  # payload after which a data block closes
    parallel_uploads: int = 4  # batches prepared or uploading at the same time
    upload_threads: int = 8  # objects uploading at the same time
    ttl_s: float = 600.0  # validity of prepared ids, 1..604800
    commit_deadline_s: float = 60.0  # how long a commit, its ids, and an upload are each repeated
    close_deadline_s: float = 120.0  # how long `close` waits unless told otherwise
    reupload_attempts: int = 3  # new uploads of a batch whose ids expired; 0: fail instead
    durability: Literal["object", "wal"] = "object"

    def __post_init__(self) -> None:
        """Refuse bounds that could never be met."""
        check_fields(self, _CHECKS)
        least = max(self.upload_bytes, RUN_OVERHEAD + RECORD_OVERHEAD + ACK_OVERHEAD)
        if self.max_buffer_bytes < least:
            raise ValueError(
                f"max_buffer_bytes is {self.max_buffer_bytes}, wanted at least {least}:"
                f" upload_bytes, {self.upload_bytes}, and the overhead of a record"
            )
        if self.durability not in ("object", "wal"):
            raise ValueError(f"durability is {self.durability!r}, wanted 'object' or 'wal'")

    def check_log(self, log: object | None) -> None:
        """Raise `ValueError` unless there is a write-ahead log if, and only if, one is wanted."""
        if (self.durability == "wal") != (log is not None):
            given = "no log is given" if log is None else "a log is given"
            raise ValueError(f"durability is {self.durability!r}, but {given}")


class UploadObserver(Protocol):
    """Callbacks of a `StreamWriter` about its uploads; each is awaited before the upload goes on.

    Calls about one batch come in the order of the methods below; a batch whose objects expired
    starts over with new ids. What an observer raises is logged and changes nothing.
    """

    async def on_prepared(self, object_ids: Sequence[int], deadline_ms: int) -> None:
        """Learn that a batch has ids; uncommitted ones expire at `deadline_ms`, leader's clock."""

    async def on_uploaded(self, keys: Sequence[str]) -> None:
        """Learn that the objects with these keys are in the store, and not yet in the map."""

    async def on_committed(self, object_ids: Sequence[int], ranges: Sequence[StreamRange]) -> None:
        """Learn that the map holds these objects and, of them, these ranges."""

    async def on_refused(self, object_ids: Sequence[int], error: Exception) -> None:
        """Learn that these objects are not known to be committed; else they expire as garbage."""


class SilentObserver:
    """An observer that does nothing."""

    async def on_prepared(self, object_ids: Sequence[int], deadline_ms: int) -> None:
        """Do nothing."""

    async def on_uploaded(self, keys: Sequence[str]) -> None:
        """Do nothing."""

    async def on_committed(self, object_ids: Sequence[int], ranges: Sequence[StreamRange]) -> None:
        """Do nothing."""

    async def on_refused(self, object_ids: Sequence[int], error: Exception) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    """Bounds of a reader; sizes in bytes, times in seconds unless named otherwise.

    A reader holds at most `index_cache_bytes`, `block_cache_bytes` and `read_bytes` together,
    beside what it has handed out and, while `read_streams` is used, `bulk_bytes` and their records.
    A single block that is larger is read all the same, alone. An object of at most
    `verified_bytes` with a recorded checksum is read from end to end, 4 MiB at a time on each
    thread, before any of its blocks is returned; 0 leaves that out. In larger objects a change of
    payload bytes is not seen by a read; compaction and `reconcile --deep` see it.
    """

    index_cache_bytes: int = 64 * _MIB  # indexes kept for the next read
    block_cache_bytes: int = 64 * _MIB  # prefetched and partly read blocks
    read_bytes: int = 128 * _MIB  # blocks in flight, and their records
    readahead_bytes: int = 512 * 1024  # initial prefetch window of a sequential reader
    max_readahead_bytes: int = 32 * _MIB  # its largest; never more than half the block cache
    max_slices: int = 100_000  # cached slices: parts of streams and their objects
    max_staleness_s: float = 5.0  # maximum age of a slice without a healthy watch; 0: no use of it
    poll_interval_s: float = 1.0  # poll interval of waiting reads while the watch is down
    bulk_bytes: int = 64 * _MIB  # blocks that `read_streams` holds at the same time
    verified_bytes: int = 128 * 1024  # objects up to this size are read whole once and compared
    fetch_threads: int = 8  # requests to the store at the same time
    request_timeout_s: float = 30.0  # of one request to the store, with its repetitions
    deadline_s: float = 60.0  # of one call, unless it names another

    def __post_init__(self) -> None:
        """Refuse bounds that could never be met."""
        check_fields(self, _CHECKS)


@dataclass(slots=True)
class ReaderStats:
    """Counts since the reader was made; `requests` and bytes are those of the object store."""

    requests: int = 0
    bytes_fetched: int = 0
    indexes_fetched: int = 0
    index_hits: int = 0
    block_hits: int = 0  # blocks that were in memory, or on their way, when they were wanted
    block_misses: int = 0
    blocks_read_ahead: int = 0
    blocks_evicted_unread: int = 0  # read ahead in vain
    metadata_hits: int = 0  # ranges whose objects were known
    lookups: int = 0  # ranges that the map was asked about
    vanished_objects: int = 0  # objects that were gone when they were wanted
    lost_offsets: int = 0  # passed over, because they were given up and will never be there
