"""A repeated commit gets the first answer; one with other content under the same id is refused."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from streammeta.controller import features
from streammeta.controller.errors import ErrorCode, InvalidRequestError, LimitExceededError
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.commit_validation import OBJECT_SIZE_MAX
from streammeta.controller.metadata.api.request_identity import (
    digest_of_commit,
    digest_of_merge,
    digests_of_uploads,
)
from streammeta.controller.metadata.decisions import left_out_rows
from streammeta.controller.metadata.registries.object_indexes import COMMITTED_BYTES_MAX
from streammeta.controller.metadata.tables.values import (
    NodeIdentity,
    OnConflict,
    RangeColumns,
    SourceOperation,
    StreamObjectColumns,
    column,
)
from tests.metadata import small_world as uploads
from tests.metadata.small_world import NODE, World, batch, stream_objects, upload

MISMATCH = ErrorCode.OBJECT_CONTENT_MISMATCH
JUDGING_ONLY = {"failover", "on_conflict", "recoverer"}
"""Fields of commits that say whether and how it is judged, and nothing of what it commits."""


def mixed(**changes: Any) -> r.CommitStreamSetObject:
    """An upload of set object 0 and of stream objects 1 and 2, with something in every column."""
    rows = stream_objects((1, 1, 0, 5), (2, 2, 0, 5))
    known: dict[str, Any] = {
        "attributes": column([4, 8]),
        "stream_epoch": column([1, 1]),
        "min_timestamp_ms": column([1, 2]),
        "max_timestamp_ms": column([3, 4]),
        "crc32c": column([5, 6]),
    }
    facts: dict[str, Any] = {"min_timestamp_ms": 7, "max_timestamp_ms": 8, "crc32c": 9}
    one = upload(0, (0, 0, 5), epochs=(1,), stream_objects=replace(rows, **known), **facts)
    return replace(one, **changes)


def merge(**changes: Any) -> r.CommitStreamObject:
    """What stream objects 1 and 3 of stream 1 are merged to."""
    given = {"object_size": 20, "stream_id": 1, "end_offset": 9} | changes
    return uploads.merge(given.pop("object_id", 9), (1, 3), **given)


def merged() -> World:
    world = World()
    world.write(mixed())
    rows = stream_objects((3, 1, 5, 9))
    world.write(upload(4, (3, 0, 1), stream_objects=rows))
    assert world.write(merge()).error is ErrorCode.NONE
    return world


def assert_refused(world: World, request: Any) -> None:
    before, offset = world.map.state_hash(), world.map.applied_end_offset
    answer = world.write(request)
    if isinstance(request, r.CommitUploads):
        assert set(answer.errors.tolist()) == set(answer.range_errors.tolist()) == {MISMATCH}
    else:
        assert answer.error is MISMATCH
    if isinstance(request, r.CommitStreamSetObject):
        verdicts = [*answer.range_errors.tolist(), *answer.stream_object_errors.tolist()]
        assert set(verdicts) <= {MISMATCH}
        assert verdicts
    assert (world.map.state_hash(), world.map.applied_end_offset) == (before, offset)


def assert_made_before(world: World, request: Any) -> None:
    before, offset = world.map.state_hash(), world.map.applied_end_offset
    answer = world.write(request)
    error = set(answer.errors.tolist()) if isinstance(request, r.CommitUploads) else {answer.error}
    assert error == {ErrorCode.NONE}
    assert (world.map.state_hash(), world.map.applied_end_offset) == (before, offset)


def _changed(columns: Any, name: str) -> Any:
    values = getattr(columns, name).copy()
    values[-1] += 3 if name == "stream_id" else 1  # not another row's stream
    return replace(columns, **{name: column(values)})


def other_contents() -> list[tuple[str, r.CommitStreamSetObject]]:
    """Return `mixed` with each of its contents changed in turn."""
    request = mixed()
    numbers = ("order_id", "object_size", "attributes", "max_timestamp_ms", "crc32c")
    found = [(name, replace(request, **{name: getattr(request, name) + 1})) for name in numbers]
    found.append(("min_timestamp_ms", replace(request, min_timestamp_ms=6)))
    for name in ("ranges", "stream_objects"):
        table = getattr(request, name)
        found.extend(
            (f"{name}.{field.name}", replace(request, **{name: _changed(table, field.name)}))
            for field in fields(table)
            if field.name not in ("stream_epoch", "object_id")
        )
    kept = replace(request.stream_objects, object_id=column([1, 7]))
    found.append(("stream_objects.object_id", replace(request, stream_objects=kept)))
    found.append(("stream_objects", replace(request, stream_objects=StreamObjectColumns())))
    return found


@pytest.mark.parametrize(("name", "request_"), other_contents(), ids=lambda given: str(given)[:40])
def test_other_content_under_a_committed_id_is_refused(
    name: str, request_: r.CommitStreamSetObject
) -> None:
    world = World()
    assert world.write(mixed()).error is ErrorCode.NONE
    assert_refused(world, request_)
    assert_made_before(world, mixed())


def test_every_field_of_a_commit_is_content_or_says_how_it_is_judged() -> None:
    named = {name.split(".")[0] for name, _ in other_contents()}
    names = {field.name for field in fields(r.CommitStreamSetObject)}
    effects = {"kv_puts", "trims"}  # content, see test_commit_effects
    effects |= {"shared_rows"}  # content, see test_shared_rows
    others = {"node", "object_id", "compacted_object_ids"}
    assert names == named | JUDGING_ONLY | effects | others


def test_what_says_only_how_a_commit_is_judged_may_differ_in_its_repeat() -> None:
    world = World()
    world.write(mixed(on_conflict=OnConflict.ACCEPT_VALID))
    rows, ranges = mixed().stream_objects, mixed().ranges
    for repeat in (
        mixed(failover=True),
        mixed(on_conflict=OnConflict.REJECT_ALL),
        mixed(node=NodeIdentity(0, 2)),
        mixed(ranges=replace(ranges, stream_epoch=column())),
        mixed(stream_objects=_reversed(rows)),
    ):
        assert_made_before(world, repeat)


def _reversed(rows: StreamObjectColumns) -> StreamObjectColumns:
    names = [field.name for field in fields(rows)]
    return StreamObjectColumns(**{name: getattr(rows, name)[::-1].copy() for name in names})


def _as_is(world: World) -> World:
    return world


def _restarted(world: World) -> World:
    return world.restored()


def _destroyed(world: World) -> World:
    """Stream 3 goes, and with it what was only in its objects."""
    compacted = upload(8, (0, 0, 5), (3, 0, 1), compacted_object_ids=column([0, 4]))
    assert world.write(compacted).error is ErrorCode.NONE
    return world


def _removed(world: World) -> World:
    _destroyed(world)
    assert world.write(r.RemoveObjects(object_ids=(0, 1, 3, 4))).removed == 4
    return world


AFTERWARDS = (_as_is, _restarted, _destroyed, _removed, lambda world: _restarted(_removed(world)))


@pytest.mark.parametrize("afterwards", AFTERWARDS, ids=range(len(AFTERWARDS)))
def test_repeats_are_known_after_compaction_removal_and_restart(
    afterwards: Callable[[World], World],
) -> None:
    world = afterwards(merged())
    assert_made_before(world, mixed())
    assert_made_before(world, merge())
    assert_refused(world, mixed(object_size=101))
    for other in (
        {"object_size": 21},
        {"end_offset": 8},
        {"attributes": 4},
        {"crc32c": 1},
        {"min_timestamp_ms": 0, "max_timestamp_ms": 1},
        {"source_object_ids": column([3])},
        {"operations": (SourceOperation.DEEP_DELETE, SourceOperation.DELETE)},
    ):
        assert_refused(world, merge(**other))


def test_uploads_in_columns_are_the_same_commits_as_one_by_one() -> None:
    many = batch((0, (0, 0, 5), (1, 0, 5)), (1, (0, 5, 6)))
    ones = [upload(0, (0, 0, 5), (1, 0, 5)), upload(1, (0, 5, 6))]
    assert digests_of_uploads(many).tolist() == [digest_of_commit(original) for original in ones]
    world = World()
    world.write(many)
    assert_made_before(world, many)
    for original in ones:
        assert_made_before(world, original)
    assert_refused(world, batch((0, (0, 0, 5), (1, 0, 4)), (1, (0, 5, 7))))
    mixed_up = world.write(batch((0, (0, 0, 5), (1, 0, 5)), (1, (0, 5, 7)), (2, (0, 6, 8))))
    assert mixed_up.errors.tolist() == [0, MISMATCH, 0]


def test_an_upload_without_an_order_has_its_id_for_one() -> None:
    world = World()
    world.write(upload(3, (0, 0, 5), order_id=-1))
    objects: Any = world.map.freeze().sections()["objects"]
    assert objects["order_id"][objects["object_id"] == 3].tolist() == [3]
    assert_made_before(world, upload(3, (0, 0, 5), order_id=3))


def test_a_compaction_that_names_object_0_too_is_another_one() -> None:
    world = World()
    world.write(upload(0, (0, 0, 5)))
    world.write(upload(3, (0, 5, 9)))
    first = upload(9, (0, 5, 9), compacted_object_ids=column([3]))
    assert world.write(first).error is ErrorCode.NONE
    assert_refused(world, replace(first, compacted_object_ids=column([0, 3])))
    merges = [merge(source_object_ids=column(ids)) for ids in ((1, 3), (0, 1, 3), (0, 0, 1, 3))]
    assert len({digest_of_merge(commit) for commit in merges}) == 3


def test_digests_are_what_they_were_in_the_first_version() -> None:
    """They are part of logs and checkpoints: another formula would refuse honest repeats."""
    assert digest_of_commit(mixed()) == DIGEST_OF_MIXED
    assert digest_of_commit(mixed(compacted_object_ids=column([7]))) == DIGEST_OF_COMPACTION
    assert digest_of_merge(merge()) == DIGEST_OF_MERGE


DIGEST_OF_MIXED = 7763849387230262606
DIGEST_OF_COMPACTION = -7404767545362006693
DIGEST_OF_MERGE = -180328512941543405


def test_a_request_id_of_created_streams_is_not_used_for_other_tags() -> None:
    world = World()

    def create(request_id: str, *tags: tuple[tuple[str, str], ...]) -> r.CreateStreams:
        new = tuple(r.NewStream(tag) for tag in tags)
        return r.CreateStreams(request_id=request_id, node=NODE, streams=new)

    first = world.write(create("t", (("b", "1"), ("a", "2")), ()))
    for other in (((("a", "2"),), ()), ((), (("b", "1"), ("a", "2"))), ((), ())):
        for asked in (world, world.restored()):
            with pytest.raises(InvalidRequestError, match="request_id"):
                asked.write(create("t", *other))
    again = world.restored().write(create("t", (("a", "2"), ("b", "1")), ()))
    assert again.stream_ids == first.stream_ids
    world.write(create("u", ()))
    with pytest.raises(InvalidRequestError, match="request_id"):
        world.write(create("u", (("a", "1"),)))


NO_ROWS = RangeColumns()
UNEVEN = [
    ("stream_objects.object_id", {"stream_objects": StreamObjectColumns(object_id=column([5]))}),
    ("stream_objects.end_offset", {"stream_objects": StreamObjectColumns(end_offset=column([5]))}),
    ("stream_objects.crc32c", {"stream_objects": StreamObjectColumns(crc32c=column([5]))}),
    ("ranges.start_offset", {"ranges": RangeColumns(start_offset=column([5]))}),
    (
        "stream_objects.object_id",
        {
            "ranges": NO_ROWS,
            "compacted_object_ids": column([0]),
            "stream_objects": StreamObjectColumns(object_id=column([5])),
        },
    ),
]


@pytest.mark.parametrize(("field", "changes"), UNEVEN)
def test_columns_are_checked_before_the_first_answer_is_looked_for(
    field: str, changes: dict[str, Any]
) -> None:
    world = World()
    left_out = upload(0, (0, 0, 5), (1, 7, 9), on_conflict=OnConflict.ACCEPT_VALID)
    world.write(left_out)
    with pytest.raises(InvalidRequestError) as caught:
        world.write(replace(left_out, **changes))
    assert caught.value.field == field


def test_the_sum_of_all_sizes_is_bounded() -> None:
    world = World()
    world.write(upload(0, (0, 0, 1), object_size=OBJECT_SIZE_MAX))
    world.map._objects._counts.committed_bytes = COMMITTED_BYTES_MAX - 10
    before = world.map.state_hash()
    for request in (
        upload(1, (0, 1, 2), object_size=11),
        batch((1, (0, 1, 2)), (2, (0, 2, 3)), object_size=column([5, 6])),
        batch((1, (0, 1, 2)), (2, (1, 7, 9)), object_size=column([11, 6])),
        upload(1, (0, 1, 2), object_size=1, stream_objects=stream_objects((2, 1, 0, 1))),
        upload(1, (0, 0, 1), object_size=11, compacted_object_ids=column([0])),
    ):
        with pytest.raises(LimitExceededError, match="object_size"):
            world.write(request)
    assert world.map.state_hash() == before
    assert world.write(upload(1, (0, 1, 2), object_size=10)).error is ErrorCode.NONE


ACCEPT = OnConflict.ACCEPT_VALID
LEVELS = (1, features.SUPPORTED.highest)
BELOW, ABOVE = LEVELS
NOT_THERE, NOT_NEXT = ErrorCode.OBJECT_NOT_EXIST, ErrorCode.OFFSET_NOT_MATCHED


def at_level(level: int) -> World:
    world = World()
    world.write(r.SetFeatureLevel(level=level))
    return world


def of_objects(*rows: tuple[int, int, int, int], **changes: Any) -> r.CommitStreamSetObject:
    """A commit of stream objects alone, of (object, stream, start, end)."""
    given: dict[str, Any] = {"on_conflict": ACCEPT, "ranges": RangeColumns(), "object_size": 0}
    return upload(-1, (0, 0, 1), stream_objects=stream_objects(*rows), **(given | changes))


def rows_of(answer: Any) -> list[int]:
    """Return the verdicts of a commit that was made, ranges first."""
    assert answer.error is ErrorCode.NONE
    return [*answer.range_errors.tolist(), *answer.stream_object_errors.tolist()]


def assert_answers_again(world: World, *made: tuple[Any, list[int]]) -> None:
    """Each of these commits gets its first answer, here and after a restart."""
    for asked in (world, world.restored()):
        before = asked.map.state_hash()
        for request, verdicts in made:
            assert rows_of(asked.write(request)) == verdicts
        assert asked.map.state_hash() == before


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_that_was_left_out_does_not_answer_for_a_later_commit(level: int) -> None:
    world = at_level(level)
    partly = of_objects((1, 0, 0, 5), (2, 1, 10, 20))
    missing, again = of_objects((3, 1, 0, 10)), of_objects((2, 1, 10, 20))
    assert rows_of(world.write(partly)) == [0, NOT_NEXT]
    assert rows_of(world.write(missing)) == [0]
    assert rows_of(world.write(again)) == [0]
    assert_answers_again(world, (again, [0]), (missing, [0]), (partly, [0, NOT_NEXT]))
    for policy in OnConflict:
        assert rows_of(world.write(replace(again, on_conflict=policy))) == [0]
    assert_refused(world, replace(partly, on_conflict=OnConflict.REJECT_ALL))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("many", [False, True])
def test_a_row_under_an_id_that_was_never_issued_does_not_answer_for_its_set_object(
    level: int, many: bool
) -> None:
    world = at_level(level)
    never_issued = 50
    partly = of_objects((1, 0, 0, 5), (never_issued, 1, 0, 5))
    assert rows_of(world.write(partly)) == [0, NOT_THERE]
    prepared = world.write(r.PrepareObjects(request_id="later", node=NODE, count=1, ttl_ms=60_000))
    assert prepared.first_object_id == never_issued
    held = (never_issued, (1, 0, 5), (2, 0, 5))
    later: Any = batch(held) if many else upload(*held)
    world.write(later)
    assert_made_before(world, later)
    assert_made_before(world.restored(), later)
    assert rows_of(world.write(upload(*held))) == [0, 0]


@pytest.mark.parametrize("level", LEVELS)
def test_a_set_object_remembers_its_own_rows_and_none_of_a_commit_before(level: int) -> None:
    world = at_level(level)
    before = of_objects((1, 0, 0, 5), (2, 1, 7, 9))
    own = upload(2, (1, 0, 5), (2, 7, 9), on_conflict=ACCEPT)
    assert rows_of(world.write(before)) == [0, NOT_NEXT]
    assert rows_of(world.write(own)) == [0, NOT_NEXT]
    assert_answers_again(world, (own, [0, NOT_NEXT]), (before, [0, NOT_NEXT]))


@pytest.mark.parametrize("level", LEVELS)
def test_a_committed_object_that_another_commit_names_is_not_forgotten(level: int) -> None:
    """Its row is left out there, and the commit that made it still gets its first answer."""
    world = at_level(level)
    first = upload(1, (1, 0, 5))
    other = upload(2, (0, 0, 5), on_conflict=ACCEPT, stream_objects=stream_objects((1, 1, 5, 9)))
    assert rows_of(world.write(first)) == [0]
    assert rows_of(world.write(other)) == [0, ErrorCode.INVALID_REQUEST]
    assert_answers_again(world, (first, [0]), (other, [0, ErrorCode.INVALID_REQUEST]))


def test_two_commits_that_leave_out_the_same_row_get_their_own_verdicts() -> None:
    world = at_level(ABOVE)
    first = of_objects((1, 0, 0, 5), (2, 1, 7, 9))
    second = of_objects((3, 0, 5, 9), (2, 1, 7, 9), epochs=())
    assert rows_of(world.write(first)) == [0, NOT_NEXT]
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(1, 1),)))
    assert rows_of(world.write(second)) == [0, ErrorCode.STREAM_NOT_OPENED]
    expected = [0, ErrorCode.STREAM_NOT_OPENED]
    assert_answers_again(world, (first, [0, NOT_NEXT]), (second, expected))


def test_a_set_object_is_answered_for_after_it_was_compacted_away() -> None:
    world = at_level(ABOVE)
    before, own = of_objects((1, 0, 0, 5), (2, 1, 7, 9)), upload(2, (1, 0, 5), (2, 0, 5))
    world.write(before)
    world.write(own)
    compacted = upload(4, (1, 0, 5), (2, 0, 5), compacted_object_ids=column([2]))
    assert world.write(compacted).error is ErrorCode.NONE
    assert_answers_again(world, (own, [0, 0]), (before, [0, NOT_NEXT]), (compacted, [0, 0]))
    world.write(r.RemoveObjects(object_ids=(2,)))
    assert_answers_again(world, (own, [0, 0]), (before, [0, NOT_NEXT]))


def test_rows_remembered_before_the_level_was_raised_are_answered_after_it() -> None:
    world = at_level(BELOW)
    partly = of_objects((1, 0, 0, 5), (2, 1, 10, 20))
    world.write(partly)
    world.write(r.SetFeatureLevel(level=ABOVE))
    assert_answers_again(world, (partly, [0, NOT_NEXT]))
    sections = world.map.freeze().sections()
    assert [len(sections[name]["error"]) for name in ("rejected_rows", "left_out_rows")] == [1, 0]


def test_a_row_whose_verdict_is_forgotten_is_not_answered_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(left_out_rows, "REJECTED_ROWS_MAX", 2)
    world = at_level(ABOVE)
    partly = of_objects((1, 0, 0, 5), (2, 1, 10, 20), (3, 2, 10, 20), (90, 3, 0, 5))
    assert rows_of(world.write(partly)) == [0, NOT_NEXT, NOT_NEXT, NOT_THERE]
    assert len(world.map.freeze().sections()["left_out_rows"]["error"]) == 2, "it is bounded"
    world.write(of_objects((4, 0, 5, 6), (5, 1, 10, 20), (6, 2, 10, 20)))
    world.write(upload(2, (1, 0, 5)))
    verdicts = [0, ErrorCode.INVALID_REQUEST, NOT_NEXT, NOT_THERE]
    assert_answers_again(world, (partly, verdicts))


def test_a_commit_of_which_nothing_was_valid_is_judged_again() -> None:
    world = at_level(ABOVE)
    early = of_objects((2, 1, 10, 20))
    assert world.write(early).error is NOT_NEXT
    world.write(of_objects((1, 1, 0, 10)))
    assert rows_of(world.write(early)) == [0]
    assert_answers_again(world, (early, [0]))
