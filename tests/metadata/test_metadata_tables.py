"""Tables, the object directory and sorted keys: rows never move, free ones are used again."""

from random import Random

import numpy as np
import pytest

from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.registries import kv
from streammeta.controller.metadata.registries.kv import SortedKeys
from streammeta.controller.metadata.registries.object_directory import ObjectDirectory
from streammeta.controller.metadata.registries.object_indexes import ExpiryIndex
from streammeta.controller.metadata.tables import tables
from streammeta.controller.metadata.tables.shared_views import SharedDict, Window
from streammeta.controller.metadata.tables.stream_index import StreamIndex
from streammeta.controller.metadata.tables.tables import FreeBlocks, Table, Undo, block_rows
from streammeta.controller.metadata.tables.values import column
from streammeta.controller.records.record import ObjectsDestroyed
from tests.kit.seeds import seeds
from tests.metadata.small_world import NODE, NOW, World, upload


@pytest.mark.parametrize("seed", seeds(2, slow=2))
def test_stream_lists_hold_what_was_put_in_and_undo_restores_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    index, lists = StreamIndex(), {stream: list[int]() for stream in range(40)}
    for step in range(150):
        streams = np.flatnonzero(rng.random(40) < 0.3)
        if not len(streams):
            continue
        undo = Undo()
        after = {stream: list(rows) for stream, rows in lists.items()}
        if rng.random() < 0.7:
            rows = rng.integers(0, 1_000, len(streams))
            index.append(streams, rows, undo)
            for stream, row in zip(streams.tolist(), rows.tolist(), strict=True):
                after[stream].append(row)
        else:
            for stream in streams.tolist():
                after[stream] = after[stream][: int(rng.integers(3))] * int(rng.integers(1, 90))
            flat = [row for stream in streams.tolist() for row in after[stream]]
            counts = np.array([len(after[stream]) for stream in streams.tolist()])
            index.replace(streams, counts, np.array(flat, dtype=np.int64), undo)
        if rng.random() < 0.3:
            for action in reversed(undo):
                action()
        else:
            lists = after
        found = {stream: index.rows(stream).tolist() for stream in range(40)}
        assert found == lists, f"seed {seed}, step {step}"
        assert _by_position(index) == lists, f"seed {seed}, step {step}"


def _by_position(index: StreamIndex) -> dict[int, list[int]]:
    """Return the lists of streams 0 to 39, looked at together in no order."""
    counts, many = index.many(np.arange(60))
    assert not counts[40:].any(), "streams that are not covered"
    which = np.repeat(np.arange(60), counts)
    positions = np.concatenate([np.arange(count) for count in counts])
    order = np.random.default_rng(1).permutation(len(which))
    rows = np.empty(len(which), dtype=np.int64)
    rows[order] = many.rows(which[order], positions[order])
    return {stream: rows[which == stream].tolist() for stream in range(40)}


@pytest.mark.parametrize("seed", seeds(2, slow=2))
def test_blocks_that_are_in_use_never_overlap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    unused, table, used = FreeBlocks(), Table({"a": np.int8}), dict[int, int]()
    for _ in range(400):
        if used and rng.random() < 0.5:
            first = int(rng.choice(list(used)))
            unused.give(used.pop(first), np.array([first]))
        else:
            size = int(block_rows(np.array([rng.integers(1, 70)]))[0])
            reused = unused.take(size, 1).tolist()
            used[reused[0] if reused else table.extend(size).start] = size
        rows = [row for first, size in used.items() for row in range(first, first + size)]
        assert len(rows) == len(set(rows)), f"seed {seed}"
        assert len(rows) + unused.rows() == len(table), f"seed {seed}"


def test_a_large_table_reserves_what_it_will_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESERVE_ABOVE", 2_000)
    monkeypatch.setattr(tables, "RESERVED_ROWS", 100_000)
    table = Table({"a": np.int64})
    table.extend(3_000)
    table.write("a", slice(0, 3_000), 7)
    before = table["a"]
    table.extend(90_000)
    assert np.shares_memory(before, table["a"])
    table.extend(10_000)
    assert not np.shares_memory(before, table["a"])
    assert table["a"][:3_000].tolist() == [7] * 3_000


def test_tables_do_not_grow_while_objects_come_and_go() -> None:
    world = World()
    objects = world.map._objects

    def live_and_die(number: int) -> None:
        request = r.PrepareObjects(request_id=f"r{number}", node=NODE, count=20, ttl_ms=1_000)
        first = world.write(request).first_object_id
        world.write(
            upload(first, *((stream, 10 * number, 10 * number + 10) for stream in range(4)))
        )
        for object_id in range(first + 1, first + 20):
            assert objects.row(object_id) >= 0
        world.write(r.ExpireObjects(limit=10))
        held = np.array([first], dtype=np.int64)
        entry = world.map.applied_end_offset
        expired = column(world.map.list_expired(NOW + 10_000, 10_000))
        world.apply(
            ObjectsDestroyed(object_id=expired, marked_at_ms=NOW),
            ObjectsDestroyed(object_id=held, marked_at_ms=NOW),
        )
        world.write(r.RemoveObjects(object_ids=tuple(range(first, first + 20))))
        assert world.map.applied_end_offset == entry + 2
        world.map.forget_undo(entry)  # the removal itself can still be undone

    live_and_die(0)
    live_and_die(1)
    sizes = (len(objects._table), len(objects._ranges._table))
    for number in range(2, 12):
        live_and_die(number)
    assert (len(objects._table), len(objects._ranges._table)) == sizes
    assert world.restored().map.state_hash() == world.map.state_hash()


def test_a_row_is_not_used_again_while_its_removal_can_be_undone() -> None:
    world = World()
    world.map.forget_undo(world.map.applied_end_offset)
    expired = column(world.map.list_expired(NOW + 100_000, 10_000))
    world.apply(ObjectsDestroyed(object_id=expired, marked_at_ms=NOW + 100_000))
    before, entry = world.map.state_hash(), world.map.applied_end_offset
    world.write(r.RemoveObjects(object_ids=tuple(range(50))))
    world.write(r.PrepareObjects(request_id="q", node=NODE, count=50, ttl_ms=5_000))
    world.map.undo_to(entry)
    assert world.map.state_hash() == before
    assert world.map.destroyed(NOW + 100_001, 100, NOW) == tuple(range(50))


def test_a_shared_dictionary_does_not_change_its_views() -> None:
    shared: SharedDict[int, int] = SharedDict()
    shared.load((number, number) for number in range(10_000))
    view = shared.view()
    for number in range(5_000):
        shared.pop(number)
        shared[number + 5_000] = -1
    shared[10_000] = 1
    assert sorted(view.items()) == [(number, number) for number in range(10_000)]
    assert (len(view), len(shared)) == (10_000, 5_001)
    assert dict(shared.items()) == {**dict.fromkeys(range(5000, 10000), -1), 10_000: 1}
    assert (shared.pop(3), shared.get(3), 10_000 in shared) == (None, None, True)


@pytest.mark.parametrize("seed", seeds(2, slow=2))
def test_a_window_forgets_the_oldest_and_its_views_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    window: Window[int, int] = Window(1_500)
    states = [list[tuple[int, int]]()]
    undos: list[Undo] = []
    views = []
    for number in range(5_000):
        if rng.random() < 0.2 and undos:
            for action in reversed(undos.pop()):
                action()
            states.pop()
        else:
            undo = Undo()
            window.put(number, number * 2, undo)
            undos.append(undo)
            states.append([*states[-1], (number, number * 2)][-1_500:])
            undos, states = undos[-40:], states[-41:]
        if rng.random() < 0.01:
            views.append((window.view(), states[-1]))
    for view, expected in [*views, (window.view(), states[-1])]:
        assert list(view) == expected, f"seed {seed}"
    assert all(window.get(key) == value for key, value in states[-1])


def test_due_objects_are_named_earliest_first_and_only_while_they_are_due() -> None:
    times = {number: 10_000 - 700 * number for number in range(10)}
    due = ExpiryIndex(lambda ids: np.array([times.get(id_, -1) for id_ in ids.tolist()]))
    for number, time_ms in times.items():
        due.add(time_ms, number, 1)
    due.add_ids(times[3], np.array([3, 77], dtype=np.int64))
    assert due.before(10_001, 100) == tuple(range(9, -1, -1))
    assert due.before(times[7] + 1, 100) == (9, 8, 7)
    assert due.before(times[7], 100) == (9, 8)
    assert due.before(10_001, 2) == (9, 8)
    del times[9], times[8]
    assert due.before(10_001, 2) == (7, 6)


def test_held_deletions_wait_and_a_longer_hold_stays() -> None:
    world = World()
    hold = r.HoldDeletions(hold_ms=5_000)
    assert world.write(hold).until_ms == NOW + 5_000
    assert world.write(r.HoldDeletions(hold_ms=1_000)).until_ms == NOW + 5_000
    expired = column(world.map.list_expired(NOW + 100_000, 3))
    world.apply(ObjectsDestroyed(object_id=expired, marked_at_ms=NOW))
    assert world.map.destroyed(NOW + 10_000, 10, NOW + 4_999) == ()
    assert world.restored().map.destroyed(NOW + 10_000, 10, NOW + 4_999) == ()
    assert world.map.destroyed(NOW + 10_000, 10, NOW + 5_000) == (0, 1, 2)
    world.assert_undone_and_restored([r.HoldDeletions(hold_ms=9_000)])


class _Twin:
    """A directory with tiny parts beside a dictionary that does the same."""

    def __init__(self) -> None:
        self.directory = ObjectDirectory(ring_ids=64, part_ids=16)
        self.known: dict[int, int] = {}
        self.hidden: dict[int, int] = {}

    def append(self, count: int, first_row: int) -> None:
        first = self.directory.next_id
        rows = np.arange(first_row, first_row + count, dtype=np.int64)
        self.directory.append(first, rows)
        self.known.update(zip(range(first, first + count), rows.tolist(), strict=True))

    def remove(self, ids: list[int]) -> None:
        self.directory.remove(np.array(ids, dtype=np.int64))
        for object_id in ids:
            self.known.pop(object_id, None)
            self.hidden.pop(object_id, None)

    def hide(self, ids: list[int]) -> None:
        self.directory.toggle(np.array(ids, dtype=np.int64))
        self.hidden.update({object_id: self.known.pop(object_id) for object_id in ids})

    def show(self, ids: list[int]) -> None:
        self.directory.toggle(np.array(ids, dtype=np.int64))
        self.known.update({object_id: self.hidden.pop(object_id) for object_id in ids})

    def truncate(self, next_id: int) -> None:
        self.directory.truncate(next_id)
        for ids in (self.known, self.hidden):
            for object_id in [prepared for prepared in ids if prepared >= next_id]:
                del ids[object_id]

    def check(self, where: str) -> None:
        asked = np.arange(self.directory.next_id + 3)
        rows = self.directory.rows(asked)
        expected = [self.known.get(object_id, -1) for object_id in asked.tolist()]
        assert np.maximum(rows, -1).tolist() == expected, where
        one_by_one = [max(-1, self.directory.row(object_id)) for object_id in asked.tolist()]
        assert one_by_one == expected, where
        for first in (0, len(asked) // 2):
            listed = [
                pair
                for ids, found in self.directory.from_id(first)
                for pair in zip(ids.tolist(), found.tolist(), strict=True)
            ]
            assert listed == sorted((i, r) for i, r in self.known.items() if i >= first), where


@pytest.mark.parametrize("seed", seeds(2, slow=4))
def test_a_directory_finds_what_a_dictionary_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    twin = _Twin()
    for step in range(120):
        some = [entry for entry in twin.known if rng.random() < 0.4]
        hidden = [entry for entry in twin.hidden if rng.random() < 0.5]
        act = int(rng.integers(6))
        if act <= 1:
            twin.append(int(rng.integers(1, 40)), int(rng.integers(1_000)))
        elif act == 2:
            twin.remove(some)
        elif act == 3:
            twin.hide(some)
        elif act == 4:
            (twin.show if rng.random() < 0.5 else twin.remove)(hidden)
        else:
            twin.truncate(max(0, twin.directory.next_id - int(rng.integers(80))))
        twin.check(f"seed {seed}, step {step}")


def test_memory_follows_the_objects_there_are_and_not_the_ids_issued() -> None:
    directory = ObjectDirectory(ring_ids=1 << 10, part_ids=1 << 7)
    for first in range(0, 200_000, 100):
        directory.append(first, np.arange(100, dtype=np.int64))
        directory.remove(np.arange(first + 1, first + 100))
    sparse = 12 * 2 * 2_000  # 2000 survivors; at most half of a segment is dead
    assert directory.nbytes <= 4 * (1 << 10) + sparse
    assert directory.rows(np.arange(0, 200_000, 100)).tolist() == [0] * 2_000


def test_a_directory_is_loaded_with_sparse_ids() -> None:
    ids = np.array([3, 17, 40, 90, 99, 100, 131], dtype=np.int64)
    directory = ObjectDirectory(ring_ids=64, part_ids=16)
    directory.load(ids, 140)
    found = directory.rows(np.arange(140))
    assert np.flatnonzero(found >= 0).tolist() == ids.tolist()
    assert found[ids].tolist() == list(range(7))
    directory.append(140, np.array([50], dtype=np.int64))
    assert (directory.row(140), directory.row(139), directory.row(17)) == (50, -1, 1)


@pytest.mark.parametrize("value", [0, 7, -1, 1 << 31, -(1 << 63)], ids=str)
def test_cells_of_one_row_are_written_as_those_of_several(value: int) -> None:
    one, several = (Table({"wide": np.int64, "narrow": np.int32, "flag": np.int8}) for _ in "ab")
    for table, rows in ((one, np.array([5])), (several, np.array([5, 6]))):
        table.extend(10)
        values = np.full(len(rows), value)
        table.write_cells(rows, {"wide": values, "narrow": values, "flag": 1})
    for name in ("wide", "narrow", "flag"):
        assert one[name][5] == several[name][5] == several[name][6]
    assert one.cells(("wide", "flag"), 5) == [value, 1]


def test_a_write_to_several_columns_keeps_the_views_of_all_of_them() -> None:
    table = Table({"a": np.int64, "b": np.int32})
    table.extend(10_000)
    views = [table.view(), table.view()]
    table.write_cells(np.array([3, 9_000]), {"a": np.array([1, 2]), "b": 4})
    table.write_cells(np.array([5_000]), {"a": np.array([3]), "b": np.array([5])})
    for view in views:
        assert not view.column("a").any()
        assert not view.column("b").any()
    assert table.cells(("a", "b"), 9_000) == [2, 4]


@pytest.mark.parametrize("seed", seeds(2, slow=3))
def test_a_range_is_counted_as_a_scan_would(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "RUN_KEYS", 4)
    rng = Random(seed)
    keys, plain = SortedKeys(), set[tuple[str, str]]()
    assert keys.count(("", ""), ("z", "")) == 0
    for _ in range(300):
        key = (rng.choice("ab"), f"{rng.randrange(60):02}")
        if key in plain:
            plain.remove(key)
            keys.remove(key)
        else:
            plain.add(key)
            keys.add(key)
        low, high = ((rng.choice("abc"), f"{rng.randrange(61):02}") for _ in range(2))
        assert keys.count(low, high) == sum(low <= key < high for key in plain)
