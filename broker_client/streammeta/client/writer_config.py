"""The bounds and triggers of a writer, and what of them could never work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streammeta.client.arguments import at_least, check_fields, seconds
from streammeta.client.upload_batch import ACK_OVERHEAD, RECORD_OVERHEAD, RUN_OVERHEAD

_MIB = 1024 * 1024

UPLOAD_BYTES_MAX = 1_000_000_000
"""Bytes of a batch and of a record: both together fit the 32-bit size of a data block."""

STREAMS_MAX = 20_000
"""Ranges that the controllers take in one commit."""

TTL_MS_MIN, TTL_MS_MAX = 1_000, 604_800_000
"""Time that the controllers let prepared ids wait for their commit."""

_CHECKS = {
    "max_buffer_bytes": at_least(1),
    "upload_bytes": at_least(1, UPLOAD_BYTES_MAX),
    "linger": seconds(may_be_zero=True),
    "max_streams": at_least(1, STREAMS_MAX),
    "split_bytes": at_least(1),
    "block_bytes": at_least(1),
    "parallel_uploads": at_least(1),
    "upload_threads": at_least(1),
    "ttl_ms": at_least(TTL_MS_MIN, TTL_MS_MAX),
    "commit_deadline": seconds(),
    "close_deadline": seconds(may_be_zero=True),
    "reupload_attempts": at_least(0),
}


@dataclass(frozen=True, slots=True)
class WriterConfig:
    """Bounds and triggers of a writer; sizes in bytes, times in seconds unless named otherwise.

    `durability`: appends are acknowledged when the object that holds them is committed ("object"),
    or when a local write-ahead log has them on disk ("wal").
    """

    max_buffer_bytes: int = 128 * _MIB  # all that is held: records, overhead, objects uploading
    upload_bytes: int = 16 * _MIB  # this much in the open batch, headers included, uploads it
    linger: float = 0.25  # a batch uploads this long after its first record, at the latest
    max_streams: int = STREAMS_MAX  # a batch has no more
    split_bytes: int = 8 * _MIB  # a stream with this much payload gets a stream object
    block_bytes: int = 512 * 1024  # payload after which a data block closes
    parallel_uploads: int = 4  # batches prepared or uploading at the same time
    upload_threads: int = 8  # objects uploading at the same time
    ttl_ms: int = 600_000  # how long prepared ids stay valid, 1000..604800000
    commit_deadline: float = 60.0  # how long a commit, and the call for its ids, is repeated
    close_deadline: float = 120.0  # how long `close` waits unless told otherwise
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
