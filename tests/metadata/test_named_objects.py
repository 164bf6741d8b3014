"""Named objects: found by name, gone with their owners, kept by undo and checkpoints."""

from dataclasses import replace
from typing import Any

import pytest

from streammeta.controller import errors
from streammeta.controller.metadata.api import named_answers
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.decisions import named_objects
from streammeta.controller.metadata.tables import values as v
from tests.metadata.small_world import NODE, NOW, World

LEDGER = r.OwnerKey("ledgers", "7")
DATA = r.NamedObjectToCommit(
    object_id=0, name="ledger-7", object_size=9, crc32c=5, owner_key=LEDGER, metadata=(("b", "2"),)
)
INDEX = replace(DATA, object_id=1, name="ledger-7-index", crc32c=-1)
OF_STREAM = r.NamedObjectToCommit(object_id=2, name="snapshot", object_size=1, owner_stream_id=3)


def world_with_owner() -> World:
    world = World()
    world.write(r.SetFeatureLevel(level=3))
    item = r.KVToPut(namespace=LEDGER.namespace, key=LEDGER.key, value=b"open")
    world.write(r.PutKVs(items=(item,)))
    return world


def commit(*objects: r.NamedObjectToCommit) -> r.CommitNamedObjects:
    return r.CommitNamedObjects(node=NODE, objects=objects)


def delete(*names: str, object_id: int | None = None) -> r.DeleteNamedObjects:
    items = tuple(r.NamedObjectToDelete(name=name, object_id=object_id) for name in names)
    return r.DeleteNamedObjects(node=NODE, objects=items)


def delete_owner() -> r.DeleteKVs:
    return r.DeleteKVs(keys=(r.KVKey(namespace=LEDGER.namespace, key=LEDGER.key),))


def delete_stream(world: World) -> r.DeleteStreams:
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(3, 1),)))
    return r.DeleteStreams(node=NODE, streams=(r.StreamToDelete(3, 1),))


def described(world: World, **asked: Any) -> list[Any]:
    answer: Any = world.map.query(r.DescribeNamedObjects(**asked))
    return list(answer.objects)


def names(world: World, **asked: Any) -> list[str]:
    return [object_.name for object_ in described(world, **asked)]


def test_named_objects_are_committed_together_and_found_by_name_and_prefix() -> None:
    world = world_with_owner()
    answer: Any = world.write(commit(DATA, INDEX, OF_STREAM))
    assert answer.errors == (errors.ErrorCode.NONE,) * 3
    assert names(world, prefix="ledger-7") == ["ledger-7", "ledger-7-index"]
    assert names(world, names=("snapshot", "absent", "ledger-7")) == ["ledger-7", "snapshot"]
    data, _, snapshot = described(world)
    assert (data.object_id, data.object_size, data.crc32c, data.metadata) == (
        0,
        9,
        5,
        (("b", "2"),),
    )
    assert (data.owner_key, snapshot.owner_stream_id) == (LEDGER, 3)
    assert data.committed_at_ms == NOW
    assert world.state(0) is v.ObjectState.COMMITTED


def test_a_bad_one_keeps_all_from_being_committed() -> None:
    world = world_with_owner()
    before = world.map.state_hash()
    for other, error in (
        (replace(INDEX, object_id=99), errors.ErrorCode.OBJECT_NOT_EXIST),
        (replace(INDEX, owner_key=r.OwnerKey("n", "no")), errors.ErrorCode.KEY_NOT_EXIST),
        (replace(OF_STREAM, owner_stream_id=50), errors.ErrorCode.STREAM_NOT_EXIST),
    ):
        answer: Any = world.write(commit(DATA, other))
        assert answer.errors == (errors.ErrorCode.NONE, error)
        assert world.map.state_hash() == before


def test_a_name_is_taken_once() -> None:
    world = world_with_owner()
    world.write(commit(DATA))
    answer: Any = world.write(commit(replace(INDEX, name=DATA.name)))
    assert answer.errors == (errors.ErrorCode.KEY_EXIST,)
    assert world.state(1) is v.ObjectState.PREPARED


def test_a_repeat_is_known_by_the_object_and_changes_nothing() -> None:
    world = world_with_owner()
    world.write(commit(DATA))
    end = world.map.applied_end_offset
    answer: Any = world.write(commit(DATA))
    assert (answer.errors, world.map.applied_end_offset) == ((errors.ErrorCode.NONE,), end)
    for other in (
        replace(DATA, object_size=10),
        replace(DATA, name="other"),
        replace(DATA, metadata=()),
        replace(DATA, owner_key=None, owner_stream_id=3),
    ):
        refused: Any = world.write(commit(other))
        assert refused.errors == (errors.ErrorCode.OBJECT_CONTENT_MISMATCH,)
    mixed: Any = world.write(commit(DATA, INDEX))
    assert mixed.errors == (errors.ErrorCode.NONE,) * 2
    assert names(world) == ["ledger-7", "ledger-7-index"]


def test_what_is_deleted_is_destroyed_and_its_name_is_free_again() -> None:
    world = world_with_owner()
    world.write(commit(DATA, INDEX))
    answer: Any = world.write(delete("ledger-7", "absent"))
    assert answer.errors == (errors.ErrorCode.NONE, errors.ErrorCode.OBJECT_NOT_EXIST)
    assert world.state(0) is v.ObjectState.MARK_DESTROYED
    assert world.map.destroyed(NOW + 1, 10, NOW) == (0,)
    again: Any = world.write(commit(replace(DATA, object_id=4)))
    assert again.errors == (errors.ErrorCode.NONE,)
    stale: Any = world.write(delete("ledger-7", object_id=0))
    assert stale.errors == (errors.ErrorCode.KEY_EXIST,)
    assert described(world, names=("ledger-7",))[0].object_id == 4


def test_named_objects_go_with_their_owner_and_no_others() -> None:
    world = world_with_owner()
    item = r.KVToPut(namespace="ledgers", key="7/x", value=b"")
    world.write(r.PutKVs(items=(item,)))
    kept = replace(INDEX, owner_key=r.OwnerKey("ledgers", "7/x"))
    world.write(commit(DATA, kept, OF_STREAM))
    world.write(delete_owner())
    assert names(world) == ["ledger-7-index", "snapshot"]
    assert [world.state(i).name for i in range(3)] == ["MARK_DESTROYED", "COMMITTED", "COMMITTED"]
    world.write(delete_stream(world))
    assert names(world) == ["ledger-7-index"]
    assert world.state(2) is v.ObjectState.MARK_DESTROYED


def test_undo_and_checkpoints_keep_names_and_objects_together() -> None:
    world = world_with_owner()
    closing = delete_stream(world)
    steps = [commit(DATA, INDEX), commit(OF_STREAM), delete("ledger-7"), delete_owner(), closing]
    world.assert_undone_and_restored(steps)


def test_compactions_take_no_named_object_for_a_source() -> None:
    world = world_with_owner()
    world.write(commit(DATA, OF_STREAM))
    sources = v.column([0])
    of_set = r.CommitStreamSetObject(
        node=NODE, object_id=-1, order_id=-1, object_size=0, compacted_object_ids=sources
    )
    of_stream = r.CommitStreamObject(
        node=NODE, object_size=0, stream_id=0, stream_epoch=1, source_object_ids=sources
    )
    for request in (of_set, of_stream):
        answer: Any = world.write(request)
        assert answer.error is errors.ErrorCode.COMPACTED_OBJECTS_NOT_FOUND


def test_names_are_kept_from_ordinary_keys() -> None:
    world = world_with_owner()
    world.write(commit(DATA))
    for namespace in sorted(named_answers.OWN_NAMESPACES):
        put = r.KVToPut(namespace=namespace, key="k", value=b"")
        for request in (
            r.PutKVs(items=(put,)),
            r.DeleteKVs(keys=(r.KVKey(namespace=namespace, key="ledger-7"),)),
            commit(replace(INDEX, owner_key=r.OwnerKey(namespace, "ledger-7"))),
        ):
            with pytest.raises(errors.InvalidRequestError, match="named objects"):
                world.write(request)


def test_an_owner_has_a_bounded_number_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_objects, "PER_OWNER_MAX", 2)
    world = world_with_owner()
    world.write(commit(DATA, INDEX))
    before = world.map.state_hash()
    with pytest.raises(errors.LimitExceededError, match="named objects"):
        world.write(commit(replace(DATA, object_id=5, name="third")))
    assert world.map.state_hash() == before
    world.write(commit(OF_STREAM))


def world_with_many(count: int) -> World:
    """Return a world whose key LEDGER owns `count` objects, and stream 3 one."""
    world = world_with_owner()
    items = [replace(DATA, object_id=number + 3, name=f"n{number:02}") for number in range(count)]
    world.write(commit(*items, OF_STREAM))
    return world


def owner_exists(world: World) -> bool:
    key = r.KVKey(namespace=LEDGER.namespace, key=LEDGER.key)
    answer: Any = world.map.query(r.GetKVs(keys=(key,)))
    return bool(answer.results[0].found)


def test_an_owner_of_many_objects_is_emptied_in_bounded_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(named_objects, "AT_ONCE_MAX", 3)
    monkeypatch.setattr(named_objects, "WITH_OWNERS_MAX", 3)
    world = world_with_many(8)
    with pytest.raises(errors.LimitExceededError, match="DeleteNamedObjects"):
        world.write(delete_owner())

    request = r.DeleteNamedObjects(node=NODE, owner_key=LEDGER, with_owner_key=True)
    remaining: list[int] = []
    while not remaining or remaining[-1]:
        answer: Any = world.write(request)
        assert answer.errors == ()
        assert answer.owner_key_deleted == (answer.remaining == 0)
        assert owner_exists(world) == (answer.remaining > 0)
        remaining.append(answer.remaining)
    assert remaining == [5, 2, 0]
    assert names(world) == ["snapshot"]
    assert {world.state(number + 3) for number in range(8)} == {v.ObjectState.MARK_DESTROYED}


def test_one_step_of_long_names_stays_within_a_log_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_objects, "AT_ONCE_BYTES_MAX", 40)
    world = world_with_many(8)
    answer: Any = world.write(r.DeleteNamedObjects(node=NODE, owner_key=LEDGER))
    assert answer.remaining == 6
    assert owner_exists(world)


def test_the_key_goes_with_the_last_object_only() -> None:
    world = world_with_many(2)

    def delete_one(*deleted: str, **fields: Any) -> Any:
        return world.write(replace(delete(*deleted), owner_key=LEDGER, **fields))

    answer = delete_one("n00", with_owner_key=True)
    assert (answer.remaining, answer.owner_key_deleted, owner_exists(world)) == (1, False, True)
    # An object of another owner is not deleted, and is not counted.
    answer = delete_one("snapshot", with_owner_key=True)
    assert (answer.errors, answer.remaining) == ((errors.ErrorCode.OBJECT_NOT_EXIST,), 1)
    answer = delete_one("n01", with_owner_key=True)
    assert (answer.remaining, answer.owner_key_deleted, owner_exists(world)) == (0, True, False)

    # The owner came back meanwhile: a late repeat deletes no object, so it must spare the key.
    item = r.KVToPut(namespace=LEDGER.namespace, key=LEDGER.key, value=b"again")
    world.write(r.PutKVs(items=(item,)))
    answer = delete_one("n01", with_owner_key=True)
    assert (answer.owner_key_deleted, owner_exists(world)) == (False, True)
    answer = world.write(r.DeleteNamedObjects(node=NODE, owner_key=LEDGER, with_owner_key=True))
    assert (answer.remaining, answer.owner_key_deleted, owner_exists(world)) == (0, False, True)


def test_a_deletion_by_owner_is_undone_and_restored() -> None:
    world = world_with_many(3)
    by_key = r.DeleteNamedObjects(node=NODE, owner_key=LEDGER, with_owner_key=True)
    world.assert_undone_and_restored([r.DeleteNamedObjects(node=NODE, owner_stream_id=3), by_key])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "objects"),
        ({"owner_key": LEDGER, "owner_stream_id": 3}, "owner_key"),
        ({"owner_stream_id": 3, "with_owner_key": True}, "owner_key"),
        ({"owner_key": r.OwnerKey("", "")}, "owner_key.key"),
        ({"owner_key": r.OwnerKey("_streammeta/named", "a")}, "owner_key"),
    ],
)
def test_malformed_deletions_are_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        world_with_owner().write(r.DeleteNamedObjects(node=NODE, **fields))
    assert caught.value.field.startswith(field)


def test_too_many_objects_do_not_go_in_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_objects, "WITH_OWNERS_MAX", 1)
    world = world_with_owner()
    world.write(commit(DATA, INDEX))
    with pytest.raises(errors.LimitExceededError):
        world.write(delete_owner())
    assert names(world) == ["ledger-7", "ledger-7-index"]


def test_below_level_3_there_are_no_named_objects() -> None:
    with pytest.raises(errors.FeatureLevelError, match="level 3"):
        World().write(commit(OF_STREAM))


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (replace(DATA, name=""), "objects[0].name"),
        (replace(DATA, name="x" * 513), "objects[0].name"),
        (replace(DATA, name="a\nb"), "objects[0].name"),
        (replace(DATA, object_id=-1), "objects[0].object_id"),
        (replace(DATA, object_size=-1), "objects[0].object_size"),
        (replace(DATA, crc32c=1 << 32), "objects[0].crc32c"),
        (replace(DATA, owner_key=None), "objects[0].owner_key"),
        (replace(DATA, owner_stream_id=1), "objects[0].owner_key"),
        (replace(DATA, owner_key=r.OwnerKey("", "")), "objects[0].owner_key.key"),
        (replace(DATA, metadata=(("a", "1"), ("a", "2"))), "objects[0].metadata.key"),
    ],
)
def test_malformed_commits_are_named(item: r.NamedObjectToCommit, field: str) -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        world_with_owner().write(commit(item))
    assert caught.value.field == field


def test_pages_end_where_they_are_asked_to() -> None:
    world = world_with_owner()
    items = [replace(DATA, object_id=number, name=f"n{number}") for number in range(5)]
    world.write(commit(*items))
    found, token = [], ""
    for _ in range(3):
        page = v.PageRequest(2, token)
        answer: Any = world.map.query(r.DescribeNamedObjects(prefix="n", page=page))
        found += [object_.name for object_ in answer.objects]
        token = answer.next_page_token
    assert (found, token) == ([item.name for item in items], "")
