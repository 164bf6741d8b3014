"""Admission of appends: the checks before anything is buffered.

An append, or stream, that no object can contain must not fail the others of its batch. It is
rejected alone and leaves the writer unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from streammeta.client.arguments import INT64_MAX, check_int, check_items, check_kind
from streammeta.client.config import RUN_OVERHEAD, UPLOAD_BYTES_MAX, WriterConfig
from streammeta.client.errors import LimitExceededError
from streammeta.client.nodes.session import OpenedStream
from streammeta.client.wal.disk.record_log import RecordLog
from streammeta.client.writing.record_buffer import WriterStream


def check_streams(streams: Iterable[OpenedStream]) -> Sequence[OpenedStream]:
    """Return streams to attach, after checking that an object can contain their numbers."""
    wanted = "streams as `open_streams(...).require_all().values()` has them"
    opened = check_items("streams", streams, wanted)
    for index, stream in enumerate(opened):
        check_kind(f"streams[{index}]", stream, OpenedStream, f"an OpenedStream: {wanted}")
        for name in ("stream_id", "epoch", "next_offset"):
            check_int(f"streams[{index}].{name}", getattr(stream, name))
    return opened


def check_offsets(stream: WriterStream, offsets: int) -> None:
    """Require that a stream has this many offsets left.

    Raises:
        LimitExceededError: the stream has fewer.
    """
    if offsets > INT64_MAX - stream.next_offset:
        raise LimitExceededError(
            f"append to stream {stream.stream_id}",
            detail=f"{offsets} offsets from {stream.next_offset} on would end above {INT64_MAX},"
            " the largest. Write to another stream",
        )


def check_fits(
    stream_id: int, cost: int, size: int, config: WriterConfig, log: RecordLog | None
) -> None:
    """Require that an append of `size` bytes, which costs `cost` bytes of the buffer, ever fits.

    Raises:
        LimitExceededError: a buffer, object or log is too small for it.
    """
    # Each limit has its holder for the message: the caller must know which setting to raise.
    limits = [
        (cost + RUN_OVERHEAD, "the buffer has", config.max_buffer_bytes),
        (size, "an object at most", UPLOAD_BYTES_MAX),
    ]

    if log is not None:
        limits.append((size, "the log has", log.max_record_bytes))

    for taken, holder, most in limits:
        if taken > most:
            raise LimitExceededError(
                f"record of stream {stream_id}",
                detail=f"it takes {taken} bytes, {holder} {most}",
            )
