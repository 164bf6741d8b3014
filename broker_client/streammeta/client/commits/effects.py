"""Uploads with effects: values put and streams trimmed if and only if the upload is committed.

For `CommitPipeline.upload_with_effects`. The cluster must be at feature level 3. Leaders of older
versions commit the upload without the effects, which their answer shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streammeta.client.arguments import check_kind
from streammeta.client.commits.messages import Upload
from streammeta.client.errors import ProtocolViolationError
from streammeta.v1 import common_pb2, kv_pb2, objects_pb2, streams_pb2
from streammeta.v1.common_pb2 import ERROR_CODE_NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueToPut:
    """A value of a key. Without `overwrite` or `expected_version` the key must be absent.

    With `expected_version` only if the key is at that version, 0 for an absent key.
    """

    key: str
    value: bytes
    namespace: str = ""
    overwrite: bool = False
    expected_version: int | None = None


@dataclass(frozen=True, slots=True)
class StreamTrim:
    """The first offset of a stream that stays visible, and the epoch it was opened with.

    The trim stops at the stream's end after the commit, or at `appended_end_offset` if that is
    larger: the end of the appends of the stream's writer.
    """

    stream_id: int
    stream_epoch: int
    new_start_offset: int
    appended_end_offset: int = 0


@dataclass(frozen=True, slots=True)
class PutResult:
    """Outcome of a put: the version of the value, or with KEY_EXIST the conflicting value.

    `version` is 0 if there is no conflict, or in a retry if the value was replaced since.
    """

    error: int
    version: int
    value: bytes = b""

    @property
    def is_conflict(self) -> bool:
        """True if the value was not put, because the key has another version."""
        return self.error != ERROR_CODE_NONE


@dataclass(frozen=True, slots=True)
class EffectsVerdict:
    """Outcome of an upload with its effects: all of it is applied, or nothing.

    `put_results` and `trim_errors` are empty if the upload itself was rejected. `trim_starts` has
    the resulting start offset of each trimmed stream. It is empty unless the upload is committed,
    and in answers of leaders of older versions.
    """

    error: int
    range_errors: Sequence[int] = ()
    put_results: Sequence[PutResult] = ()
    trim_errors: Sequence[int] = ()
    trim_starts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class UploadWithEffects:
    """An upload, values to put and streams of the node to trim, applied together or not at all."""

    upload: Upload
    puts: Sequence[ValueToPut] = ()
    trims: Sequence[StreamTrim] = ()

    def __post_init__(self) -> None:
        check_kind("upload", self.upload, Upload, "an Upload")


@dataclass(frozen=True, slots=True)
class EffectsCommit:
    """The commit of an upload with effects."""

    asked: UploadWithEffects

    def request(self, node: common_pb2.NodeIdentity) -> objects_pb2.CommitStreamSetObjectRequest:
        """Build the request. One bad row, value or trim rejects all of it."""
        upload = self.asked.upload
        request = objects_pb2.CommitStreamSetObjectRequest(
            node=node,
            object_id=upload.object_id,
            object_size=upload.object_size,
            ranges=objects_pb2.RangeColumns(
                stream_id=upload.stream_ids,
                stream_epoch=upload.stream_epochs,
                start_offset=upload.start_offsets,
                end_offset=upload.end_offsets,
            ),
            # Effects of a partly accepted upload would be meaningless.
            on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
            kv_puts=map(put_message, self.asked.puts),
            trims=map(_trim_message, self.asked.trims),
        )
        if upload.min_timestamp_ms >= 0:
            request.min_timestamp_ms = upload.min_timestamp_ms
            request.max_timestamp_ms = upload.max_timestamp_ms

        if upload.crc32c >= 0:
            request.crc32c = upload.crc32c
        return request

    def verdict(self, answer: objects_pb2.CommitStreamSetObjectResponse) -> EffectsVerdict:
        """Translate the answer.

        Raises `ProtocolViolationError` if the upload is committed without its effects.
        """
        got = (len(answer.kv_results), len(answer.trim_errors))
        wanted = (len(self.asked.puts), len(self.asked.trims))
        # A rejected upload may have no verdicts on its effects, a committed one must.
        if got != wanted and (answer.error == ERROR_CODE_NONE or got != (0, 0)):
            raise ProtocolViolationError(
                f"commit of object {self.asked.upload.object_id}",
                detail=f"{got} verdicts answer {wanted} values and trims. The leader's version may "
                "not know them, as before the cluster is at feature level 3",
            )

        return EffectsVerdict(
            error=answer.error,
            range_errors=list(answer.range_errors),
            put_results=[PutResult(put.error, put.version, put.value) for put in answer.kv_results],
            trim_errors=list(answer.trim_errors),
            trim_starts=list(answer.trim_start_offsets),
        )


def put_message(item: ValueToPut) -> kv_pb2.KVToPut:
    """Return the protobuf message of a value to put."""
    return kv_pb2.KVToPut(
        namespace=item.namespace,
        key=item.key,
        value=item.value,
        overwrite=item.overwrite,
        expected_version=item.expected_version,
    )


def _trim_message(item: StreamTrim) -> streams_pb2.StreamToTrim:
    return streams_pb2.StreamToTrim(
        stream_id=item.stream_id,
        stream_epoch=item.stream_epoch,
        new_start_offset=item.new_start_offset,
        appended_end_offset=item.appended_end_offset,
    )
