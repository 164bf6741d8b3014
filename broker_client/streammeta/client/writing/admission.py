"""Admission of appends: the checks before anything is buffered.

An append, or stream, that no object can contain must not fail the others of its batch. It is
rejected alone and leaves the writer unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from streammeta.client.arguments import INT64_MAX, check_int, check_items, check_kind
from streammeta.client.config import RUN_OVERHEAD, UPLOAD_BYTES_MAX, WriterConfig
from streammeta.client.errors import LimitExceededError, StreamNotOpenedError
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


# -- Streams attached to a writer: which ids accept appends, and where each stream stands


class AttachedStreams:
    """Attached streams by id."""

    def __init__(self) -> None:
        self._streams: dict[int, WriterStream] = {}
        self.get = self._streams.get
        """Find the stream of an id, None if it is not attached."""

    def attach(self, streams: Iterable[OpenedStream]) -> None:
        """Attach `streams` from their next offsets on. See `StreamWriter.attach`."""
        opened = check_streams(streams)
        self.require_attachable(stream.stream_id for stream in opened)
        for stream in opened:
            self._streams[stream.stream_id] = WriterStream(
                stream.stream_id,
                stream.epoch,
                stream.next_offset,
                acknowledged=stream.next_offset,
            )

    def require_attachable(self, stream_ids: Iterable[int]) -> None:
        """Raise `ValueError` for a stream that has records in flight and has not failed."""
        for stream in map(self._streams.get, stream_ids):
            if stream is not None and stream.failure is None and stream.is_pending:
                raise ValueError(
                    f"stream {stream.stream_id} has records that are not acknowledged yet. Flush"
                    " before attaching it again"
                )

    def detach(self, stream_ids: Iterable[int]) -> None:
        """Detach streams. Ids that are not attached are ignored."""
        for stream_id in check_items("stream_ids", stream_ids, "a sequence of stream ids"):
            self._streams.pop(stream_id, None)

    def require(self, stream_id: int, subject: str) -> WriterStream:
        """Return an attached stream, or raise `StreamNotOpenedError` for `subject`."""
        stream = self._streams.get(stream_id)
        if stream is None:
            check_int("stream_id", stream_id)
            raise StreamNotOpenedError(subject, detail="not attached")
        return stream

    def describe_pending(self) -> str:
        """Describe how much is not known to be committed, e.g. "3 offsets of 1 streams"."""
        pending = [stream for stream in self._streams.values() if stream.is_pending]
        offsets = sum(stream.next_offset - stream.acknowledged for stream in pending)
        return f"{offsets} offsets of {len(pending)} streams"
