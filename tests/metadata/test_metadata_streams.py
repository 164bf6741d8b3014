"""Streams: look-up by tag, an open stream under a larger epoch, and the bounds of a trim."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from streammeta.controller.errors import ErrorCode, InvalidRequestError
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.registries import stream_tags
from streammeta.controller.metadata.registries.stream_decisions import TRIM_AHEAD_MAX
from streammeta.controller.metadata.registries.stream_tags import StreamTags, TagIndex
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.metadata.tables.values import INT64_MAX, NodeIdentity, PageRequest, Tags
from tests.kit.seeds import seeds
from tests.metadata.small_world import NODE, OTHER, World, upload

TOPIC = ("topic", "orders")


def new_tags(rng: random.Random, stream_id: int) -> Tags:
    topic = ("topic", rng.choice(("orders", "payments")))
    zone = ("zone", rng.choice("abc"))
    return (("partition", str(stream_id)), *((topic,) if rng.random() < 0.9 else ()), zone)


def all_pages(tags: StreamTags, wanted: Tags, size: int) -> list[int]:
    found, first = [], 0
    while first >= 0:
        page, first = tags.page(wanted, first, size)
        assert len(page) <= size
        found += page.tolist()
    return found


def copy_of(tags: StreamTags) -> StreamTags:
    loaded = StreamTags()
    loaded.load(dict(tags.view().items()))
    return loaded


@pytest.mark.parametrize("checksum", [None, lambda _key, _value: 7], ids=["crc32", "all equal"])
@pytest.mark.parametrize("seed", seeds(2, slow=2))
def test_look_ups_equal_a_scan_after_random_changes(
    seed: int, checksum: Callable[[str, str], int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Short runs are split, emptied and filled again many times.
    monkeypatch.setattr(stream_tags, "RUN_ENTRIES", 8)
    monkeypatch.setattr(stream_tags, "_LOADED_ENTRIES", 7)
    if checksum is not None:
        monkeypatch.setattr(stream_tags, "_checksum", checksum)
    rng = random.Random(seed)
    tags, model = StreamTags(), dict[int, Tags]()

    for next_id in range(300):
        undo = Undo()
        before = dict(model)
        if model and rng.random() < 0.4:
            dropped = rng.choice(sorted(model))
            tags.drop(dropped, undo)
            del model[dropped]
        else:
            model[next_id] = new_tags(rng, next_id)
            tags.set(next_id, model[next_id], undo)
        if rng.random() < 0.2:
            for action in reversed(undo):
                action()
            model = before
        if next_id % 100 == 50:
            tags = copy_of(tags)

    assert tags.characters == sum(
        len(text) for item in model.values() for tag in item for text in tag
    )
    wanted: list[Tags] = [(TOPIC,), (TOPIC, ("zone", "b")), (("zone", "none"),)]
    wanted += [(("partition", str(stream_id)),) for stream_id in range(0, 300, 17)]
    for query in wanted:
        scanned = [key for key in sorted(model) if set(query) <= set(model[key])]
        for found in (tags, copy_of(tags)):
            assert all_pages(found, query, 1_000) == scanned
            assert all_pages(found, query, 3) == scanned


def test_a_page_examines_a_bounded_number_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_tags, "EXAMINED_MAX", 10)
    tags = StreamTags()
    for stream_id in range(100):
        zone = "a" if stream_id in (35, 99) else "b"
        tags.set(stream_id, (TOPIC, ("zone", zone)), Undo())
    for stream_id in range(100, 250):
        tags.set(stream_id, (("zone", "a"),), Undo())

    query = (TOPIC, ("zone", "a"))
    page, after = tags.page(query, 0, 50)
    assert (page.tolist(), after) == ([], 10)
    assert all_pages(tags, query, 50) == [35, 99]


def test_a_look_up_finds_the_streams_of_one_owner() -> None:
    world = World(streams=1)
    world.write(r.CreateStreams(request_id="t", node=NODE, streams=(r.NewStream((TOPIC,)),) * 4))
    for stream_id, node in ((1, NODE), (2, OTHER), (3, NODE)):
        world.write(r.OpenStreams(node=node, streams=(r.StreamToOpen(stream_id, 1),)))

    for owner, expected in ((None, [1, 2, 3, 4]), (0, [1, 3]), (1, [2]), (9, [])):
        request = r.FindStreams(tags=(TOPIC,), owner_node_id=owner)
        answer: Any = world.map.query(request)
        assert [stream.stream_id for stream in answer.streams] == expected
    answer = world.map.query(r.FindStreams(tags=(TOPIC,), owner_node_id=0, page=PageRequest(1)))
    assert answer.next_page_token == "3"


def test_the_rarest_tag_leads_the_look_up() -> None:
    index = TagIndex()
    for stream_id in range(5_000):
        index.add(stream_id, (*TOPIC, "partition", str(stream_id)))
    assert list(index.find((TOPIC, ("partition", "4321")), 0)) == [4_321]
    assert list(index.find((TOPIC,), 4_997)) == [4_997, 4_998, 4_999]


def test_the_runs_of_a_common_tag_are_full() -> None:
    index = TagIndex()
    for stream_id in range(500):
        index.add(stream_id, ("partition", str(stream_id)))
    for stream_id in range(500, 20_500):
        index.add(stream_id, TOPIC)
    assert len(index._runs) < 1.05 * 20_500 / stream_tags.RUN_ENTRIES + 2


def test_a_dropped_stream_leaves_no_entry() -> None:
    tags = StreamTags()
    for stream_id in range(3_000):
        tags.set(stream_id, (TOPIC, ("zone", "a")), Undo())
    for stream_id in range(3_000):
        tags.drop(stream_id, Undo())
    assert not tags._index._runs
    assert tags.characters == 0


def test_look_ups_follow_creation_opening_deletion_restore_and_undo() -> None:
    world = World(streams=2)
    tagged = tuple(r.NewStream((TOPIC, ("zone", zone))) for zone in "ab")

    def ids(*tags: tuple[str, str], of: World = world) -> list[int]:
        answer: Any = of.map.query(r.FindStreams(tags=tags))
        return [stream.stream_id for stream in answer.streams]

    world.write(r.CreateStreams(request_id="t", node=NODE, streams=tagged))
    assert ids(TOPIC) == [2, 3]
    assert ids(("zone", "b"), TOPIC) == [3]
    answer: Any = world.map.query(r.FindStreams(tags=(TOPIC,), page=PageRequest(1)))
    assert answer.streams[0].tags == (TOPIC, ("zone", "a"))
    assert answer.next_page_token == "3"

    # A stream without tags gets them when it is opened.
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1),)))
    world.write(r.OpenStreams(node=NODE, streams=(r.StreamToOpen(0, 2, (TOPIC,)),)))
    assert ids(TOPIC) == [0, 2, 3]

    uncommitted_from = world.map.applied_end_offset
    world.write(r.DeleteStreams(node=NODE, streams=(r.StreamToDelete(2, -1),)))
    assert ids(TOPIC) == ids(TOPIC, of=world.restored()) == [0, 3]
    world.map.undo_to(uncommitted_from)
    assert ids(TOPIC) == ids(TOPIC, of=world.restored()) == [0, 2, 3]


def reopened(world: World, node: NodeIdentity, epoch: int, *, reopen: bool = True) -> Any:
    item = r.StreamToOpen(0, epoch, reopen=reopen)
    return world.write(r.OpenStreams(node=node, streams=(item,))).streams[0]


def ranges_of(world: World) -> list[tuple[int, int, int]]:
    asked = r.DescribeStreams(stream_ids=(0,), include_ranges=True)
    described: Any = world.map.query(asked)
    return [(one.epoch, one.start_offset, one.end_offset) for one in described.streams[0].ranges]


def test_an_owner_begins_another_range_of_an_open_stream() -> None:
    world = World(streams=1)
    world.commit(1, (0, 0, 5))
    opened = reopened(world, NODE, 2)
    assert (opened.error, opened.next_offset) == (ErrorCode.NONE, 5)
    assert ranges_of(world) == [(1, 0, 5), (2, 5, 5)]
    listed = world.write(r.GetOpeningStreams(node=NODE))
    assert [(stream.stream_id, stream.epoch) for stream in listed.streams] == [(0, 2)]
    world.commit(2, (0, 5, 8))
    assert ranges_of(world) == [(1, 0, 5), (2, 5, 8)]


def test_a_repeat_after_a_lost_answer_changes_nothing() -> None:
    world = World(streams=1)
    first = reopened(world, NODE, 2)
    before = world.map.state_hash()
    assert reopened(world, NODE, 2) == first
    assert world.map.state_hash() == before


def test_an_open_stream_is_refused_without_the_owners_wish_and_to_any_other_node() -> None:
    world = World(streams=1)
    before = world.map.state_hash()
    assert reopened(world, NODE, 2, reopen=False).error is ErrorCode.STREAM_NOT_CLOSED
    assert reopened(world, OTHER, 2).error is ErrorCode.STREAM_NOT_CLOSED
    assert reopened(world, NODE, 0).error is ErrorCode.STREAM_FENCED
    assert world.map.state_hash() == before


def test_the_former_epoch_is_fenced_at_once() -> None:
    world = World(streams=1)
    reopened(world, NODE, 2)
    late = r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1),))
    assert world.write(late).errors == (ErrorCode.STREAM_FENCED,)
    trim = r.TrimStreams(node=NODE, streams=(r.StreamToTrim(0, 1, 0),))
    assert world.write(trim).errors == (ErrorCode.STREAM_FENCED,)


def test_a_stream_of_which_the_node_has_an_upload_pending_is_not_reopened() -> None:
    world = World(streams=1)
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1, end_offset=7),)))
    assert reopened(world, NODE, 2).error is ErrorCode.STREAM_NOT_CLOSED
    world.write(upload(1, (0, 0, 7)))
    assert reopened(world, NODE, 2).error is ErrorCode.NONE


NONE, NOT_NEXT = ErrorCode.NONE, ErrorCode.OFFSET_NOT_MATCHED


def committed_to_5(*, level: int = 1) -> World:
    """A world whose stream 0 ends at 5."""
    world = World()
    world.write(r.SetFeatureLevel(level=level))
    world.commit(0, (0, 0, 5))
    return world


def trimmed(world: World, start: int, appended: int | None, **changes: Any) -> tuple[Any, int]:
    given: dict[str, Any] = {
        "node": NODE,
        "streams": (r.StreamToTrim(0, 1, start, appended),),
    } | changes
    answer = world.write(r.TrimStreams(**given))
    return answer.errors[0], answer.start_offsets[0]


def bounds(world: World) -> tuple[int, int]:
    answer: Any = world.map.query(r.DescribeStreams(stream_ids=(0,)))
    (stream,) = answer.streams
    return stream.start_offset, stream.end_offset


@pytest.mark.parametrize(
    ("wanted", "appended", "start", "end"),
    [
        (3, 0, 3, 5),
        (5, 0, 5, 5),
        (8, 0, 5, 5),  # nobody appended beyond
        (8, 4, 5, 5),
        (INT64_MAX, 0, 5, 5),
        (8, 10, 8, 8),  # the owner's appends cover it
        (15, 10, 10, 10),
        (8, None, 8, 8),  # as AutoMQ trims
    ],
)
def test_a_trim_ends_where_nothing_was_appended(
    wanted: int, appended: int | None, start: int, end: int
) -> None:
    world = committed_to_5()
    for _ in range(2):  # a repeat gets the same answer
        assert trimmed(world, wanted, appended) == (NONE, start)
        assert bounds(world) == bounds(world.restored()) == (start, end)


@pytest.mark.parametrize("appended", [None, INT64_MAX])
def test_no_trim_uses_up_the_offsets_of_a_stream(appended: int | None) -> None:
    world = committed_to_5()
    before = world.map.state_hash()
    for wanted in (INT64_MAX, 5 + TRIM_AHEAD_MAX + 1):
        assert trimmed(world, wanted, appended) == (NOT_NEXT, -1)
    assert world.map.state_hash() == before
    assert trimmed(world, 5 + TRIM_AHEAD_MAX, appended) == (NONE, 5 + TRIM_AHEAD_MAX)


def test_a_late_commit_of_trimmed_appends_has_no_effect_below_the_start() -> None:
    world = committed_to_5()
    trimmed(world, 8, 10)
    assert world.commit(1, (0, 5, 7)).error is NONE
    assert bounds(world) == (8, 8)
    assert world.commit(2, (0, 7, 10)).error is NONE
    assert bounds(world) == (8, 10)


def test_another_node_trims_nothing_whatever_it_says_it_has_appended() -> None:
    world = committed_to_5()
    assert trimmed(world, 3, 10, node=OTHER) == (ErrorCode.STREAM_FENCED, -1)
    assert trimmed(world, 3, 10, streams=(r.StreamToTrim(0, 2, 3, 10),))[1] == -1
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1),)))
    assert trimmed(world, 3, 10) == (ErrorCode.STREAM_NOT_OPENED, -1)
    assert bounds(world) == (0, 5)


def test_an_appended_end_that_is_none_is_named() -> None:
    world = committed_to_5()
    with pytest.raises(InvalidRequestError, match=r"streams\[0\].appended_end_offset"):
        trimmed(world, 3, -1)


@pytest.mark.parametrize(
    ("wanted", "appended", "start"), [(8, 0, 8), (12, 0, 10), (12, 11, 11), (12, None, 12)]
)
def test_a_trim_that_comes_with_a_commit_may_reach_to_the_end_that_it_makes(
    wanted: int, appended: int | None, start: int
) -> None:
    world = committed_to_5(level=3)
    commit = upload(1, (0, 5, 10), trims=(r.StreamToTrim(0, 1, wanted, appended),))
    for _ in range(2):
        answer = world.write(commit)
        assert (answer.error, answer.trim_errors) == (NONE, (NONE,))
        assert answer.trim_start_offsets == (start,)
    assert bounds(world) == (start, max(10, start))
