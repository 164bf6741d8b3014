"""The level is raised once every controller can run at it, and one that can't does not start."""

from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest

from streammeta.controller import errors
from streammeta.controller.features import SUPPORTED, UNTOLD, Levels, Software
from streammeta.controller.ids import NodeId
from streammeta.controller.journal.errors import DirectoryNotFormattedError, NewerVersionError
from streammeta.controller.metadata.api.answers import SetFeatureLevelAnswer
from streammeta.controller.quorum.config import QuorumLimits
from streammeta.controller.records.codec import encode_records
from streammeta.controller.records.record import FeatureLevelSet, KVsPut
from streammeta.controller.rpc.calls.interceptors import CallPipeline
from streammeta.controller.rpc.services.contract import service_handler
from streammeta.controller.rpc.services.quorum import QuorumServicer
from streammeta.controller.runtime.persistence import metadata_checkpoint
from streammeta.controller.runtime.replication import feature_check
from streammeta.controller.runtime.replication.feature_check import check_levels
from streammeta.controller.runtime.replication.peer_versions import PeerVersions
from streammeta.controller.runtime.writer.feature_updates import FeatureUpdates
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.rpc.connections import client_channel
from streammeta.rpc.failures import read_failure
from streammeta.v1 import quorum_pb2 as pb
from streammeta.v1.quorum_pb2_grpc import QuorumServiceStub
from tests.journal.journal_tools import batch, make, open_journal
from tests.kit.grpc_servers import served
from tests.kit.memory_cluster import CLUSTER, MemoryCluster
from tests.kit.waiting import until

NEW = Software("2.0", SUPPORTED)
OLD = Software("1.0", Levels(1, 1))


@pytest.fixture
async def leader(cluster: MemoryCluster) -> int:
    await cluster.fill("a", 1)
    return await cluster.leader()


def updates(cluster: MemoryCluster, node_id: int, *observers: Software) -> FeatureUpdates:
    """Updates by a node to which all others are connected, with the new software."""
    known = dict.fromkeys(range(cluster.size), NEW)
    return updates_knowing(cluster, node_id, known | dict(enumerate(observers, start=7)))


def updates_knowing(
    cluster: MemoryCluster, node_id: int, known: Mapping[int, Software]
) -> FeatureUpdates:
    versions = PeerVersions(NodeId(node_id), known[node_id])
    for other, software in known.items():
        if other != node_id:
            versions.connected(NodeId(other), software)
    node = cluster.nodes[node_id]
    return FeatureUpdates(node.driver, node.controller, versions)


async def update(
    features: FeatureUpdates, level: int, *, is_lower: bool = False, dry_run: bool = False
) -> tuple[int, int]:
    answered = await features.update(level, is_lower=is_lower, dry_run=dry_run)
    assert isinstance(answered.answer, SetFeatureLevelAnswer)
    return answered.answer.before, answered.answer.level


async def refusal(
    features: FeatureUpdates, level: int, *, is_lower: bool = False
) -> errors.ApiError:
    """Return the error of an update, which must be that of a dry run too, and change nothing."""
    before = features.level
    refused = []
    for dry_run in (True, False):
        with pytest.raises(errors.ApiError) as raised:
            await update(features, level, is_lower=is_lower, dry_run=dry_run)
        refused.append(raised.value)
    assert str(refused[0]) == str(refused[1])
    assert features.level == before
    return refused[0]


async def test_the_level_is_raised_on_all_controllers_and_a_repeat_changes_nothing(
    cluster: MemoryCluster, leader: int
) -> None:
    features = updates(cluster, leader, NEW)
    assert await update(features, 2, dry_run=True) == (1, 2)
    assert features.level == 1
    assert await update(features, 2) == (1, 2)
    end = cluster.nodes[leader].driver.next_offset
    assert await update(features, 2) == (2, 2)
    assert await update(features, 2, is_lower=True) == (2, 2)
    assert cluster.nodes[leader].driver.next_offset == end
    for node_id, node in cluster.nodes.items():
        await cluster.agree(node_id, end)
        assert node.controller.cluster_metadata.feature_level == 2


@pytest.mark.parametrize("software", [OLD, UNTOLD, None])
async def test_a_voter_that_lacks_the_level_or_is_not_connected_blocks_it(
    cluster: MemoryCluster, leader: int, software: Software | None
) -> None:
    other = (leader + 1) % cluster.size
    known = dict.fromkeys(range(cluster.size), NEW) | ({other: software} if software else {})
    if software is None:
        del known[other]
    error = await refusal(updates_knowing(cluster, leader, known), 2)
    assert isinstance(error, errors.FeatureLevelError)
    assert (error.level, error.blocked_by) == (2, (other,))
    told = "not connected" if software is None else str(software)
    assert f"controller {other} " in str(error)
    assert told in str(error)


async def test_a_connected_observer_blocks_and_so_does_the_leader_itself(
    cluster: MemoryCluster, leader: int
) -> None:
    error = await refusal(updates(cluster, leader, NEW, OLD), 2)
    assert isinstance(error, errors.FeatureLevelError)
    assert error.blocked_by == (8,)
    beyond = await refusal(updates(cluster, leader), SUPPORTED.highest + 1)
    assert isinstance(beyond, errors.FeatureLevelError)
    assert beyond.blocked_by == tuple(range(cluster.size))


async def test_the_direction_is_that_which_was_asked_for(
    cluster: MemoryCluster, leader: int
) -> None:
    features = updates(cluster, leader)
    assert "not below" in str(await refusal(features, 2, is_lower=True))
    assert isinstance(await refusal(features, 0), errors.InvalidRequestError)
    await update(features, 2)
    assert "is below the current level 2" in str(await refusal(features, 1))
    assert "data of level 2" in str(await refusal(features, 1, is_lower=True))


async def test_the_leader_alone_changes_the_level(cluster: MemoryCluster, leader: int) -> None:
    other = (leader + 1) % cluster.size
    assert isinstance(await refusal(updates(cluster, other), 2), errors.NotLeaderError)


async def test_a_replica_that_lacks_the_level_in_force_is_no_new_voter(
    cluster: MemoryCluster, leader: int
) -> None:
    features = updates(cluster, leader, OLD)
    features.check_voter(NodeId(7))
    features.versions.disconnected(NodeId(7), OLD)
    await update(features, 2)
    features.versions.connected(NodeId(7), OLD)
    with pytest.raises(errors.FeatureLevelError, match="controller 7"):
        features.check_voter(NodeId(7))
    features.check_voter(NodeId(9))


async def test_operators_are_told_why_a_replica_is_no_new_voter(
    cluster: MemoryCluster, leader: int
) -> None:
    features = updates(cluster, leader)
    await update(features, 2)
    features.versions.connected(NodeId(7), OLD)
    service = pb.DESCRIPTOR.services_by_name["QuorumService"]
    unary = QuorumServicer(cluster.nodes[leader].driver, CLUSTER, features).unary()
    key = pb.ReplicaKey(node_id=7, directory_id="d")
    asked = pb.AddVoterRequest(cluster_id=CLUSTER, voter=pb.Voter(key=key, endpoint="h:1"))
    async with (
        served(service_handler(service, CallPipeline(Authenticator(CLUSTER)), unary)) as endpoint,
        client_channel(endpoint) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await QuorumServiceStub(channel).AddVoter(asked)
    failure = read_failure(raised.value)
    assert (failure.code, failure.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "FEATURE_LEVEL",
    )
    assert failure.metadata == {"level": "2", "blocked_by": "7"}


async def test_an_older_follower_stops_at_the_level_and_the_others_go_on(
    cluster: MemoryCluster, leader: int
) -> None:
    older = (leader + 1) % cluster.size
    node = cluster.nodes[older]
    node.controller.cluster_metadata._feature_level._levels = OLD.levels
    await update(updates(cluster, leader), 2)
    await until(node.driver.fatal.done, "the older one stops")
    assert isinstance(node.driver.fatal.exception(), errors.NewerLogError)
    assert node.controller.cluster_metadata.feature_level == 1
    last = await cluster.fill("after", 1)
    await cluster.agree((leader + 2) % cluster.size, last.offset)


async def test_an_older_replica_that_is_sent_a_snapshot_of_the_level_stops_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with MemoryCluster(tmp_path, limits=QuorumLimits(snapshots_kept=1)) as cluster:
        await cluster.fill("a", 20)
        leader = await cluster.leader()
        await update(updates(cluster, leader), 2)
        driver = cluster.nodes[leader].driver
        taken = await driver.take_snapshot()
        await until(
            lambda: driver.describe().log_start_offset == taken.end_offset, "the log is trimmed"
        )
        monkeypatch.setattr(metadata_checkpoint, "SUPPORTED", OLD.levels)
        older = await cluster.start(cluster.size)
        await until(older.driver.fatal.done, "the older one stops")
        assert isinstance(older.driver.fatal.exception(), NewerVersionError)
        assert taken.file_name not in cluster.snapshot_files(cluster.size)
        assert older.controller.committed_end == 0


BEYOND = SUPPORTED.highest + 1
ORDINARY = encode_records(
    (KVsPut(namespaces=("n",), keys=("k",), values=(b"\xf2\x01\x02\x08\x09",)),)
)
"""A record of another kind whose bytes look like that of a level."""


def level(number: int) -> bytes:
    return encode_records((FeatureLevelSet(level=number),))


def written(directory: Path, *payloads: bytes, segment_bytes: int = 1 << 20) -> None:
    """Write a log with one batch for each payload."""
    make(directory)
    journal = open_journal(directory, segment_bytes)
    for base, payload in enumerate(payloads):
        journal.append([batch(base, 1, payload)])
        journal.sync()
    journal.close()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("segment_bytes", [1, 1 << 20])
@pytest.mark.parametrize("piece_bytes", [*range(4, 12), 1 << 20])
def test_a_level_beyond_this_version_is_found_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int, piece_bytes: int
) -> None:
    monkeypatch.setattr(feature_check, "_PIECE_BYTES", piece_bytes)
    payloads = (ORDINARY, level(2), level(BEYOND), ORDINARY)
    written(tmp_path, *payloads, segment_bytes=segment_bytes)
    before = contents(tmp_path)
    with pytest.raises(NewerVersionError, match=f"level {BEYOND}"):
        check_levels(tmp_path)
    assert contents(tmp_path) == before


def test_levels_of_this_version_and_bytes_that_look_like_one_pass(tmp_path: Path) -> None:
    written(tmp_path, ORDINARY, level(SUPPORTED.highest), ORDINARY)
    check_levels(tmp_path)


def test_a_kind_of_a_newer_version_beside_such_bytes_is_refused_too(tmp_path: Path) -> None:
    newer = b"\x0a\x07\xfa\x3f\x04\xf2\x01\x02\x08"  # a record of kind 1023
    written(tmp_path, newer)
    with pytest.raises(NewerVersionError):
        check_levels(tmp_path)


def test_a_torn_tail_is_left_to_recovery(tmp_path: Path) -> None:
    written(tmp_path, ORDINARY, level(BEYOND))
    (segment,) = tmp_path.glob("*.log")
    segment.write_bytes(segment.read_bytes()[:-1])
    check_levels(tmp_path)


def test_a_directory_that_is_not_formatted_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(DirectoryNotFormattedError):
        check_levels(tmp_path)
