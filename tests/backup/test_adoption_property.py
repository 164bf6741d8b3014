"""Any history, a backup at any point of it, a disaster: what the bucket holds is not lost.

`STREAMMETA_DISASTER_SEEDS=100:400` runs those seeds; a failure names its seed.
"""

from __future__ import annotations

import io
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from streammeta.cli.recovery.adoption_command import to_request
from streammeta.cli.recovery.adoption_survey import MetadataState, list_missing, read_map_state
from streammeta.controller.backup import restoring
from streammeta.controller.backup.replaying import Replayed
from streammeta.controller.backup.segments import Position
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.object_slices import ObjectQuery
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables.values import NodeIdentity
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.rpc.codec.wire_columns import adoption_in
from streammeta.controller.runtime.persistence.metadata_checkpoint import read_metadata
from streammeta.storage.adoption.model import Candidate, Why
from streammeta.storage.adoption.planner import AdoptionPlan, plan_adoption
from tests.backup.adoption_world import NODES, NOW_MS, World
from tests.kit.restore_plans import CREATED_MS, planned
from tests.kit.seeds import seeds

_SEEDS = seeds(5, slow=10, variable="STREAMMETA_DISASTER_SEEDS")
STEPS = 60


def replayed(frozen: Any) -> Replayed:
    copy = ClusterMetadata.from_sections(frozen.sections(), frozen.end_offset)
    return Replayed(copy, Position(frozen.end_offset, bytes(16)), 3, NOW_MS)


def restored(frozen: Any, claimed_below: int) -> tuple[ClusterMetadata, MetadataState]:
    """A restored map, and what a survey reads of it."""
    source = replayed(frozen)
    plan = planned(source, claimed_below)
    file = io.BytesIO()
    restoring.write_checkpoint(file, source, plan, VoterSet())
    state = read_map_state(file)
    assert state is not None
    return read_metadata(file, plan.snapshot_id).cluster_metadata, state


def adoption(world: World, state: MetadataState, *, passes_gaps: bool = False) -> AdoptionPlan:
    def plan() -> AdoptionPlan:
        candidates = [one for one in world.bucket.values() if state.is_candidate(one.object_id)]
        heads = state.stream_heads(world.bucket.keys())
        return plan_adoption(heads, state.next_stream_id, candidates, passes_gaps=passes_gaps)

    found = plan()
    for place, object_id in enumerate(found.torn, 1):
        copied, copy_id = world.bucket[object_id], state.undecided.stop - place
        runs = tuple(replace(run, object_id=copy_id) for run in copied.runs)
        world.bucket[copy_id] = Candidate(copy_id, copied.size, runs)
    return plan() if found.torn else found


def write(cluster_metadata: ClusterMetadata, request: Any) -> Any:
    offset = cluster_metadata.applied_end_offset
    decision = cluster_metadata.decide(request, NOW_MS, offset)
    if decision.records:
        cluster_metadata.apply(offset, decision.records)
    return decision.answer


def adopt(cluster_metadata: ClusterMetadata, plan: AdoptionPlan) -> None:
    for batch in plan.batches:
        answer = write(cluster_metadata, adoption_in(to_request(batch)))
        assert not answer.errors.any(), (answer.errors.tolist(), batch)


def read_back(
    world: World, cluster_metadata: ClusterMetadata, stream_id: int, wanted: set[int]
) -> dict[int, bytes]:
    """The digest at each record's start, as a reader finds it: whole entries of listed objects.

    Reads on behind what is in no object.
    """
    records: dict[int, bytes] = {}
    at = 0
    while rest := [start for start in wanted if start >= at]:
        query = ObjectQuery(stream_id, min(rest), -1)
        found: Any = cluster_metadata.query(r.GetObjects(queries=(query,)))
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


def check(
    world: World, cluster_metadata: ClusterMetadata, behind_gaps: set[tuple[int, int]]
) -> None:
    """Everything acknowledged is read, at its offset; ends and epochs are behind it.

    But for what lies behind an upload that was owed, and is in no object.
    """
    for stream_id, known in world.acknowledged.items():
        low = world.trimmed.get(stream_id, 0)
        records = {
            at: record
            for at, record in known.items()
            if (stream_id, at) not in behind_gaps and record.end > low
        }
        if not records:
            continue
        wanted = {start: record.digest for start, record in records.items()}
        found = read_back(world, cluster_metadata, stream_id, set(wanted))
        assert {start: found.get(start) for start in wanted} == wanted, f"stream {stream_id}"
        answer: Any = cluster_metadata.query(r.DescribeStreams(stream_ids=(stream_id,)))
        (described,) = answer.streams
        assert described.end_offset >= max((record.end for record in records.values()), default=0)
        assert described.epoch >= max((record.epoch for record in records.values()), default=0)


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
    cluster_metadata, state = restored(frozen, issued)
    plan = adoption(world, state, passes_gaps=passes_gaps)
    ranges = (part for object_ in plan.objects for part in object_.ranges)
    missing = list(list_missing(state.held, world.bucket.keys(), ranges))
    missing = [range_ for range_ in missing if range_.end > world.trimmed.get(range_.stream_id, 0)]
    assert not missing, missing
    adopt(cluster_metadata, plan)
    gaps = behind_gaps(world, state, plan, passes_gaps=passes_gaps)
    check(world, cluster_metadata, gaps)
    write(cluster_metadata, r.FinishRestore())
    before = set(world.bucket)
    node = NodeIdentity(NODES[0].node_id, CREATED_MS + 1)
    write(cluster_metadata, r.RegisterNode(node=node))
    new = write(
        cluster_metadata, r.PrepareObjects(request_id="n", node=node, count=9, ttl_ms=10_000)
    )
    assert before.isdisjoint(range(new.first_object_id, new.first_object_id + 9))
    # Whatever the map does not know stays undecided: no deletion takes it.
    known: Any = cluster_metadata.query(r.CheckObjects(object_ids=tuple(sorted(before))))
    for object_id, found in zip(sorted(before), known.states, strict=True):
        assert object_id in state.undecided or found.name != "UNSPECIFIED", object_id
    restore_again(world, cluster_metadata, gaps)


def behind_gaps(
    world: World, state: MetadataState, plan: AdoptionPlan, *, passes_gaps: bool
) -> set[tuple[int, int]]:
    """What is reported as lost, by stream and offset: behind a gap that the brokers left, no more.

    They owe it, or have trimmed the stream beyond the end that the restored map knows, or beyond
    the beginning of a pending upload.
    """
    lost = [range_ for range_ in plan.lost if range_.end > world.trimmed.get(range_.stream_id, 0)]
    assert {loss.why for loss in lost} <= {Why.GAP}, lost
    streams = state.streams
    trimmed = {stream: start for stream, start in world.trimmed.items() if stream in streams}
    cut_uploads = {
        stream_id
        for stream_id, start in trimmed.items()
        if any(low < start for low, _, _ in streams[stream_id].owed)
    }
    open_ends = {stream for stream, start in trimmed.items() if start > streams[stream].end_offset}
    excused = set(world.owed) | cut_uploads | (set() if passes_gaps else open_ends)
    assert {loss.stream_id for loss in lost} <= excused, lost
    return {(loss.stream_id, at) for loss in lost for at in range(loss.start, loss.end)}


def restore_again(
    world: World, cluster_metadata: ClusterMetadata, gaps: set[tuple[int, int]]
) -> None:
    """A second disaster right after: nothing is left to adopt, and nothing more is lost."""
    again, state = restored(cluster_metadata.freeze(), 0)
    assert again.next_object_id > cluster_metadata.next_object_id
    plan = adoption(world, state)
    assert not plan.objects
    check(world, again, gaps)


@pytest.mark.parametrize("seed", _SEEDS)
def test_no_acknowledged_record_is_lost_whatever_happens_around_a_backup(seed: int) -> None:
    try:
        run_history(seed)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error


@pytest.mark.parametrize("passes_gaps", [False, True])
@pytest.mark.parametrize("seed", _SEEDS)
def test_no_record_is_lost_after_compaction_and_deletion(seed: int, passes_gaps: bool) -> None:
    try:
        run_history(seed, steps=3 * STEPS, lives_long=True, passes_gaps=passes_gaps)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
