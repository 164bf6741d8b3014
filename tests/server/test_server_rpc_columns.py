"""Fields of requests: columns as bytes, and those that must be set, refused by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from streammeta.controller.errors import ErrorCode, InvalidRequestError
from streammeta.controller.metadata.api.answers import (
    CommitStreamSetObjectAnswer,
    CommitUploadsAnswer,
)
from streammeta.controller.metadata.api.requests import GetKVs
from streammeta.controller.metadata.tables.values import OnConflict, column
from streammeta.controller.rpc.codec.wire_columns import (
    commit_stream_set_object_in,
    commit_stream_set_object_out,
    parse_batch,
    parse_commit,
    uploads_in,
    uploads_out,
)
from streammeta.controller.rpc.services.routes import PLAIN, routes
from streammeta.v1 import (
    columns_pb2,
    common_pb2,
    kv_pb2,
    nodes_pb2,
    objects_pb2,
    quorum_pb2,
    streams_pb2,
)

SCALARS = (FieldDescriptor.TYPE_SFIXED64, FieldDescriptor.TYPE_ENUM)


def commit_request() -> objects_pb2.CommitStreamSetObjectRequest:
    return objects_pb2.CommitStreamSetObjectRequest(
        request_id="r",
        node=common_pb2.NodeIdentity(node_id=1000, node_epoch=3),
        object_id=5,
        order_id=5,
        object_size=1 << 40,
        attributes=-1,
        ranges=objects_pb2.RangeColumns(
            stream_id=[1, 1 << 62], stream_epoch=[0, -1], start_offset=[0, 7], end_offset=[3, 9]
        ),
        stream_objects=objects_pb2.StreamObjectColumns(
            object_id=[6], object_size=[10], stream_id=[3], start_offset=[0], end_offset=[1],
            attributes=[-2], min_timestamp_ms=[-1], max_timestamp_ms=[-1], crc32c=[1 << 31],
        ),
        compacted_object_ids=[1, 2, 3],
        failover=True,
        on_conflict=common_pb2.ON_CONFLICT_ACCEPT_VALID,
        min_timestamp_ms=0,
        max_timestamp_ms=(1 << 63) - 1,
        crc32c=(1 << 32) - 1,
    )  # fmt: skip


def assert_read(data: bytes) -> None:
    """Every field of the request has the value of the message's field."""
    request, wanted = commit_stream_set_object_in(parse_commit(data)), commit_request()
    assert plain(request, wanted) == plain(wanted, wanted)
    assert request.on_conflict is OnConflict.ACCEPT_VALID
    assert not request.ranges.stream_id.flags.writeable


def plain(value: Any, like: Message) -> dict[str, Any]:
    """Return the fields of `value` that a message has, columns as lists.

    A commit is known again by its object: its request id is not read. No recoverer is sent.
    """
    found: dict[str, Any] = {}
    for field in like.DESCRIPTOR.fields:
        if field.name == "request_id" or field.name == "recoverer":
            continue
        part = getattr(value, field.name)
        if field.is_repeated:
            found[field.name] = [int(number) for number in part]
        elif field.message_type is not None:
            found[field.name] = plain(part, getattr(like, field.name))
        else:
            found[field.name] = part
    return found


def unpacked(field: int, values: list[int]) -> bytes:
    """Encode a column of sfixed64 as old protobuf does: one tag a row."""
    tag = bytes([field << 3 | 1])
    return b"".join(tag + value.to_bytes(8, "little", signed=True) for value in values)


def test_packed_columns() -> None:
    assert_read(commit_request().SerializeToString())


def test_unpacked_columns() -> None:
    request = commit_request()
    request.ClearField("compacted_object_ids")
    assert_read(request.SerializeToString() + unpacked(9, [1, 2, 3]))
    request.ranges.ClearField("end_offset")
    nested = unpacked(4, [3, 9])
    more = bytes([7 << 3 | 2, len(nested)]) + nested  # a repeated message field is merged
    assert_read(request.SerializeToString() + more + unpacked(9, [1, 2, 3]))


def test_what_is_not_sent_of_an_objects_content_is_unknown() -> None:
    request = commit_request()
    for name in ("min_timestamp_ms", "max_timestamp_ms", "crc32c"):
        request.ClearField(name)
        request.stream_objects.ClearField(name)
    read = commit_stream_set_object_in(parse_commit(request.SerializeToString()))
    assert (read.min_timestamp_ms, read.max_timestamp_ms, read.crc32c) == (-1, -1, -1)
    assert not len(read.stream_objects.max_timestamp_ms)
    assert not len(read.stream_objects.crc32c)


def test_a_column_in_pieces() -> None:
    request = commit_request()
    request.ClearField("compacted_object_ids")
    pieces = [
        objects_pb2.CommitStreamSetObjectRequest(compacted_object_ids=ids).SerializeToString()
        for ids in ([1], [2, 3])
    ]
    assert_read(request.SerializeToString() + b"".join(pieces))


def test_a_field_of_a_newer_version_is_passed_over() -> None:
    assert_read(commit_request().SerializeToString() + b"\xf8\x3f\x01")


def test_a_column_that_is_cut_names_its_field() -> None:
    cut = columns_pb2.PackedRangeColumns(stream_id=[b"1234567"])
    node = common_pb2.NodeIdentity(node_id=1, node_epoch=1)
    data = columns_pb2.PackedCommitStreamSetObjectRequest(node=node, ranges=cut).SerializeToString()
    with pytest.raises(InvalidRequestError, match=r"ranges\.stream_id.*7"):
        commit_stream_set_object_in(parse_commit(data))


def test_bytes_that_are_no_message() -> None:
    for parse in (parse_commit, parse_batch):
        with pytest.raises(InvalidRequestError, match="3 bytes"):
            parse(b"\xff\xff\xff")


def test_an_unset_enum_names_its_field() -> None:
    request = commit_request()
    request.ClearField("on_conflict")
    with pytest.raises(InvalidRequestError, match=r"on_conflict.*REJECT"):
        commit_stream_set_object_in(parse_commit(request.SerializeToString()))
    view: Any = None
    decode = routes("here", view)["streammeta.v1.ObjectService.CommitStreamObject"].decode
    for operations in ([], [objects_pb2.SOURCE_OPERATION_UNSPECIFIED]):
        merge = objects_pb2.CommitStreamObjectRequest(
            stream_id=0,
            stream_epoch=0,
            node=request.node,
            source_object_ids=[1],
            operations=operations,
        )
        with pytest.raises(InvalidRequestError, match=r"^operations"):
            decode(merge)


def test_an_enum_value_of_a_newer_version_names_its_field() -> None:
    request = commit_request()
    request.on_conflict = 7  # type: ignore[assignment]
    with pytest.raises(InvalidRequestError, match="on_conflict: 7"):
        commit_stream_set_object_in(parse_commit(request.SerializeToString()))


@pytest.mark.parametrize("packs", [True, False])
def test_uploads(packs: bool) -> None:
    columns = objects_pb2.UploadColumns(
        node=common_pb2.NodeIdentity(node_id=1000, node_epoch=3),
        object_id=[7, 8],
        object_size=[10, 11],
        range_count=[1, 2],
        ranges=objects_pb2.RangeColumns(
            stream_id=[1, 1, 2], start_offset=[0, 1, 0], end_offset=[1, 2, 1]
        ),
        min_timestamp_ms=[3, -1],
        max_timestamp_ms=[4, -1],
        crc32c=[-1, 7],
    )
    message = objects_pb2.CommitPipelineRequest(
        sequence=9, commits=[commit_request()], uploads=columns
    )
    tail = b""
    if not packs:
        message.uploads.ClearField("object_size")
        tail = unpacked(3, [10, 11])
        tail = bytes([3 << 3 | 2, len(tail)]) + tail
    parsed = parse_batch(message.SerializeToString() + tail)
    assert parsed.sequence == 9
    assert plain(uploads_in(parsed.uploads), columns) == plain(columns, columns)


def test_twins_have_the_contracts_fields() -> None:
    """Same numbers and names; the only other type is bytes for packed columns."""
    for name, twin in columns_pb2.DESCRIPTOR.message_types_by_name.items():
        _assert_twin(
            twin, objects_pb2.DESCRIPTOR.message_types_by_name[name.removeprefix("Packed")]
        )


def _assert_twin(twin: Descriptor, contract: Descriptor) -> None:
    assert set(twin.fields_by_name) == set(contract.fields_by_name), twin.name
    for name, field in twin.fields_by_name.items():
        original = contract.fields_by_name[name]
        where = f"{twin.name}.{name}"
        assert field.number == original.number, where
        if field.type == FieldDescriptor.TYPE_BYTES:
            assert original.type in SCALARS, where
            assert original.is_repeated, where
        else:
            assert field.is_repeated == original.is_repeated, where
            assert field.type == original.type, where


@pytest.mark.parametrize(
    "codes",
    [[0] * 5, [0, 509, 0], [-1, 0], []],
)
def test_verdicts_read_back_by_the_contracts_message(codes: list[int]) -> None:
    answer = CommitStreamSetObjectAnswer(
        error=ErrorCode(max(codes, default=0)),
        range_errors=column(codes),
        stream_object_errors=column(codes[:1]),
    )
    sent = commit_stream_set_object_out(answer).SerializeToString()
    response = objects_pb2.CommitStreamSetObjectResponse.FromString(sent)
    assert list(response.range_errors) == codes
    assert list(response.stream_object_errors) == codes[:1]
    assert response.error == int(answer.error)


def test_verdicts_of_uploads_are_left_out_when_all_is_well() -> None:
    fine = np.zeros(3, dtype=np.int64)
    bad = column([0, 509, 0])
    nothing, told = objects_pb2.UploadErrors(), objects_pb2.UploadErrors()
    uploads_out(CommitUploadsAnswer(errors=fine, range_errors=fine), nothing)
    assert nothing.ByteSize() == 0
    uploads_out(CommitUploadsAnswer(errors=bad, range_errors=bad), told)
    assert list(told.errors) == list(told.range_errors) == [0, 509, 0]


@pytest.mark.parametrize(("given", "read"), [({}, -1), ({"order_id": 0}, 0), ({"order_id": 7}, 7)])
def test_an_absent_order_is_left_to_the_map_and_zero_is_an_order(
    given: dict[str, int], read: int
) -> None:
    message = commit_request()
    message.ClearField("order_id")
    message.MergeFrom(objects_pb2.CommitStreamSetObjectRequest(**given))  # type: ignore[arg-type]
    assert commit_stream_set_object_in(parse_commit(message.SerializeToString())).order_id == read
    message.order_id = -1
    with pytest.raises(InvalidRequestError, match="order_id: -1"):
        commit_stream_set_object_in(parse_commit(message.SerializeToString()))


NODE = common_pb2.NodeIdentity(node_id=0, node_epoch=0)
STREAM: dict[str, Any] = {"stream_id": 0, "stream_epoch": 0}


def decoder(kind: type[Message]) -> Callable[[Message], Any]:
    view: Any = None
    for name, route in routes("cluster", view).items():
        if name.endswith(f".{kind.DESCRIPTOR.name.removesuffix('Request')}"):
            return route.decode
    raise AssertionError(kind)


def open_of(**changes: Any) -> Message:
    return streams_pb2.OpenStreamsRequest(
        node=NODE, streams=[streams_pb2.StreamToOpen(**(STREAM | changes))]
    )


COMPLETE: list[tuple[Message, tuple[str, ...]]] = [
    (open_of(), ("node.node_id", "node.node_epoch", "streams[0].stream_id")),
    (open_of(), ("streams[0].stream_epoch",)),
    (
        streams_pb2.CloseStreamsRequest(node=NODE, streams=[streams_pb2.StreamToClose(**STREAM)]),
        ("streams[0].stream_id", "streams[0].stream_epoch"),
    ),
    (
        streams_pb2.TrimStreamsRequest(
            node=NODE, streams=[streams_pb2.StreamToTrim(**STREAM, new_start_offset=0)]
        ),
        ("streams[0].stream_id", "streams[0].stream_epoch", "streams[0].new_start_offset"),
    ),
    (
        streams_pb2.DeleteStreamsRequest(node=NODE, streams=[streams_pb2.StreamToDelete(**STREAM)]),
        ("streams[0].stream_id", "streams[0].stream_epoch"),
    ),
    (streams_pb2.AbandonUploadsRequest(node_id=0), ("node_id",)),
    (nodes_pb2.LockNodeRequest(node_id=0), ("node_id",)),
    (nodes_pb2.UnlockNodeRequest(node_id=0), ("node_id",)),
    (nodes_pb2.ListStreamSetObjectsRequest(node_id=0), ("node_id",)),
    (nodes_pb2.UnregisterNodeRequest(node=NODE), ("node.node_id", "node.node_epoch")),
    (
        objects_pb2.GetObjectsRequest(queries=[objects_pb2.ObjectQuery(stream_id=0)]),
        ("queries[0].stream_id",),
    ),
    (
        objects_pb2.CommitStreamObjectRequest(node=NODE, object_id=0, **STREAM),
        ("node.node_id", "stream_id", "stream_epoch"),
    ),
]
CASES = [(message, path) for message, paths in COMPLETE for path in paths]


@pytest.mark.parametrize(("message", "path"), CASES)
def test_a_field_that_is_not_set_is_named(message: Message, path: str) -> None:
    decode = decoder(type(message))
    decode(message)
    cut = type(message)()
    cut.CopyFrom(message)
    holder: Any = cut
    *parents, field = path.replace("[0]", ".0").split(".")
    for name in parents:
        holder = holder[0] if name == "0" else getattr(holder, name)
    holder.ClearField(field)
    with pytest.raises(InvalidRequestError, match="not set") as raised:
        decode(cut)
    assert raised.value.field == path


@pytest.mark.parametrize("field", ["object_id", "start_offset", "end_offset", "min_timestamp_ms"])
def test_what_there_is_not_is_left_out_and_never_said_by_a_number(field: str) -> None:
    request = objects_pb2.CommitStreamObjectRequest(node=NODE, **STREAM)
    decode = decoder(type(request))
    assert getattr(decode(request), field) == -1
    setattr(request, field, -1)
    with pytest.raises(InvalidRequestError, match="-1") as raised:
        decode(request)
    assert raised.value.field == field


def test_no_voter_is_removed_that_is_not_named() -> None:
    assert not quorum_pb2.RemoveVoterRequest(cluster_id="c").key.HasField("node_id")


def test_a_tag_that_is_given_twice_is_refused() -> None:
    tags = [common_pb2.Tag(key="k", value=value) for value in "ab"]
    with pytest.raises(InvalidRequestError, match=r"streams\[0\]\.tags"):
        decoder(streams_pb2.OpenStreamsRequest)(open_of(tags=tags))


def test_a_field_without_counterpart_is_found_before_any_message() -> None:
    for plan in (PLAIN.reader, PLAIN.writer):
        with pytest.raises(TypeError, match="items"):
            plan(GetKVs, kv_pb2.PutKVsRequest)
