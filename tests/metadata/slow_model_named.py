"""The slow model's named objects: names as keys, objects that go with their owners."""

import json
from typing import Any

from streammeta.controller.errors import ErrorCode, FeatureLevelError
from streammeta.controller.metadata.api import named_answers as a
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.answers import ErrorsAnswer
from streammeta.controller.metadata.tables.values import ObjectKind, ObjectState
from tests.metadata.slow_model_state import State
from tests.metadata.slow_model_streams import PAGE_SIZE

NAMES, OWNERS = "_streammeta/named", "_streammeta/named-owners"


def names_of(state: State) -> dict[str, dict[str, Any]]:
    """What each name says, in name order."""
    found = {key: value for (space, key), (value, _) in state.kvs.items() if space == NAMES}
    return {name: json.loads(found[name]) for name in sorted(found)}


def commit(state: State, request: r.CommitNamedObjects, now: int, offset: int) -> ErrorsAnswer:
    if state.feature_level < 3:
        raise FeatureLevelError(3, "named objects")
    errors = tuple(state.check(request.node) or _verdict(state, item) for item in request.objects)
    fresh = [object_ for object_ in request.objects if state.is_prepared(object_.object_id)]
    if not any(errors):
        for name in fresh:
            _commit(state, name, now, offset)
    return ErrorsAnswer(errors=errors)


def _verdict(state: State, one: r.NamedObjectToCommit) -> ErrorCode:
    if state.was_committed(one.object_id):
        same = state.made_with[one.object_id] == _content(one)
        return ErrorCode.NONE if same else ErrorCode.OBJECT_CONTENT_MISMATCH
    if not state.is_prepared(one.object_id):
        return ErrorCode.OBJECT_NOT_EXIST
    if (NAMES, one.name) in state.kvs:
        return ErrorCode.KEY_EXIST
    if one.owner_key is None:
        known = one.owner_stream_id in state.streams
        return ErrorCode.NONE if known else ErrorCode.STREAM_NOT_EXIST
    known = (one.owner_key.namespace, one.owner_key.key) in state.kvs
    return ErrorCode.NONE if known else ErrorCode.KEY_NOT_EXIST


def _content(one: r.NamedObjectToCommit) -> object:
    owner = one.owner_key, one.owner_stream_id
    return ("named", one.name, one.object_size, one.crc32c, owner, sorted(one.metadata))


def _commit(state: State, one: r.NamedObjectToCommit, now: int, offset: int) -> None:
    item = state.objects[one.object_id]
    item.state, item.kind, item.timestamp = ObjectState.COMMITTED, ObjectKind.NAMED, now
    item.size, item.crc32c = one.object_size, one.crc32c
    state.made_with[one.object_id] = _content(one)
    says: dict[str, Any] = {"id": one.object_id, "tags": sorted(one.metadata)}
    if one.owner_key is None:
        says["stream"] = one.owner_stream_id
    else:
        says["key"] = [one.owner_key.namespace, one.owner_key.key]
    value = json.dumps(says, sort_keys=True, separators=(",", ":")).encode()
    state.kvs[(NAMES, one.name)] = (value, offset + 1)
    state.kvs[(OWNERS, _owner(says) + one.name)] = (b"", offset + 1)


def _owner(says: dict[str, Any]) -> str:
    if "stream" in says:
        return f"stream/{says['stream']}/"
    namespace, key = says["key"]
    return f"key/{len(namespace)}/{len(key)}/{namespace}/{key}/"


def delete(state: State, request: r.DeleteNamedObjects, now: int) -> a.DeleteNamedObjectsAnswer:
    if error := state.check(request.node):
        return a.DeleteNamedObjectsAnswer(errors=(error,) * max(1, len(request.objects)))
    owned = {name: says for name, says in names_of(state).items() if _has_owner(says, request)}
    has_owner = request.owner_key is not None or request.owner_stream_id >= 0
    asked = request.objects or tuple(r.NamedObjectToDelete(name=name) for name in owned)
    errors, deleted = [], 0
    for item in asked:
        error = ErrorCode.NONE
        if item.name not in owned:
            error = ErrorCode.OBJECT_NOT_EXIST
        elif item.object_id not in (None, owned[item.name]["id"]):
            error = ErrorCode.KEY_EXIST
        else:
            _destroy(state, item.name, owned[item.name], now)
            deleted += 1
        errors.append(error)

    remaining = len(owned) - deleted if has_owner else 0
    goes = request.with_owner_key and deleted > 0 and remaining == 0
    if goes and request.owner_key is not None:
        del state.kvs[(request.owner_key.namespace, request.owner_key.key)]
    return a.DeleteNamedObjectsAnswer(
        errors=tuple(errors) if request.objects else (),
        remaining=remaining,
        owner_key_deleted=goes,
    )


def _has_owner(says: dict[str, Any], request: r.DeleteNamedObjects) -> bool:
    """Whether an object has the requested owner, or none is requested."""
    key = request.owner_key
    if key is not None:
        return bool(says.get("key") == [key.namespace, key.key])
    return request.owner_stream_id < 0 or says.get("stream") == request.owner_stream_id


def _destroy(state: State, name: str, says: dict[str, Any], now: int) -> None:
    del state.kvs[(NAMES, name)], state.kvs[(OWNERS, _owner(says) + name)]
    state.destroy([says["id"]], now)


def go_with_owners(state: State, now: int) -> None:
    """No named object outlives its owner."""
    for name, says in names_of(state).items():
        owner = says.get("stream")
        kept = owner in state.streams if owner is not None else tuple(says["key"]) in state.kvs
        if not kept:
            _destroy(state, name, says, now)


def describe(state: State, request: r.DescribeNamedObjects) -> a.DescribeNamedObjectsAnswer:
    wanted = set(request.names)
    found = {
        name: says
        for name, says in names_of(state).items()
        if (name in wanted if wanted else name.startswith(request.prefix))
    }
    names = [name for name in found if name > request.page.page_token]
    size = request.page.page_size or PAGE_SIZE
    token = names[size - 1] if len(names) > size else ""
    objects = tuple(_described(state, name, found[name]) for name in names[:size])
    return a.DescribeNamedObjectsAnswer(objects=objects, next_page_token=token)


def _described(state: State, name: str, says: dict[str, Any]) -> a.NamedObject:
    item = state.objects[says["id"]]
    return a.NamedObject(
        name=name,
        object_id=says["id"],
        object_size=item.size,
        crc32c=item.crc32c,
        committed_at_ms=item.timestamp,
        owner_stream_id=says.get("stream", -1),
        owner_key=r.OwnerKey(*says["key"]) if "key" in says else None,
        metadata=tuple((key, text) for key, text in says["tags"]),
    )
