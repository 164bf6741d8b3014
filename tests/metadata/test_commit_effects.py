"""Values put and streams trimmed with a commit: all of it takes effect, or nothing does."""

from dataclasses import replace
from typing import Any

import pytest

from streammeta.controller.errors import ErrorCode, FeatureLevelError, InvalidRequestError
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.upload_batches import is_plain
from streammeta.controller.metadata.tables import values as v
from tests.metadata.small_world import NODE, World, merge, stream_objects, upload

PUT = r.KVToPut(namespace="n", key="k", value=b"1")
TRIM = r.StreamToTrim(0, 1, 4)


def world_at_level_3() -> World:
    world = World()
    world.write(r.SetFeatureLevel(level=3))
    return world


def value_of(world: World, key: str = "k") -> tuple[bytes, int]:
    answer: Any = world.map.query(r.GetKVs(keys=(r.KVKey(namespace="n", key=key),)))
    (result,) = answer.results
    return result.value, result.version


def start_of(world: World, stream_id: int = 0) -> int:
    answer: Any = world.map.query(r.DescribeStreams(stream_ids=(stream_id,)))
    start: int = answer.streams[0].start_offset
    return start


def test_an_accepted_commit_puts_its_values_and_trims_its_streams_in_one_entry() -> None:
    world = world_at_level_3()
    entries, version = len(world.log), world.map.applied_end_offset + 1
    answer = world.commit(0, (0, 0, 10), kv_puts=(PUT,), trims=(TRIM,))
    (result,) = answer.kv_results
    assert (answer.error, answer.trim_errors) == (ErrorCode.NONE, (ErrorCode.NONE,))
    assert (result.error, result.version, result.found, result.value) == (0, version, True, b"")
    assert value_of(world) == (b"1", version)
    assert (start_of(world), world.ends()[0]) == (4, 10)
    assert len(world.log) == entries + 1


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"kv_puts": (replace(PUT, expected_version=7),)}, ErrorCode.KEY_EXIST),
        ({"kv_puts": (PUT,), "trims": (r.StreamToTrim(0, 2, 4),)}, ErrorCode.STREAM_INNER_ERROR),
        ({"kv_puts": (PUT,), "trims": (r.StreamToTrim(99, 1, 4),)}, ErrorCode.STREAM_NOT_EXIST),
    ],
)
@pytest.mark.parametrize("on_conflict", list(v.OnConflict))
def test_an_effect_that_is_refused_refuses_the_commit_under_any_policy(
    changes: dict[str, Any], error: ErrorCode, on_conflict: v.OnConflict
) -> None:
    world = world_at_level_3()
    before = world.map.state_hash()
    answer = world.commit(0, (0, 0, 10), on_conflict=on_conflict, **changes)
    assert answer.error is error
    assert answer.range_errors.tolist() == [int(error)]
    assert error in {*(result.error for result in answer.kv_results), *answer.trim_errors}
    assert world.map.state_hash() == before
    assert world.state(0) is v.ObjectState.PREPARED


def test_a_refusal_by_a_condition_tells_what_stands_in_the_way() -> None:
    world = world_at_level_3()
    world.write(r.PutKVs(items=(replace(PUT, value=b"theirs"),)))
    other = replace(PUT, key="other")
    answer = world.commit(0, (0, 0, 10), kv_puts=(PUT, other))
    first, second = answer.kv_results
    assert (first.error, first.value) == (ErrorCode.KEY_EXIST, b"theirs")
    assert second.error is ErrorCode.NONE
    assert value_of(world, "other") == (b"", 0), "the other one must not be put either"


def test_a_refused_commit_has_no_effect_and_no_verdicts_of_effects() -> None:
    world = world_at_level_3()
    before = world.map.state_hash()
    answer = world.commit(0, (0, 5, 10), kv_puts=(PUT,), trims=(TRIM,))
    assert answer.error is ErrorCode.OFFSET_NOT_MATCHED
    assert (answer.kv_results, answer.trim_errors) == ((), ())
    assert world.map.state_hash() == before


def test_effects_come_with_what_accept_valid_takes() -> None:
    world = world_at_level_3()
    policy = v.OnConflict.ACCEPT_VALID
    answer = world.commit(0, (0, 0, 10), (1, 5, 10), kv_puts=(PUT,), on_conflict=policy)
    assert answer.error is ErrorCode.NONE
    assert answer.range_errors.tolist() == [0, int(ErrorCode.OFFSET_NOT_MATCHED)]
    assert value_of(world)[0] == b"1"


def test_a_repeat_puts_nothing_again_and_tells_the_version_that_is_still_there() -> None:
    world = world_at_level_3()
    commit = upload(0, (0, 0, 10), kv_puts=(PUT,), trims=(TRIM,))
    first = world.write(commit)
    end = world.map.applied_end_offset
    assert world.write(commit).kv_results == first.kv_results
    assert world.map.applied_end_offset == end
    world.write(r.PutKVs(items=(replace(PUT, value=b"2", overwrite=True),)))
    (later,) = world.write(commit).kv_results
    assert (later.error, later.version, later.found) == (ErrorCode.NONE, 0, False)
    assert value_of(world)[0] == b"2"


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_puts": ()},
        {"trims": ()},
        {"kv_puts": (replace(PUT, value=b"2"),)},
        {"kv_puts": (replace(PUT, namespace="nk", key="k"),)},
        {"trims": (replace(TRIM, new_start_offset=5),)},
        {"trims": (replace(TRIM, stream_id=1),)},
    ],
)
def test_a_repeat_with_other_effects_is_another_commit(changes: dict[str, Any]) -> None:
    world = world_at_level_3()
    commit = upload(0, (0, 0, 10), kv_puts=(PUT,), trims=(TRIM,))
    world.write(commit)
    answer = world.write(replace(commit, **changes))
    assert answer.error is ErrorCode.OBJECT_CONTENT_MISMATCH


def test_conditions_and_epochs_are_no_content() -> None:
    world = world_at_level_3()
    commit = upload(0, (0, 0, 10), kv_puts=(PUT,), trims=(TRIM,))
    world.write(commit)
    judged_otherwise = replace(PUT, overwrite=True, expected_version=9)
    again = replace(commit, kv_puts=(judged_otherwise,), trims=(replace(TRIM, stream_epoch=7),))
    assert world.write(again).error is ErrorCode.NONE


def test_compactions_have_effects_too() -> None:
    world = world_at_level_3()
    world.commit(0, (0, 0, 10))
    compaction = upload(
        1, (0, 0, 10), compacted_object_ids=v.column([0]), kv_puts=(PUT,), trims=(TRIM,)
    )
    assert world.write(compaction).error is ErrorCode.NONE
    assert (value_of(world)[0], start_of(world)) == (b"1", 4)
    for row in ((2, 1, 0, 5), (3, 1, 5, 9)):
        world.write(
            r.CommitStreamSetObject(
                node=NODE,
                object_id=-1,
                order_id=-1,
                object_size=0,
                stream_objects=stream_objects(row),
            )
        )
    put = replace(PUT, key="merged")
    result = merge(4, (2, 3), stream_id=1, start_offset=0, end_offset=9, kv_puts=(put,))
    answer = world.write(result)
    assert (answer.error, answer.kv_results[0].found) == (ErrorCode.NONE, True)
    assert value_of(world, "merged")[0] == b"1"
    assert world.write(result).kv_results == answer.kv_results


def test_below_level_3_effects_are_refused_and_nothing_is_committed() -> None:
    world = World()
    before = world.map.state_hash()
    with pytest.raises(FeatureLevelError, match="level 3"):
        world.commit(0, (0, 0, 10), kv_puts=(PUT,))
    assert world.map.state_hash() == before
    assert world.commit(0, (0, 0, 10)).error is ErrorCode.NONE


def _without_rows(object_id: int, **changes: Any) -> r.CommitStreamSetObject:
    sources = v.column([1])
    return r.CommitStreamSetObject(
        node=NODE,
        object_id=object_id,
        order_id=-1,
        object_size=0,
        compacted_object_ids=sources,
        **changes,
    )


@pytest.mark.parametrize(
    "request_",
    [
        _without_rows(-1, kv_puts=(PUT,)),
        _without_rows(1, trims=(TRIM,)),
        merge(-1, (1,), object_size=0, start_offset=-1, end_offset=-1, kv_puts=(PUT,)),
        merge(1, (1,), trims=(TRIM,)),
    ],
)
def test_a_commit_that_no_repeat_is_known_by_has_no_effects(request_: Any) -> None:
    with pytest.raises(InvalidRequestError, match="PutKVs"):
        world_at_level_3().write(request_)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_puts": (replace(PUT, key=""),)}, "kv_puts[0].key"),
        ({"kv_puts": (PUT, PUT)}, "kv_puts.key"),
        ({"kv_puts": (replace(PUT, expected_version=-1),)}, "kv_puts[0].expected_version"),
        ({"trims": (replace(TRIM, stream_id=-1),)}, "trims[0].stream_id"),
        ({"trims": (replace(TRIM, new_start_offset=-1),)}, "trims[0].new_start_offset"),
        ({"trims": (TRIM, TRIM)}, "trims.stream_id"),
    ],
)
def test_malformed_effects_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        world_at_level_3().commit(0, (0, 0, 10), **changes)
    assert caught.value.field == field


def test_commits_with_effects_are_not_joined_with_others() -> None:
    assert is_plain(upload(0, (0, 0, 10), epochs=(1,)))
    assert not is_plain(upload(0, (0, 0, 10), epochs=(1,), kv_puts=(PUT,)))
    assert not is_plain(upload(0, (0, 0, 10), epochs=(1,), trims=(TRIM,)))
