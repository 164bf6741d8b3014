"""Restoring in memory: the map is the backup's, and nothing of before is issued or taken again."""

from __future__ import annotations

import io
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from streammeta.controller.backup import restoring
from streammeta.controller.backup.chains import chain_to
from streammeta.controller.backup.errors import BackupError
from streammeta.controller.backup.replaying import Replayed, replay
from streammeta.controller.backup.restoring import RestorePlan
from streammeta.controller.errors import ErrorCode, RecoveringError
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.sections.frozen import FrozenMetadata
from streammeta.controller.metadata.tables.values import (
    INT32_MAX,
    NodeIdentity,
    ObjectState,
    column,
)
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.runtime.persistence.metadata_checkpoint import read_metadata
from streammeta.storage import json_files
from tests.backup.backup_world import Backup, random_log
from tests.kit.restore_plans import CREATED_MS, planned
from tests.kit.seeds import seeds
from tests.metadata.rich_history import plain


def restored(replayed: Replayed, plan: RestorePlan) -> ClusterMetadata:
    """The map that a controller of the new cluster begins with."""
    file = io.BytesIO()
    restoring.write_checkpoint(file, replayed, plan, VoterSet())
    loaded = read_metadata(file, plan.snapshot_id)
    assert loaded.log_hash == replayed.position.log_hash
    assert loaded.cluster_metadata.state_hash().hex() == plan.state_hash
    return loaded.cluster_metadata


def at_random(seed: int) -> tuple[Backup, Replayed]:
    """A whole backup, and what it gives at some end of its log."""
    backup = Backup(random_log(seed))
    backup.put_segment(0, backup.log.ends[-1])
    end = Random(seed).choice(backup.log.ends[8:])
    chain = chain_to(backup.archive.inventory(), end)
    assert chain is not None
    return backup, replay(chain, backup.archive, end_offset=end)


def ids_of(view: FrozenMetadata, *states: ObjectState) -> set[int]:
    objects = view.sections()["objects"]
    chosen = np.isin(np.asarray(objects["state"]), states)
    return {int(object_id) for object_id in np.asarray(objects["object_id"])[chosen]}


@pytest.mark.parametrize("seed", seeds(5, slow=10))
def test_no_id_or_offset_of_the_whole_history_is_issued_again(seed: int) -> None:
    backup, replayed = at_random(seed)
    before = backup.log.views[-1].sections()
    counters = {name: int(values[0]) for name, values in before["counters"].items()}
    plan = planned(replayed)
    after = restored(replayed, plan)
    assert plan.end_offset > backup.log.ends[-1]
    assert plan.epoch > backup.log.batches[-1].epoch
    node = NodeIdentity(70_000, CREATED_MS + 1)
    offset = plan.end_offset
    for request in (
        r.RegisterNode(node=node),
        r.FinishRestore(),
        r.PrepareObjects(request_id="new", node=node, count=3, ttl_ms=1_000),
        r.CreateStreams(request_id="new", node=node, streams=(r.NewStream(),)),
        r.GetNextNodeId(request_id="new"),
    ):
        decision = after.decide(request, CREATED_MS, offset)
        after.apply(offset, decision.records)
        offset += 1
        match decision.answer:
            case answer if hasattr(answer, "first_object_id"):
                assert answer.first_object_id >= counters["next_object_id"]
                assert answer.first_object_id == plan.next_object_id
            case answer if hasattr(answer, "stream_ids"):
                assert min(answer.stream_ids) >= counters["next_stream_id"]
            case answer if hasattr(answer, "node_id"):
                assert answer.node_id > counters["last_node_id"]
                assert answer.node_id not in [int(node) for node in before["nodes"]["node_id"]]


@pytest.mark.parametrize("seed", seeds(5, slow=10))
def test_an_object_of_the_whole_history_is_known_removed_before_or_undecided(seed: int) -> None:
    """What reconciliation may delete is what was forgotten before the point, nothing else."""
    backup, replayed = at_random(seed)
    plan = planned(replayed)
    view = replayed.cluster_metadata.freeze()
    known = ids_of(restored(replayed, plan).freeze(), *ObjectState)
    assert known == ids_of(view, *ObjectState) - ids_of(view, ObjectState.PREPARED)
    undecided = range(plan.undecided_from, plan.next_object_id)
    later = ids_of(backup.log.views[-1], ObjectState.COMMITTED, ObjectState.LINKED)
    assert all(object_id in known or object_id in undecided for object_id in later)


@pytest.mark.parametrize("seed", seeds(5, slow=10))
def test_all_else_is_as_it_was(seed: int) -> None:
    _, replayed = at_random(seed)
    before = plain(replayed.cluster_metadata.freeze().sections())
    after = plain(restored(replayed, planned(replayed)).freeze().sections())
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= {
        *("counters", "objects", "nodes", "free_node_ids", "bucket_claim", "feature_level"),
    }
    assert set(after) - set(before) == {"recovery"}
    assert after["feature_level"]["level"] == [max(2, *before["feature_level"]["level"])]
    assert after["counters"]["deletions_held_until_ms"] == [CREATED_MS + restoring.HOLD_MS]
    assert before["kvs"] == after["kvs"]


@pytest.mark.parametrize("seed", seeds(2, slow=3))
def test_every_process_of_before_is_fenced(seed: int) -> None:
    _, replayed = at_random(seed)
    after = restored(replayed, planned(replayed))
    nodes = replayed.cluster_metadata.nodes()
    assert nodes
    finish = after.decide(r.FinishRestore(), CREATED_MS, after.applied_end_offset)
    after.apply(after.applied_end_offset, finish.records)
    for node in nodes:
        identity = NodeIdentity(node.node_id, node.node_epoch)
        request = r.PrepareObjects(request_id="old", node=identity, count=1, ttl_ms=1_000)
        answer: Any = after.decide(request, CREATED_MS, 2**40).answer
        assert answer.error is not ErrorCode.NONE
        assert node.departed or answer.error is ErrorCode.NODE_EPOCH_EXPIRED


def test_processes_whose_clocks_were_ahead_are_fenced_too() -> None:
    _, replayed = at_random(1)
    cluster_metadata = replayed.cluster_metadata
    fast = NodeIdentity(60_001, CREATED_MS + 10**9)
    offset = cluster_metadata.applied_end_offset
    decision = cluster_metadata.decide(r.RegisterNode(node=fast), CREATED_MS, offset)
    cluster_metadata.apply(offset, decision.records)
    nodes = restored(replayed, planned(replayed)).freeze().sections()["nodes"]
    epochs = dict(zip(map(int, nodes["node_id"]), map(int, nodes["node_epoch"]), strict=True))
    assert epochs.pop(fast.node_id) == fast.node_epoch + 1
    assert set(epochs.values()) == {CREATED_MS}


@pytest.mark.parametrize("ahead_ms", [0, 86_400_000])
def test_a_clock_that_is_behind_the_backup_does_not_shorten_the_hold(ahead_ms: int) -> None:
    _, replayed = at_random(1)
    plan = replace(planned(replayed), committed_by_ms=CREATED_MS + ahead_ms, state_hash="")
    view = replayed.cluster_metadata.freeze()
    plan = replace(plan, state_hash=restoring.state_hash(view, plan))
    counters = restored(replayed, plan).freeze().sections()["counters"]
    assert int(counters["deletions_held_until_ms"][0]) == CREATED_MS + ahead_ms + restoring.HOLD_MS
    assert int(counters["deletions_held_since_ms"][0]) == 0


def test_a_restored_map_waits_for_adoption_with_all_that_brokers_change() -> None:
    _, replayed = at_random(4)
    plan = planned(replayed)
    after = restored(replayed, plan)
    assert after.undecided == (plan.undecided_from, plan.next_object_id)
    node = NodeIdentity(70_000, CREATED_MS + 1)
    prepare = r.PrepareObjects(request_id="new", node=node, count=1, ttl_ms=1_000)
    for request in (r.RegisterNode(node=node), r.FinishRestore()):
        with pytest.raises(RecoveringError):
            after.decide(prepare, CREATED_MS, after.applied_end_offset)
        decision = after.decide(request, CREATED_MS, after.applied_end_offset)
        after.apply(after.applied_end_offset, decision.records)
    assert after.undecided is None
    answer: Any = after.decide(prepare, CREATED_MS, after.applied_end_offset).answer
    assert answer.first_object_id == plan.next_object_id


def test_what_one_restore_left_undecided_the_next_one_does() -> None:
    _, replayed = at_random(3)
    plan = planned(replayed)
    again = replace(replayed, cluster_metadata=restored(replayed, plan))
    assert planned(again).undecided_from == plan.undecided_from


def test_a_second_restore_jumps_again() -> None:
    _, replayed = at_random(3)
    plan = planned(replayed)
    again = replace(replayed, cluster_metadata=restored(replayed, plan))
    second = planned(again, claimed_below=plan.next_object_id + 1_000_000)
    assert second.next_object_id >= plan.next_object_id + restoring.OBJECT_ID_JUMP
    assert restored(again, second).next_object_id == second.next_object_id


@pytest.mark.parametrize(
    ("issued", "claimed", "first"),
    [(0, 0, 1 << 24), (1, 0, 1 << 25), (5, 1 << 24, 1 << 25), (3 << 24, 9, 1 << 26)],
)
def test_object_ids_jump_above_all_claimed_ids(issued: int, claimed: int, first: int) -> None:
    assert restoring.jump_object_id(issued, claimed) == first
    assert first - max(issued, claimed) >= restoring.OBJECT_ID_JUMP


def test_a_backup_that_is_not_that_of_the_plan_is_refused() -> None:
    backup, replayed = at_random(2)
    plan = planned(replayed)
    restoring.require_same(replayed, plan)
    other_end = backup.log.ends[3]
    chain = chain_to(backup.archive.inventory(), other_end)
    assert chain is not None
    other = replay(chain, backup.archive, end_offset=other_end)
    with pytest.raises(BackupError, match="plan"):
        restoring.require_same(other, plan)
    with pytest.raises(BackupError, match="plan"):
        restoring.require_same(replayed, replace(plan, next_object_id=plan.next_object_id + 1))


def test_ids_that_would_not_fit_are_refused() -> None:
    _, replayed = at_random(1)
    plan = planned(replayed)
    sections = dict(replayed.cluster_metadata.freeze().sections())
    sections["counters"] = {**sections["counters"], "last_node_id": column([INT32_MAX - 1])}
    full = ClusterMetadata.from_sections(sections, replayed.position.end_offset)
    with pytest.raises(BackupError, match="broker id"):
        restoring.state_hash(full.freeze(), plan)


def test_a_plan_is_read_as_it_was_written() -> None:
    _, replayed = at_random(1)
    plan = planned(replayed)
    assert json_files.decode(RestorePlan, "plan", json_files.encode(plan)) == plan
