"""Operations of time: the clock, expiry, clean-up of destroyed objects and streams, overload."""

from __future__ import annotations

from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.tables.values import ObjectState, StreamState
from tests.conformance.live_controller import DEFAULT_WINDOW_MS, OverloadWorld
from tests.conformance.operations_streams import TOPIC_TAG
from tests.conformance.scenario_args import Args
from tests.conformance.scenario_run import PAGE, SERVICE, TOPIC_DELETIONS, Outcome, ScenarioRun
from tests.conformance.storage_world import NAMESPACE


async def advance_clock(run: ScenarioRun, args: Args) -> Outcome:
    ms = args.take("ms")
    run.clock.now_ms += ms
    overload_of(run).advance(ms)
    return Outcome()


async def expire_scan(run: ScenarioRun, _: Args) -> Outcome:
    """Expire what is due, then clean up once; what is expired now is cleaned up later."""
    before = await run.objects()
    await run.storage.expire()
    marked = {
        item.object_id
        for item in (await run.objects()).values()
        if item.state is ObjectState.MARK_DESTROYED
        and before[item.object_id].state is not ObjectState.MARK_DESTROYED
    }
    return await _clean_up(run, marked)


async def lifecycle_check(run: ScenarioRun, _: Args) -> Outcome:
    return await _clean_up(run, set())


async def _clean_up(run: ScenarioRun, marked: set[int]) -> Outcome:
    started = await run.storage.clean_up(marked)
    return Outcome({"error": "NONE"}, [] if started else ["requests-in-parallel"])


async def complete_storage_delete(run: ScenarioRun, _: Args) -> Outcome:
    await run.storage.complete()
    return Outcome({"error": "NONE"})


async def cleanup_scale_in_nodes(run: ScenarioRun, args: Args) -> Outcome:
    """Destroy set objects, of nodes that are not there, that hold nothing any more."""
    states = run.given.take("node_state", {}) or {}
    named = args.take("nodes", args.take("inactive_nodes", run.given.take("inactive_nodes", None)))
    active = args.take("active_nodes", run.given.take("active_nodes", [])) or []
    away = [node_id for node_id, state in states.items() if state != "ACTIVE"]
    if named is not None:
        away = list(named)
    elif not states:
        away = [node_id for node_id in await run.nodes() if node_id not in active]
    before = {item for item, known in (await run.objects()).items() if _is_committed(known.state)}
    for node_id in sorted(away):
        after = -1
        while True:
            request = requests.DestroyDeadStreamSetObjects(
                node_id=node_id, after_object_id=after, limit=1_000
            )
            answer = await run.live.write(request)
            after = answer.next_after
            if after < 0:
                break
    held = {item for item, known in (await run.objects()).items() if _is_committed(known.state)}
    return Outcome({"error": "NONE", "destroyed": sorted(before - held)})


def _is_committed(state: ObjectState) -> bool:
    return state is ObjectState.COMMITTED


async def cleanup_deleted_topics(run: ScenarioRun, args: Args) -> Outcome:
    """Delete the first marked topic's streams when all are closed, its keys when none is left."""
    namespace = args.take("namespace", run.config.get("namespace", NAMESPACE))
    found = Outcome({"error": "NONE", "delete_stream_requests": []}, ["topics"])
    pending = await run.pending_topic_deletions()
    if not pending:
        return found
    topic = pending[0]
    streams = [
        stream
        for stream in (await run.streams()).values()
        if dict(stream.tags).get(TOPIC_TAG) == topic
    ]
    if any(stream.state is not StreamState.CLOSED for stream in streams):
        return found
    if streams:
        found.answer["delete_stream_requests"] = [stream.stream_id for stream in streams]
        for stream in streams:
            item = requests.StreamToDelete(stream.stream_id, stream.epoch)
            await run.live.write(requests.DeleteStreams(node=SERVICE, streams=(item,)))
        return found
    listed = await run.live.read(
        requests.ListKVs(prefix=f"{namespace}/{topic}/", keys_only=True, page=PAGE)
    )
    for keys in ([entry.key for entry in listed.entries], [TOPIC_DELETIONS + topic]):
        if keys:
            await run.live.write(
                requests.DeleteKVs(keys=tuple(requests.KVKey(key=key) for key in keys))
            )
    return found


# ---- overload ----


def overload_of(run: ScenarioRun) -> OverloadWorld:
    if run.overload is None:
        run.overload = OverloadWorld(run.config.get("half_open_window_ms", DEFAULT_WINDOW_MS))
    return run.overload


async def overload(run: ScenarioRun, _: Args) -> Outcome:
    """Let the controller hear no node."""
    overload_of(run).overload()
    return Outcome()


async def success(run: ScenarioRun, _: Args) -> Outcome:
    overload_of(run).success()
    return Outcome()


async def is_overload(run: ScenarioRun, _: Args) -> Outcome:
    """Ask whether no node is fenced for now."""
    value = overload_of(run).is_overload()
    return Outcome({"value": value, "overload": value})
