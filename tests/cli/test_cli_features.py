"""`streammeta features`: the level and the versions of all controllers; changes and refusals."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from streammeta.controller.features import ADDED
from streammeta.v1 import admin_pb2, admin_pb2_grpc, quorum_pb2_grpc
from streammeta.v1 import quorum_pb2 as pb
from tests.kit.grpc_servers import abort, served_by_threads, unimplemented
from tests.kit.real_cluster import streammeta

SERVICES = (admin_pb2_grpc, quorum_pb2_grpc)
LEADER = 2


class FakeController(unimplemented(*SERVICES)):  # type: ignore[misc]
    """The leader of two voters and an observer, at level 1."""

    def __init__(self) -> None:
        self.asked: list[admin_pb2.UpdateFeatureLevelRequest] = []
        self.answered_by = LEADER

    def DescribeQuorum(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.DescribeQuorumResponse(leader_id=LEADER)

    def DescribeCluster(self, request: Any, context: Any) -> Any:  # noqa: N802
        known: Any = {"version": "0.3.0", "lowest_level": 1, "highest_level": 3}
        return admin_pb2.DescribeClusterResponse(
            cluster_id="c",
            leader_id=LEADER,
            answered_by=self.answered_by,
            feature_level=1,
            controllers=[
                admin_pb2.Controller(node_id=1, endpoint="h:1", voter=True),
                admin_pb2.Controller(node_id=LEADER, endpoint="h:2", voter=True, **known),
                admin_pb2.Controller(node_id=3, **known),
            ],
        )

    def UpdateFeatureLevel(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.append(request)
        if request.level == 3:
            lacking = {"level": "3", "blocked_by": "1"}
            told = "not every controller can run at level 3: controller 1 votes"
            abort(context, grpc.StatusCode.FAILED_PRECONDITION, "FEATURE_LEVEL", told, lacking)
        return admin_pb2.UpdateFeatureLevelResponse(before=1, level=request.level)


@pytest.fixture
def controller() -> FakeController:
    return FakeController()


@pytest.fixture
def connect(controller: FakeController) -> Iterator[str]:
    with served_by_threads(controller, *SERVICES) as endpoint:
        yield endpoint


def test_describe_tells_level_and_versions_and_what_the_levels_add(connect: str) -> None:
    answer = streammeta("features", "describe", "--connect", connect)
    assert (answer["exit_code"], answer["cluster_id"], answer["level"]) == (0, "c", 1)
    columns = ("node_id", "voter", "endpoint", "version", "lowest", "highest")
    assert [tuple(row[name] for name in columns) for row in answer["controllers"]] == [
        (1, True, "h:1", None, None, None),
        (2, True, "h:2", "0.3.0", 1, 3),
        (3, False, None, "0.3.0", 1, 3),
    ]
    levels = {row["level"]: (row["in_force"], row["adds"]) for row in answer["levels"]}
    assert levels == {level: (level == 1, adds) for level, adds in ADDED.items()}


def test_the_leader_alone_is_taken_for_an_answer(connect: str, controller: FakeController) -> None:
    controller.answered_by = 1
    answer = streammeta("features", "describe", "--connect", connect)
    assert (answer["exit_code"], answer["error"]["code"]) == (1, "ANOTHER_LEADS")


@pytest.mark.parametrize(("command", "lower"), [("upgrade", False), ("downgrade", True)])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_change_says_before_and_after(
    connect: str, controller: FakeController, command: str, lower: bool, dry_run: bool
) -> None:
    words = ["features", command, "--connect", connect, "--to", "2"]
    answer = streammeta(*words, *(["--dry-run"] if dry_run else []))
    assert (answer["exit_code"], answer["level_before"], answer["level"]) == (0, 1, 2)
    assert answer["dry_run"] is dry_run
    (asked,) = controller.asked
    assert (asked.level, asked.lower, asked.dry_run) == (2, lower, dry_run)


def test_a_refusal_names_what_blocks(connect: str) -> None:
    answer = streammeta("features", "upgrade", "--connect", connect, "--to", "3")
    assert (answer["exit_code"], answer["error"]["code"]) == (1, "FEATURE_LEVEL")
    assert "controller 1 votes" in answer["error"]["message"]
    assert "streammeta features describe" in answer["error"]["hint"]


@pytest.mark.parametrize("words", [(), ("--to", "0"), ("--to", "two")])
def test_a_level_must_be_given(connect: str, words: tuple[str, ...]) -> None:
    answer = streammeta("features", "upgrade", "--connect", connect, *words)
    assert (answer["exit_code"], answer["error"]["code"]) == (2, "USAGE")
