"""The slow model's commits with values to put and streams to trim: all of it, or nothing."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from streammeta.controller.errors import ErrorCode, FeatureLevelError
from streammeta.controller.metadata.api import answers as a
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables import values as v
from tests.metadata import slow_model_streams as streams
from tests.metadata.slow_model_state import State


def with_effects(state: State, request: Any, offset: int, commit: Callable[[State], Any]) -> Any:
    """Commit as `commit` does, and do what comes with it."""
    if not (request.kv_puts or request.trims):
        return commit(state)
    if state.feature_level < 3:
        raise FeatureLevelError(3, "values and trims with a commit")
    is_repeat = any(map(state.was_committed, _results(request)))
    trial = pickle.loads(pickle.dumps(state, pickle.HIGHEST_PROTOCOL))
    answer = commit(trial)
    if answer.error:
        return answer
    if is_repeat:
        results = tuple(_still(state, item) for item in request.kv_puts)
        return replace(
            answer,
            kv_results=results,
            trim_errors=(ErrorCode.NONE,) * len(request.trims),
            trim_start_offsets=_starts(state, request),
        )
    results = tuple(_put_result(state, item, offset) for item in request.kv_puts)
    node_id = request.node.node_id
    errors = tuple(streams.trim_one(trial, node_id, item) for item in request.trims)
    error = next((e for e in (*(one.error for one in results), *errors) if e), ErrorCode.NONE)
    if error:
        return replace(_refused(request, error), kv_results=results, trim_errors=errors)
    commit(state)
    for item in request.trims:
        streams.trim_one(state, node_id, item)
    for item in request.kv_puts:
        state.kvs[(item.namespace, item.key)] = (item.value, offset + 1)
    return replace(
        answer,
        kv_results=results,
        trim_errors=errors,
        trim_start_offsets=_starts(state, request),
    )


def _starts(state: State, request: Any) -> tuple[int, ...]:
    streams_there = [state.streams.get(item.stream_id) for item in request.trims]
    return tuple(-1 if stream is None else stream.start for stream in streams_there)


def _results(request: Any) -> list[int]:
    """Ids that a repeat of the commit is known by."""
    if request.object_id >= 0:
        return [request.object_id]
    ids: list[int] = request.stream_objects.object_id.tolist()
    return ids[:1] if len(request.compacted_object_ids) else ids


def _put_result(state: State, item: r.KVToPut, offset: int) -> a.KVResult:
    key = (item.namespace, item.key)
    if not streams.may_put(item, state.kvs.get(key)):
        return streams.result(state, key, ErrorCode.KEY_EXIST)
    return a.KVResult(error=ErrorCode.NONE, version=offset + 1, found=True)


def _still(state: State, item: r.KVToPut) -> a.KVResult:
    """The version of a value that was put with the first attempt, unless it is gone."""
    value, version = state.kvs.get((item.namespace, item.key), (None, 0))
    if value != item.value:
        return a.KVResult(error=ErrorCode.NONE)
    return a.KVResult(error=ErrorCode.NONE, version=version, found=True)


def _refused(request: Any, error: ErrorCode) -> Any:
    if isinstance(request, r.CommitStreamObject):
        return a.CommitStreamObjectAnswer(error=error)
    return a.CommitStreamSetObjectAnswer(
        error=error,
        range_errors=v.column([int(error)] * len(request.ranges.stream_id)),
        stream_object_errors=v.column([int(error)] * len(request.stream_objects.stream_id)),
    )
