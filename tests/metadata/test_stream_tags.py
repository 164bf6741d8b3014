"""Look-up of streams by tag: the index against scans, pages, collisions, undo and restore."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.registries import stream_tags
from streammeta.controller.metadata.registries.stream_tags import StreamTags, TagIndex
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.metadata.tables.values import PageRequest, Tags
from tests.metadata.small_world import NODE, World

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
@pytest.mark.parametrize("seed", range(4))
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
