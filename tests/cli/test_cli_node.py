"""`streammeta node`: what it shows, what it asks for, and what it says when it is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.framework.client import ControllerClient
from streammeta.client.errors import code_name
from streammeta.v1 import common_pb2, nodes_pb2, streams_pb2
from streammeta.v1.nodes_pb2_grpc import NodeServiceStub
from streammeta.v1.streams_pb2_grpc import StreamServiceStub
from tests.kit.real_cluster import running_cluster, streammeta
from tests.shell.fake_cluster import FakeCluster, serve


class FakeController(FakeCluster):
    """Has node 7, answers what changes it with `error`, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.page_size = 1
        self.endpoint = ""
        self.error: common_pb2.ErrorCode.ValueType = common_pb2.ERROR_CODE_NONE
        self.asked: list[Any] = []
        self.nodes[7] = nodes_pb2.NodeDescription(
            node_id=7,
            node_epoch=11,
            state=nodes_pb2.NODE_STATE_FENCED,
            locked=True,
            supervised=True,
            recovered_by=8,
            compacted_by=9,
            pending_upload_count=2,
            stream_set_object_count=3,
        )

    def LockNode(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.append(request)
        return nodes_pb2.LockNodeResponse(error=self.error)

    def UnlockNode(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.append(request)
        return nodes_pb2.UnlockNodeResponse(error=self.error)

    def UnregisterNode(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.append(request)
        if self.error == common_pb2.ERROR_CODE_NONE:
            self.nodes[request.node.node_id].departed = True
        return nodes_pb2.UnregisterNodeResponse(error=self.error)

    def AbandonUploads(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.append(request)
        return streams_pb2.AbandonUploadsResponse(
            error=self.error,
            abandoned=[streams_pb2.PendingUpload(node_id=7, stream_id=3, end_offset=5)],
        )


@pytest.fixture
def controller() -> Iterator[FakeController]:
    controller = FakeController()
    with serve(controller) as controller.endpoint:
        yield controller


def node(controller: FakeController, *words: str) -> tuple[int, dict[str, Any]]:
    answer = streammeta("node", words[0], "--connect", controller.endpoint, *words[1:])
    return answer["exit_code"], answer


def test_a_list_shows_what_is_to_be_settled(controller: FakeController) -> None:
    code, answer = node(controller, "list")
    (row,) = answer["nodes"]
    assert code == 0
    assert (row["node_id"], row["state"]) == (7, "FENCED")
    assert (row["supervised"], row["locked"]) == (True, True)
    assert (row["recovered_by"], row["compacted_by"]) == (8, 9)
    assert (row["pending_uploads"], row["stream_set_objects"]) == (2, 3)


def test_a_node_is_locked_and_unlocked(controller: FakeController) -> None:
    assert node(controller, "lock", "--node-id", "7")[0] == 0
    assert node(controller, "unlock", "--node-id", "7")[0] == 0
    assert [type(request).__name__ for request in controller.asked] == [
        *("LockNodeRequest", "UnlockNodeRequest"),
    ]
    assert {request.node_id for request in controller.asked} == {7}


def test_a_node_is_unregistered_at_its_present_epoch(controller: FakeController) -> None:
    code, answer = node(controller, "unregister", "--node-id", "7")
    assert (code, answer["departed"], answer["stream_set_objects"]) == (0, True, 3)
    (asked,) = controller.asked
    assert (asked.node.node_id, asked.node.node_epoch) == (7, 11)


def test_a_dry_run_lists_all_owed_uploads_and_changes_none(controller: FakeController) -> None:
    for stream_id in range(3):
        stream = streams_pb2.StreamDescription(stream_id=stream_id)
        owed = {"stream_id": stream_id, "start_offset": 10, "end_offset": 15}
        stream.pending_uploads.add(node_id=7, **owed)
        stream.pending_uploads.add(node_id=8, stream_id=stream_id, end_offset=10)
        controller.streams[stream_id] = stream
    code, answer = node(controller, "abandon", "--node-id", "7", "--dry-run")
    assert (code, answer["streams"], answer["lost_offsets"]) == (0, 3, 15)
    assert [row["stream_id"] for row in answer["uploads"]] == [0, 1, 2]
    some = node(controller, "abandon", "--node-id", "7", "--dry-run", "--stream", "1")[1]
    assert [row["stream_id"] for row in some["uploads"]] == [1]
    assert controller.asked == []


def test_abandoning_says_what_was_given_up(controller: FakeController) -> None:
    code, answer = node(controller, "abandon", "--node-id", "7", "--stream", "3", "--stream", "4")
    assert (code, answer["streams"], answer["lost_offsets"]) == (0, 1, 5)
    (asked,) = controller.asked
    assert (asked.node_id, list(asked.stream_ids)) == (7, [3, 4])


@pytest.mark.parametrize(
    ("command", "error", "hint"),
    [
        ("lock", common_pb2.ERROR_CODE_NODE_EPOCH_NOT_EXIST, "node list"),
        ("unlock", common_pb2.ERROR_CODE_NODE_EPOCH_NOT_EXIST, "node list"),
        ("unregister", common_pb2.ERROR_CODE_STREAM_NOT_CLOSED, "node abandon"),
        ("unregister", common_pb2.ERROR_CODE_NODE_LOCKED, "node unlock"),
        ("unregister", common_pb2.ERROR_CODE_NODE_EPOCH_EXPIRED, "repeat"),
        ("abandon", common_pb2.ERROR_CODE_NODE_EPOCH_NOT_EXIST, "node list"),
    ],
)
def test_a_refusal_says_what_to_do(
    controller: FakeController, command: str, error: common_pb2.ErrorCode.ValueType, hint: str
) -> None:
    controller.error = error
    code, answer = node(controller, command, "--node-id", "7")
    assert (code, answer["error"]["code"]) == (1, code_name(error))
    assert "node 7" in answer["error"]["message"]
    assert hint in answer["error"]["hint"]


@pytest.mark.parametrize("words", [["unregister"], ["abandon", "--dry-run"]])
def test_an_unknown_node_is_named(controller: FakeController, words: list[str]) -> None:
    code, answer = node(controller, *words, "--node-id", "9")
    assert (code, answer["error"]["code"]) == (1, "NODE_EPOCH_NOT_EXIST")
    assert "node 9" in answer["error"]["message"]
    assert controller.asked == []


@pytest.mark.process
def test_a_broker_that_is_lost_is_settled_step_by_step(tmp_path: Path) -> None:
    """The steps of docs/operations/repair.md: lock, unlock, abandon uploads, unregister."""
    with (
        running_cluster(tmp_path, 1) as cluster,
        ControllerClient(cluster.endpoints, timeout_s=60) as client,
    ):
        (stream_id,) = stream_owed_by_node_7(client)
        at = ("--connect", cluster.connect, "--node-id", "7")
        assert streammeta("node", "lock", *at)["locked"]
        assert streammeta("node", "unregister", *at)["exit_code"] == 1
        assert streammeta("node", "unlock", *at)["ok"]
        refused = streammeta("node", "unregister", *at)
        assert refused["error"]["code"] == "STREAM_NOT_CLOSED"
        planned = streammeta("node", "abandon", *at, "--dry-run")
        done = streammeta("node", "abandon", *at)
        owed = [{"stream_id": stream_id, "start_offset": 0, "end_offset": 5}]
        assert planned["uploads"] == done["uploads"] == owed
        assert streammeta("node", "abandon", *at)["uploads"] == []
        assert streammeta("node", "unregister", *at)["departed"] is False
        assert streammeta("node", "list", "--connect", cluster.connect)["nodes"] == []


def stream_owed_by_node_7(client: ControllerClient) -> list[int]:
    """Create, open and close a stream at offset 5 as node 7, which uploads nothing."""
    me = common_pb2.NodeIdentity(node_id=7, node_epoch=1)
    client.call(
        lambda channel: NodeServiceStub(channel).RegisterNode,
        nodes_pb2.RegisterNodeRequest(node=me),
    )
    create = streams_pb2.CreateStreamsRequest(
        request_id="c", node=me, streams=[streams_pb2.NewStream()]
    )
    created = client.call(lambda channel: StreamServiceStub(channel).CreateStreams, create)
    (stream_id,) = created.stream_ids
    stream = streams_pb2.StreamToOpen(stream_id=stream_id, stream_epoch=1)
    client.call(
        lambda channel: StreamServiceStub(channel).OpenStreams,
        streams_pb2.OpenStreamsRequest(request_id="o", node=me, streams=[stream]),
    )
    at_5 = streams_pb2.StreamToClose(stream_id=stream_id, stream_epoch=1, end_offset=5)
    closed = client.call(
        lambda channel: StreamServiceStub(channel).CloseStreams,
        streams_pb2.CloseStreamsRequest(request_id="x", node=me, streams=[at_5]),
    )
    assert list(closed.errors) == [common_pb2.ERROR_CODE_NONE]
    return [stream_id]
