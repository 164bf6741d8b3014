"""StreamService's messages, from protobuf to requests of the map and back."""

from collections.abc import Iterable
from typing import cast

from streammeta.controller.metadata import answers, requests
from streammeta.controller.rpc.convert import (
    complete,
    error_out,
    node_identity,
    optional_out,
    page_request,
    require,
    tags_in,
    tags_out,
)
from streammeta.v1 import common_pb2
from streammeta.v1 import streams_pb2 as pb


def create_streams_in(message: pb.CreateStreamsRequest) -> requests.CreateStreams:
    """Read CreateStreams."""
    return requests.CreateStreams(
        request_id=message.request_id,
        node=node_identity(message.node),
        streams=tuple(requests.NewStream(tags_in(stream.tags)) for stream in message.streams),
    )


def create_streams_out(answer: answers.CreateStreamsAnswer) -> pb.CreateStreamsResponse:
    """Write the answer to CreateStreams."""
    return pb.CreateStreamsResponse(error=error_out(answer.error), stream_ids=answer.stream_ids)


def open_streams_in(message: pb.OpenStreamsRequest) -> requests.OpenStreams:
    """Read OpenStreams."""
    return requests.OpenStreams(
        request_id=message.request_id,
        node=node_identity(message.node),
        streams=tuple(
            requests.StreamToOpen(stream.stream_id, stream.stream_epoch, tags_in(stream.tags))
            for stream in complete(message.streams, "streams", "stream_id", "stream_epoch")
        ),
    )


def open_streams_out(answer: answers.OpenStreamsAnswer) -> pb.OpenStreamsResponse:
    """Write the answer to OpenStreams."""
    return pb.OpenStreamsResponse(
        streams=[
            pb.OpenedStream(
                error=error_out(stream.error),
                start_offset=optional_out(stream.start_offset),
                next_offset=optional_out(stream.next_offset),
            )
            for stream in answer.streams
        ]
    )


def close_streams_in(message: pb.CloseStreamsRequest) -> requests.CloseStreams:
    """Read CloseStreams."""
    return requests.CloseStreams(
        request_id=message.request_id,
        node=node_identity(message.node),
        streams=tuple(
            requests.StreamToClose(
                stream.stream_id,
                stream.stream_epoch,
                stream.end_offset if stream.HasField("end_offset") else None,
            )
            for stream in complete(message.streams, "streams", "stream_id", "stream_epoch")
        ),
    )


def close_streams_out(answer: answers.StreamErrorsAnswer) -> pb.CloseStreamsResponse:
    """Write the answer to CloseStreams."""
    return pb.CloseStreamsResponse(errors=[error_out(error) for error in answer.errors])


def trim_streams_in(message: pb.TrimStreamsRequest) -> requests.TrimStreams:
    """Read TrimStreams."""
    return requests.TrimStreams(
        request_id=message.request_id,
        node=node_identity(message.node),
        streams=tuple(
            requests.StreamToTrim(stream.stream_id, stream.stream_epoch, stream.new_start_offset)
            for stream in complete(
                message.streams, "streams", "stream_id", "stream_epoch", "new_start_offset"
            )
        ),
    )


def trim_streams_out(answer: answers.StreamErrorsAnswer) -> pb.TrimStreamsResponse:
    """Write the answer to TrimStreams."""
    return pb.TrimStreamsResponse(errors=[error_out(error) for error in answer.errors])


def delete_streams_in(message: pb.DeleteStreamsRequest) -> requests.DeleteStreams:
    """Read DeleteStreams."""
    return requests.DeleteStreams(
        request_id=message.request_id,
        node=node_identity(message.node),
        streams=tuple(
            requests.StreamToDelete(stream.stream_id, stream.stream_epoch)
            for stream in complete(message.streams, "streams", "stream_id", "stream_epoch")
        ),
    )


def delete_streams_out(answer: answers.StreamErrorsAnswer) -> pb.DeleteStreamsResponse:
    """Write the answer to DeleteStreams."""
    return pb.DeleteStreamsResponse(errors=[error_out(error) for error in answer.errors])


def get_opening_streams_in(message: pb.GetOpeningStreamsRequest) -> requests.GetOpeningStreams:
    """Read GetOpeningStreams."""
    return requests.GetOpeningStreams(
        node=node_identity(message.node),
        failover=message.failover,
        page=page_request(message.page),
    )


def get_opening_streams_out(
    answer: answers.GetOpeningStreamsAnswer,
) -> pb.GetOpeningStreamsResponse:
    """Write the answer to GetOpeningStreams."""
    return pb.GetOpeningStreamsResponse(
        error=error_out(answer.error),
        streams=[
            pb.OpeningStream(
                stream_id=stream.stream_id,
                epoch=stream.epoch,
                start_offset=stream.start_offset,
                end_offset=stream.end_offset,
                upload_end_offset=optional_out(stream.upload_end_offset),
            )
            for stream in answer.streams
        ],
        next_page_token=answer.next_page_token,
    )


def abandon_uploads_in(message: pb.AbandonUploadsRequest) -> requests.AbandonUploads:
    """Read AbandonUploads."""
    require(message, "", "node_id")
    return requests.AbandonUploads(
        request_id=message.request_id,
        node_id=message.node_id,
        stream_ids=tuple(message.stream_ids),
    )


def abandon_uploads_out(answer: answers.AbandonUploadsAnswer) -> pb.AbandonUploadsResponse:
    """Write the answer to AbandonUploads."""
    return pb.AbandonUploadsResponse(
        error=error_out(answer.error), abandoned=_pending_uploads(answer.abandoned)
    )


def describe_streams_in(message: pb.DescribeStreamsRequest) -> requests.DescribeStreams:
    """Read DescribeStreams."""
    return requests.DescribeStreams(
        stream_ids=tuple(message.stream_ids),
        owner_node_id=message.owner_node_id if message.HasField("owner_node_id") else None,
        include_ranges=message.include_ranges,
        include_stream_objects=message.include_stream_objects,
        page=page_request(message.page),
    )


def describe_streams_out(answer: answers.DescribeStreamsAnswer) -> pb.DescribeStreamsResponse:
    """Write the answer to DescribeStreams."""
    return pb.DescribeStreamsResponse(
        streams=[_description(stream) for stream in answer.streams],
        next_page_token=answer.next_page_token,
        total=answer.total,
    )


def _description(stream: answers.StreamDescription) -> pb.StreamDescription:
    return pb.StreamDescription(
        stream_id=stream.stream_id,
        epoch=optional_out(stream.epoch),
        range_index=optional_out(stream.range_index),
        start_offset=stream.start_offset,
        end_offset=stream.end_offset,
        state=cast(common_pb2.StreamState.ValueType, int(stream.state)),
        node_id=optional_out(stream.node_id),
        tags=tags_out(stream.tags),
        ranges=[
            pb.StreamRange(
                range_index=one.range_index,
                epoch=one.epoch,
                start_offset=one.start_offset,
                end_offset=one.end_offset,
                node_id=one.node_id,
            )
            for one in stream.ranges
        ],
        stream_objects=[
            pb.StreamObjectRange(
                object_id=one.object_id, start_offset=one.start_offset, end_offset=one.end_offset
            )
            for one in stream.stream_objects
        ],
        pending_uploads=_pending_uploads(stream.pending_uploads),
        lost=[pb.OffsetRange(start_offset=start, end_offset=end) for start, end in stream.lost],
    )


def _pending_uploads(uploads: Iterable[answers.PendingUpload]) -> list[pb.PendingUpload]:
    return [
        pb.PendingUpload(
            node_id=one.node_id,
            stream_id=one.stream_id,
            start_offset=one.start_offset,
            end_offset=one.end_offset,
        )
        for one in uploads
    ]
