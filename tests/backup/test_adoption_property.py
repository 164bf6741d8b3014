"""Any history, a backup at any point of it, a disaster: what the bucket holds is not lost.

`STREAMMETA_DISASTER_SEEDS=100:400` runs those seeds; a failure names its seed.
"""

from __future__ import annotations

import io
import os
from random import Random
from typing import Any

import pytest

from streammeta.cli.adoption_command import to_request
from streammeta.cli.adoption_survey import MapState, Missing, list_missing, read_map_state
from streammeta.controller.backup import restoring
from streammeta.controller.backup.replaying import Replayed
from streammeta.controller.backup.segments import Position
from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata.cluster_map import ClusterMap
from streammeta.controller.metadata.values import NodeIdentity
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.rpc.adoption_messages import adoption_in
from streammeta.controller.runtime.map_checkpoint import read_map
from streammeta.storage.adoption.model import LeftBehind, Why
from streammeta.storage.adoption.planner import AdoptionPlan, plan_adoption
from tests.backup.adoption_world import NODES, NOW_MS, World
from tests.backup.test_restore import NOW_MS as RESTORED_MS
from tests.backup.test_restore import planned

_FIRST, _LAST = map(int, os.environ.get("STREAMMETA_DISASTER_SEEDS", "0:40").split(":"))
STEPS = 60


def replayed(frozen: Any) -> Replayed:
    copy = ClusterMap.from_sections(frozen.sections(), frozen.end_offset)
    return Replayed(copy, Position(frozen.end_offset, bytes(16)), 3, NOW_MS)


def restored(frozen: Any, claimed_below: int) -> tuple[ClusterMap, MapState]:
    """A restored map, and what a survey reads of it."""
    source = replayed(frozen)
    plan = planned(source, claimed_below)
    file = io.BytesIO()
    restoring.write_checkpoint(file, source, plan, VoterSet())
    state = read_map_state(file)
    assert state is not None
    return read_map(file, plan.snapshot_id).cluster_map, state


def adoption(world: World, state: MapState, *, passes_gaps: bool = False) -> AdoptionPlan:
    candidates = [one for one in world.bucket.values() if state.is_candidate(one.object_id)]
    heads = state.stream_heads(world.bucket.keys())
    return plan_adoption(heads, state.next_stream_id, candidates, passes_gaps=passes_gaps)


def write(cluster_map: ClusterMap, request: Any) -> Any:
    offset = cluster_map.applied_end_offset
    decision = cluster_map.decide(request, NOW_MS, offset)
    if decision.records:
        cluster_map.apply(offset, decision.records)
    return decision.answer


def adopt(cluster_map: ClusterMap, plan: AdoptionPlan) -> None:
    for batch in plan.batches:
        answer = write(cluster_map, adoption_in(to_request(batch)))
        assert not answer.errors.any(), (answer.errors.tolist(), batch)


def read_back(
    world: World, cluster_map: ClusterMap, stream_id: int, wanted: set[int]
) -> dict[int, bytes]:
    """The digest at each record's start, as a reader finds it: whole entries of listed objects.

    Reads on behind what is in no object.
    """
    records: dict[int, bytes] = {}
    at = 0
    while rest := [start for start in wanted if start >= at]:
        query = r.ObjectQuery(stream_id, min(rest), -1)
        found: Any = cluster_map.query(r.GetObjects(queries=(query,)))
        at = min(rest) + 1
        for part in found.results[0].objects:
            at = part.end_offset
            if part.object_id not in world.bucket:
                continue
            entries = [
                entry
                for run in world.bucket[part.object_id].runs
                for entry in run.entries
                if run.stream_id == stream_id and part.start_offset <= entry[0].start < at
            ]
            assert entries[0][0].start == part.start_offset, "a part begins within an entry"
            assert entries[-1][-1].end == at, "a part ends within an entry"
            records |= {record.start: record.digest for entry in entries for record in entry}
    return records


def check(world: World, cluster_map: ClusterMap, behind_gaps: set[tuple[int, int]]) -> None:
    """Everything acknowledged is read, at its offset; ends and epochs are behind it.

    But for what lies behind an upload that was owed, and is in no object.
    """
    for stream_id, known in world.acknowledged.items():
        low = world.trimmed.get(stream_id, 0)
        records = {
            at: one
            for at, one in known.items()
            if (stream_id, at) not in behind_gaps and one.end > low
        }
        if not records:
            continue
        wanted = {start: record.digest for start, record in records.items()}
        found = read_back(world, cluster_map, stream_id, set(wanted))
        assert {start: found.get(start) for start in wanted} == wanted, f"stream {stream_id}"
        answer: Any = cluster_map.query(r.DescribeStreams(stream_ids=(stream_id,)))
        (described,) = answer.streams
        assert described.end_offset >= max((one.end for one in records.values()), default=0)
        assert described.epoch >= max((one.epoch for one in records.values()), default=0)


def run_history(
    seed: int, *, steps: int = STEPS, lives_long: bool = False, passes_gaps: bool = False
) -> None:
    rng = Random(seed)
    world = World(rng, lives_long=lives_long)
    world.start()
    point = rng.randrange(steps)
    for step in range(steps):
        if step == point:
            frozen = world.map.freeze()
        world.step()
    issued = world.map.next_object_id
    cluster_map, state = restored(frozen, issued)
    plan = adoption(world, state, passes_gaps=passes_gaps)
    ranges = (part for one in plan.objects for part in one.ranges)
    missing = list(list_missing(state.held, world.bucket.keys(), ranges))
    missing = [one for one in missing if one.end > world.trimmed.get(one.stream_id, 0)]
    assert all(is_torn(world, state, one) for one in missing), missing
    gone = {(one.stream_id, at) for one in missing for at in range(one.start, one.end)}
    adopt(cluster_map, plan)
    gaps = behind_gaps(world, state, plan, passes_gaps=passes_gaps) | gone
    check(world, cluster_map, gaps)
    write(cluster_map, r.FinishRestore())
    before = set(world.bucket)
    node = NodeIdentity(NODES[0].node_id, RESTORED_MS + 1)
    write(cluster_map, r.RegisterNode(node=node))
    new = write(cluster_map, r.PrepareObjects(request_id="n", node=node, count=9, ttl_ms=10_000))
    assert before.isdisjoint(range(new.first_object_id, new.first_object_id + 9))
    # Whatever the map does not know stays undecided: no deletion takes it.
    known: Any = cluster_map.query(r.CheckObjects(object_ids=tuple(sorted(before))))
    for object_id, found in zip(sorted(before), known.states, strict=True):
        assert object_id in state.undecided or found.name != "UNSPECIFIED", object_id
    restore_again(world, cluster_map, gaps)


def is_torn(world: World, state: MapState, missing: Missing | LeftBehind) -> bool:
    """Whether what would fill a range is one entry with an object that other streams still need."""
    held = state.stream_heads(world.bucket.keys())[missing.stream_id].held
    kept = [(one.start, one.end) for one in held if one.is_readable]
    return any(
        entry[0].start < missing.end
        and missing.start < entry[-1].end
        and any(entry[0].start < end and start < entry[-1].end for start, end in kept)
        for candidate in world.bucket.values()
        for run in candidate.runs
        for entry in run.entries
        if run.stream_id == missing.stream_id and state.is_candidate(run.object_id)
    )


def behind_gaps(
    world: World, state: MapState, plan: AdoptionPlan, *, passes_gaps: bool
) -> set[tuple[int, int]]:
    """What is reported as lost, by stream and offset: behind a gap that the brokers left, no more.

    They owe it, or have trimmed the stream beyond the end that the restored map knows.
    """
    lost = [one for one in plan.lost if one.end > world.trimmed.get(one.stream_id, 0)]
    torn = [one for one in lost if is_torn(world, state, one)]
    lost = [one for one in lost if one not in torn]
    assert {one.why for one in lost} <= {Why.GAP}, lost
    open_ends = {
        stream_id
        for stream_id, start in world.trimmed.items()
        if stream_id in state.streams and start > state.streams[stream_id].end_offset
    }
    if passes_gaps:
        assert not lost, "what comes after a gap is adopted"
    assert {one.stream_id for one in lost} <= set(world.owed) | open_ends, lost
    return {(one.stream_id, at) for one in lost + torn for at in range(one.start, one.end)}


def restore_again(world: World, cluster_map: ClusterMap, gaps: set[tuple[int, int]]) -> None:
    """A second disaster right after: nothing is left to adopt, and nothing more is lost."""
    again, state = restored(cluster_map.freeze(), 0)
    assert again.next_object_id > cluster_map.next_object_id
    plan = adoption(world, state)
    assert not plan.objects
    check(world, again, gaps)


@pytest.mark.parametrize("seed", range(_FIRST, _LAST))
def test_nothing_acknowledged_is_lost_whatever_happened_before_and_after_the_backup(
    seed: int,
) -> None:
    try:
        run_history(seed)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error


@pytest.mark.parametrize("passes_gaps", [False, True])
@pytest.mark.parametrize("seed", range(_FIRST, _LAST))
def test_nothing_acknowledged_is_lost_however_much_was_compacted_and_deleted_since(
    seed: int, passes_gaps: bool
) -> None:
    try:
        run_history(seed, steps=3 * STEPS, lives_long=True, passes_gaps=passes_gaps)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
