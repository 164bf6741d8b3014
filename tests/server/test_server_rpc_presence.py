"""Fields that a request must set are refused by name when they are not; zero is a value."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.metadata.requests import GetKVs
from streammeta.controller.rpc.map_routes import PLAIN, routes
from streammeta.v1 import common_pb2, kv_pb2, nodes_pb2, objects_pb2, quorum_pb2, streams_pb2

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
    with pytest.raises(InvalidRequestError, match="-1; wanted 0 or more, or no value") as raised:
        decode(request)
    assert raised.value.field == field


def test_no_voter_is_removed_that_is_not_named() -> None:
    assert not quorum_pb2.RemoveVoterRequest(cluster_id="c").key.HasField("node_id")


def test_a_tag_that_is_given_twice_is_refused() -> None:
    tags = [common_pb2.Tag(key="k", value=value) for value in "ab"]
    with pytest.raises(InvalidRequestError, match=r"^streams\[0\]\.tags: a key appears twice"):
        decoder(streams_pb2.OpenStreamsRequest)(open_of(tags=tags))


def test_a_field_without_counterpart_is_found_before_any_message() -> None:
    for plan in (PLAIN.reader, PLAIN.writer):
        with pytest.raises(TypeError, match="items"):
            plan(GetKVs, kv_pb2.PutKVsRequest)
