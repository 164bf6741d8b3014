"""The tree of a live cluster over gRPC: what files show, and the few calls made for it."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from streammeta.cli.framework.client import CallError, ControllerClient
from streammeta.cli.local.local_cluster import free_ports
from streammeta.shell.commands import execute
from streammeta.shell.documents import iso_time
from streammeta.shell.events import Problem, ProblemCode, json_value, text_lines
from streammeta.shell.live_tree import live_tree
from streammeta.shell.paths import split_words
from streammeta.shell.prompt import suggestions
from streammeta.shell.state import ShellState
from streammeta.v1 import admin_pb2, admin_pb2_grpc, common_pb2, nodes_pb2, objects_pb2, streams_pb2
from tests.shell.fake_cluster import FakeCluster, sample_cluster, serve

STREAM_COUNT = 2500


@contextmanager
def shell_on(cluster: FakeCluster) -> Iterator[ShellState]:
    with serve(cluster) as endpoint, ControllerClient([endpoint]) as client:
        yield ShellState(live_tree(client))


def shown(state: ShellState, line: str) -> list[str]:
    return list(text_lines(execute(state, split_words(line))))


def shown_of(cluster: FakeCluster, line: str) -> list[str]:
    with shell_on(cluster) as state:
        return shown(state, line)


def document(state: ShellState, path: str) -> dict[str, Any]:
    """The one document that `cat` shows, as programs get it."""
    (found,) = json_value(execute(state, ["cat", path]))["documents"]
    assert isinstance(found, dict)
    return found


def test_what_a_stream_is_owed_and_has_lost_is_shown_where_there_is_something() -> None:
    cluster = sample_cluster()
    described = cluster.streams[3]
    described.pending_uploads.add(node_id=8, stream_id=3, start_offset=6, end_offset=9)
    described.lost.add(start_offset=1, end_offset=2)
    with shell_on(cluster) as state:
        found = document(state, "/streams/3")
    assert found["pending_uploads"] == [{"node_id": 8, "start_offset": 6, "end_offset": 9}]
    assert found["lost"] == [{"start_offset": 1, "end_offset": 2}]


def test_a_linked_object_names_its_composite_and_a_node_what_is_to_be_settled() -> None:
    cluster = sample_cluster()
    cluster.objects[68].state = common_pb2.OBJECT_STATE_LINKED
    cluster.objects[68].composite_id = 90
    settled: dict[str, Any] = {"locked": True, "departed": True, "supervised": True}
    settled |= {"recovered_by": 2, "pending_upload_count": 4}
    cluster.nodes[1].MergeFrom(nodes_pb2.NodeDescription(**settled))
    with shell_on(cluster) as state:
        assert document(state, "/objects/68")["composite_id"] == 90
        assert "composite_id" not in document(state, "/objects/78")
        node = document(state, "/nodes/1/info")
    assert settled.items() <= node.items()


def big_cluster() -> FakeCluster:
    cluster = FakeCluster()
    for stream_id in range(STREAM_COUNT):
        cluster.streams[stream_id] = streams_pb2.StreamDescription(stream_id=stream_id, epoch=-1)
        cluster.objects[stream_id] = objects_pb2.ObjectDescription(object_id=stream_id)
    return cluster


def describe(client: ControllerClient) -> str:
    answer = client.call(
        lambda channel: admin_pb2_grpc.AdminServiceStub(channel).DescribeCluster,
        admin_pb2.DescribeClusterRequest(),
    )
    return answer.cluster_id


def test_root_is_known_without_a_call() -> None:
    cluster = sample_cluster()
    with shell_on(cluster) as state:
        assert shown(state, "ls") == ["cluster", "kv/", "nodes/", "objects/", "streams/"]

    assert not cluster.calls


def test_stream_shows_who_owns_it_and_where_its_records_are() -> None:
    assert shown_of(sample_cluster(), "cat /streams/3") == [
        "stream_id:    3",
        "state:        OPENED",
        "epoch:        2",
        "node_id:      1",
        "start_offset: 0",
        "end_offset:   6",
        "tags:",
        "  key    value",
        "  topic  automq-test",
        "ranges:",
        "  range_index  epoch  start_offset  end_offset  node_id",
        "            0      1             0           4        1",
        "            1      2             4           6        1",
        "stream_objects: none",
        "read_from:",
        "  object_id  start_offset  end_offset  kind        object_size",
        "         68             0           4  STREAM_SET         4096",
        "         78             4           6  STREAM_SET      5242306",
    ]


def test_object_shows_its_key_time_and_ranges() -> None:
    lines = shown_of(sample_cluster(), "cat /objects/78")
    assert {
        "state:        COMMITTED",
        "kind:         STREAM_SET",
        "committed_at: 2024-04-07T00:52:26.293Z",
        "key:          e4000000/_streammeta_test/78",
    } <= set(lines)
    ranges = [line.split() for line in lines[-3:]]
    assert ranges == [["3", "4", "6"], ["4", "50390", "55430"], ["5", "8376", "9384"]]


def test_set_object_of_a_node_is_the_object_and_its_place() -> None:
    with shell_on(sample_cluster()) as state:
        of_node = document(state, "/nodes/1/stream_set_objects/78")
        alone = document(state, "/objects/78")
        assert shown(state, "ls /nodes/1") == ["info", "stream_set_objects/"]
        assert shown(state, "ls /nodes/1/stream_set_objects") == ["68", "78"]
        assert shown(state, "cat /nodes/1")[2] == "state:                   ACTIVE"
    place = {"order_id": 78, "data_time": "1970-01-01T00:00:00.000Z"}
    assert of_node == alone | place | {"path": "/nodes/1/stream_set_objects/78"}


def test_cluster_shows_leader_and_sizes() -> None:
    with shell_on(sample_cluster()) as state:
        found = document(state, "/cluster")
    assert (found["leader"], found["high_watermark"], found["streams"]) == (1, 120, 1)
    assert found["controllers"] == [{"node_id": 1, "endpoint": "127.0.0.1:9091", "voter": True}]


def test_streams_are_found_by_tags_page_by_page_and_not_read() -> None:
    cluster = FakeCluster()
    cluster.page_size = 2
    for stream_id in range(9):
        zone = "=b" if stream_id % 2 else "a"
        tags = [
            common_pb2.Tag(key="topic", value="orders"),
            common_pb2.Tag(key="zone", value=zone),
        ]
        cluster.streams[stream_id] = streams_pb2.StreamDescription(stream_id=stream_id, tags=tags)
    with shell_on(cluster) as state:
        found = shown(state, "find --tag topic=orders --tag=zone==b")
        assert shown(state, "find --tag topic=none") == []
    assert found == ["/streams/1", "/streams/3", "/streams/5", "/streams/7"]
    assert cluster.calls == {"FindStreams": 3}


@pytest.mark.parametrize(
    "line",
    [
        "--tag",
        "--tag topic",
        "--tag=topic",
        "--tag a=b /streams",
        "/ --tag a=b",
        "--tag a=b --tag a=c",
    ],
)
def test_a_wrong_tag_is_rejected_without_a_call(line: str) -> None:
    cluster = sample_cluster()
    with shell_on(cluster) as state:
        (problem,) = execute(state, split_words(f"find {line}"))
    assert isinstance(problem, Problem)
    assert problem.code is ProblemCode.USAGE
    assert not cluster.calls


def test_keys_are_names_and_values_text_or_hex() -> None:
    with shell_on(sample_cluster()) as state:
        assert shown(state, "find /kv") == [
            "/kv",
            "/kv/_default",
            "/kv/_default/__automq_node%2F1",
            "/kv/topics",
            "/kv/topics/automq-test",
            "/kv/topics/automq-test-2",
        ]
        assert shown(state, "cat /kv/_default/__automq_node%2F1") == [
            "key:       __automq_node/1",
            "version:   9",
            "length:    2",
            "value_hex: 00ff",
        ]
        assert shown(state, "cat /kv/topics/automq-test")[-1] == "value:     3"
        assert shown(state, "cat /kv/topics/automq-te*") != []
        assert shown(state, "ls /kv/topics/automq") == []


def test_value_that_commands_the_terminal_is_not_printed_as_it_is() -> None:
    cluster = FakeCluster()
    cluster.put("", "a", b"\x1b[2J")
    cluster.put("", "b", b"one\ntwo")
    with shell_on(cluster) as state:
        assert shown(state, "cat /kv/_default/a")[-1] == "value_hex: 1b5b324a"
        assert shown(state, "cat /kv/_default/b")[-1] == "value:   one\\ntwo"


def test_namespace_called_default_is_not_the_default_one() -> None:
    cluster = FakeCluster()
    cluster.put("_default", "a", b"named")
    with shell_on(cluster) as state:
        assert shown(state, "ls /kv") == ["_default/", "%5Fdefault/"]
        assert shown(state, "ls /kv/_default") == []
        assert shown(state, "cat /kv/%5Fdefault/a")[-1] == "value:     named"


@pytest.mark.parametrize(
    ("directory", "method"), [("/streams", "DescribeStreams"), ("/objects", "DescribeObjects")]
)
def test_listing_reads_page_after_page(directory: str, method: str) -> None:
    cluster = big_cluster()
    assert shown_of(cluster, f"ls {directory}") == [str(number) for number in range(STREAM_COUNT)]
    assert cluster.calls == {method: 3}


def test_one_stream_is_read_without_listing_the_others() -> None:
    cluster = big_cluster()
    assert shown_of(cluster, "cat /streams/1234")[0] == "stream_id:    1234"
    assert cluster.calls == {"DescribeStreams": 1, "GetObjects": 1}


def test_whole_directory_is_read_many_files_at_a_time() -> None:
    cluster = big_cluster()
    cluster.objects.clear()
    lines = shown_of(cluster, "tree /streams")
    assert sum("stream_id" in line for line in lines) == STREAM_COUNT
    assert cluster.calls == {"DescribeStreams": 3 + 25, "GetObjects": 25}


def test_stream_deleted_after_it_was_listed_is_left_out() -> None:
    cluster = sample_cluster()
    with shell_on(cluster) as state:
        events = execute(state, ["tree", "/streams"])
        next(events)
        cluster.streams.clear()
        assert list(text_lines(events)) == []


def test_pattern_finds_streams_on_all_pages() -> None:
    found = shown_of(big_cluster(), "ls /streams/24?9")
    assert found == [f"/streams/24{digit}9" for digit in range(10)]


def test_keys_are_read_page_after_page() -> None:
    cluster = FakeCluster()
    names = [f"k{number:04}" for number in range(STREAM_COUNT)]
    for key in names:
        cluster.put("n", key, b"v")
    assert names == shown_of(cluster, "ls /kv/n")


def test_completion_of_ids_looks_them_up_instead_of_listing() -> None:
    cluster = big_cluster()
    with shell_on(cluster) as state:
        offered = [found.text for found in suggestions(state, "cat /streams/24")]
        assert suggestions(state, "cat /streams/x") == []

    expected = ["24", *(str(number) for number in range(240, 250))]
    assert offered == [*expected, *(str(number) for number in range(2400, 2500))]
    assert cluster.calls == {"DescribeStreams": 1}


@pytest.mark.parametrize(
    "path",
    [
        "/streams/4",
        "/streams/03",
        "/streams/-1",
        "/streams/99999999999999999999",
        "/objects/1",
        "/nodes/2",
        "/nodes/4294967297",
        "/kv/none",
        "/kv/topics/automq",
        "/kv/topics/a%2f",
    ],
)
def test_what_is_not_there_is_not_found(path: str) -> None:
    with shell_on(sample_cluster()) as state:
        [problem] = [found for found in execute(state, ["ls", path]) if isinstance(found, Problem)]

    assert problem.message == f"ls: {path}: no such file or directory"


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        ({"state": 99}, {"state:       99"}),
        (
            {"state": common_pb2.OBJECT_STATE_PREPARED, "deadline_ms": 1000},
            {"deadline:    1970-01-01T00:00:01.000Z"},
        ),
        (
            {"min_timestamp_ms": 0, "max_timestamp_ms": 1000, "crc32c": 0xAB},
            {
                "min_timestamp: 1970-01-01T00:00:00.000Z",
                "max_timestamp: 1970-01-01T00:00:01.000Z",
                "crc32c:        000000ab",
            },
        ),
    ],
    ids=["a newer state by its number", "deadline of a prepared one", "what it holds"],
)
def test_what_is_known_of_an_object_is_shown(facts: dict[str, Any], lines: set[str]) -> None:
    cluster = FakeCluster()
    cluster.objects[1] = objects_pb2.ObjectDescription(object_id=1, **facts)
    cluster.objects[2] = objects_pb2.ObjectDescription(object_id=2)
    with shell_on(cluster) as state:
        assert lines <= set(shown(state, "cat /objects/1"))
        unknown = document(state, "/objects/2")
    assert not {"deadline", "min_timestamp", "max_timestamp", "crc32c"} & unknown.keys()


def test_time_that_no_calendar_has_is_a_number() -> None:
    assert iso_time(2**62) == f"{2**62} ms"


def refusal_of(cluster: FakeCluster, words: str, **options: Any) -> str:
    with serve(cluster) as endpoint:
        return refusal_at(endpoint, words, **options)


def refusal_at(endpoint: str, words: str, **options: Any) -> str:
    """Describe the cluster, which fails with these words; return the code of the error."""
    with (
        ControllerClient([endpoint], **options) as client,
        pytest.raises(CallError, match=words) as caught,
    ):
        describe(client)
    return caught.value.code


def test_silent_host_leaves_time_to_ask_the_next() -> None:
    """A host that accepts connections and says nothing costs a part of the deadline only."""
    with socket.create_server(("127.0.0.1", 0)) as silent, serve(sample_cluster()) as endpoint:
        silent_endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        with ControllerClient([silent_endpoint, endpoint], timeout_s=8) as client:
            assert describe(client) == "test"


def test_nothing_listening_is_said_at_once() -> None:
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    started = time.monotonic()
    with ControllerClient([endpoint]) as client, pytest.raises(CallError) as caught:
        describe(client)

    assert time.monotonic() - started < 5
    assert str(caught.value).startswith(f"no controller answers at {endpoint}: is it running?")
    assert caught.value.code == "NO_CONTROLLER"
    assert "`streammeta dev`" in caught.value.hint


@pytest.mark.parametrize(
    ("leader", "words"),
    [
        ("", "knows no leader"),
        ("127.0.0.1:1", "says 127.0.0.1:1 leads, which is unreachable from here"),
    ],
)
def test_cluster_without_a_leader_is_given_up_at_the_deadline(leader: str, words: str) -> None:
    cluster = FakeCluster()
    cluster.leader_endpoint = leader
    assert refusal_of(cluster, words, timeout_s=1) == "NO_LEADER"
    assert cluster.calls["DescribeCluster"] > 1


def test_slow_leader_is_said_to_be_slow() -> None:
    """A host that takes the request and never answers is no matter of finding a leader."""
    follower, leader = FakeCluster(), FakeCluster()
    answered = threading.Event()

    def enter(method: str, context: object) -> None:
        answered.wait(60)

    leader.enter = enter  # type: ignore[method-assign]
    with serve(leader) as leader_endpoint, serve(follower) as endpoint:
        follower.leader_endpoint = leader_endpoint
        silence = f"{leader_endpoint} did not answer in time"
        assert refusal_at(endpoint, silence, timeout_s=1.5) == "DEADLINE_EXCEEDED"
        answered.set()


def test_refusal_is_passed_on_and_not_retried() -> None:
    cluster = FakeCluster()
    message = "page_size: got 0"
    cluster.failure = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", message)
    assert refusal_of(cluster, message) == "INVALID_FIELD"
    assert cluster.calls["DescribeCluster"] == 1
