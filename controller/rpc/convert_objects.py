"""ObjectService's messages, from protobuf to requests of the map and back."""

from typing import cast

from controller.errors import InvalidRequestError
from controller.metadata import answers, requests, values
from controller.rpc.convert import column_in, error_out, node_identity, page_request
from proto import common_pb2
from proto import objects_pb2 as pb


def prepare_objects_in(message: pb.PrepareObjectsRequest) -> requests.PrepareObjects:
    """Read PrepareObjects."""
    return requests.PrepareObjects(
        request_id=message.request_id,
        node=node_identity(message.node),
        count=message.count,
        ttl_ms=message.ttl_ms,
    )


def prepare_objects_out(answer: answers.PrepareObjectsAnswer) -> pb.PrepareObjectsResponse:
    """Write the answer to PrepareObjects."""
    return pb.PrepareObjectsResponse(
        error=error_out(answer.error),
        first_object_id=answer.first_object_id,
        deadline_ms=answer.deadline_ms,
    )


def commit_stream_set_object_in(
    message: pb.CommitStreamSetObjectRequest,
) -> requests.CommitStreamSetObject:
    """Read CommitStreamSetObject; a compaction is refused, it is not built in this version."""
    if message.compacted_object_ids:
        raise InvalidRequestError(
            "compacted_object_ids", "compaction is not built in this version; leave it empty"
        )
    return requests.CommitStreamSetObject(
        request_id=message.request_id,
        node=node_identity(message.node),
        object_id=message.object_id,
        order_id=message.order_id,
        object_size=message.object_size,
        attributes=message.attributes,
        ranges=_ranges_in(message.ranges),
        stream_objects=_stream_objects_in(message.stream_objects),
        failover=message.failover,
        on_conflict=_on_conflict_in(message.on_conflict),
    )


def commit_stream_set_object_out(
    answer: answers.CommitStreamSetObjectAnswer,
) -> pb.CommitStreamSetObjectResponse:
    """Write the answer to CommitStreamSetObject."""
    return pb.CommitStreamSetObjectResponse(
        error=error_out(answer.error),
        range_errors=answer.range_errors.tolist(),
        stream_object_errors=answer.stream_object_errors.tolist(),
    )


def get_objects_in(message: pb.GetObjectsRequest) -> requests.GetObjects:
    """Read GetObjects."""
    return requests.GetObjects(
        queries=tuple(
            requests.ObjectQuery(query.stream_id, query.start_offset, query.end_offset, query.limit)
            for query in message.queries
        )
    )


def get_objects_out(answer: answers.GetObjectsAnswer) -> pb.GetObjectsResponse:
    """Write the answer to GetObjects."""
    return pb.GetObjectsResponse(results=[_object_list(result) for result in answer.results])


def describe_objects_in(message: pb.DescribeObjectsRequest) -> requests.DescribeObjects:
    """Read DescribeObjects."""
    return requests.DescribeObjects(
        object_ids=tuple(message.object_ids), page=page_request(message.page)
    )


def describe_objects_out(answer: answers.DescribeObjectsAnswer) -> pb.DescribeObjectsResponse:
    """Write the answer to DescribeObjects."""
    return pb.DescribeObjectsResponse(
        objects=[_object_description(one) for one in answer.objects],
        next_page_token=answer.next_page_token,
        total=answer.total,
    )


def check_objects_in(message: pb.CheckObjectsRequest) -> requests.CheckObjects:
    """Read CheckObjects."""
    return requests.CheckObjects(object_ids=tuple(message.object_ids))


def check_objects_out(
    answer: answers.CheckObjectsAnswer, cluster_id: str
) -> pb.CheckObjectsResponse:
    """Write the answer to CheckObjects, with the name of the cluster whose map it is."""
    return pb.CheckObjectsResponse(
        states=[cast(common_pb2.ObjectState.ValueType, int(state)) for state in answer.states],
        next_object_id=answer.next_object_id,
        cluster_id=cluster_id,
    )


def _ranges_in(message: pb.RangeColumns) -> values.RangeColumns:
    return values.RangeColumns(
        stream_id=column_in(message.stream_id),
        stream_epoch=column_in(message.stream_epoch),
        start_offset=column_in(message.start_offset),
        end_offset=column_in(message.end_offset),
    )


def _stream_objects_in(message: pb.StreamObjectColumns) -> values.StreamObjectColumns:
    return values.StreamObjectColumns(
        object_id=column_in(message.object_id),
        object_size=column_in(message.object_size),
        stream_id=column_in(message.stream_id),
        stream_epoch=column_in(message.stream_epoch),
        start_offset=column_in(message.start_offset),
        end_offset=column_in(message.end_offset),
        attributes=column_in(message.attributes),
    )


def _on_conflict_in(value: int) -> values.OnConflict:
    try:
        return values.OnConflict(value)
    except ValueError:
        raise InvalidRequestError(
            "on_conflict", f"{value}; wanted REJECT_ALL (0) or ACCEPT_VALID (1)"
        ) from None


def _object_list(result: answers.ObjectList) -> pb.ObjectList:
    return pb.ObjectList(
        error=error_out(result.error),
        objects=[
            pb.ObjectSlice(
                object_id=one.object_id,
                kind=cast(common_pb2.ObjectKind.ValueType, int(one.kind)),
                start_offset=one.start_offset,
                end_offset=one.end_offset,
                object_size=one.object_size,
                attributes=one.attributes,
            )
            for one in result.objects
        ],
        stream_start_offset=result.stream_start_offset,
        stream_end_offset=result.stream_end_offset,
    )


def _object_description(one: answers.ObjectDescription) -> pb.ObjectDescription:
    return pb.ObjectDescription(
        object_id=one.object_id,
        state=cast(common_pb2.ObjectState.ValueType, int(one.state)),
        kind=cast(common_pb2.ObjectKind.ValueType, int(one.kind)),
        object_size=one.object_size,
        timestamp_ms=one.timestamp_ms,
        attributes=one.attributes,
        node_id=one.node_id,
        stream_id=one.stream_id,
        ranges=pb.RangeColumns(
            stream_id=one.ranges.stream_id.tolist(),
            start_offset=one.ranges.start_offset.tolist(),
            end_offset=one.ranges.end_offset.tolist(),
        ),
    )
