"""The object directory finds what a dictionary would find, however sparse ids have become."""

import numpy as np
import pytest

from streammeta.controller.metadata.object_directory import ObjectDirectory


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
            for object_id in [each for each in ids if each >= next_id]:
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


@pytest.mark.parametrize("seed", range(6))
def test_a_directory_finds_what_a_dictionary_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    twin = _Twin()
    for step in range(120):
        some = [each for each in twin.known if rng.random() < 0.4]
        hidden = [each for each in twin.hidden if rng.random() < 0.5]
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
    directory.load(ids, np.arange(7), 140)
    found = directory.rows(np.arange(140))
    assert np.flatnonzero(found >= 0).tolist() == ids.tolist()
    assert found[ids].tolist() == list(range(7))
    directory.append(140, np.array([50], dtype=np.int64))
    assert (directory.row(140), directory.row(139), directory.row(17)) == (50, -1, 1)
