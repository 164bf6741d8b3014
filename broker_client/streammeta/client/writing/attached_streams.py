"""Streams attached to a writer: which ids accept appends, and where each stream stands."""

from __future__ import annotations

from collections.abc import Iterable

from streammeta.client.arguments import check_int, check_items
from streammeta.client.errors import StreamNotOpenedError
from streammeta.client.nodes.session import OpenedStream
from streammeta.client.writing.admission import check_streams
from streammeta.client.writing.record_buffer import WriterStream


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
