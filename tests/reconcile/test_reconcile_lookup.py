"""Lookup by listing: agrees with the bucket for what it settles, and gives up in time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streammeta.reconcile.listing.lookup import find_by_listing
from tests.kit.memory_store import MemoryObjectStore

keys = st.text("ab/0é\U0001f600", min_size=1, max_size=4)


@given(st.sets(keys, max_size=20), st.sets(keys, max_size=20), st.integers(0, 5))
def test_what_is_settled_is_as_the_bucket_has_it(
    stored: set[str], wanted: set[str], page: int
) -> None:
    store = MemoryObjectStore()
    for key in stored:
        store.put(key, key.encode())
    in_order = sorted(wanted)
    found, settled = find_by_listing(store, in_order, page)
    assert set(found) == set(in_order[:settled]) & stored
    assert all(info.key == key and info.size == len(key.encode()) for key, info in found.items())


def test_all_neighbours_are_settled_in_one_pass() -> None:
    store = MemoryObjectStore()
    for number in range(3000):
        store.put(f"{number:04d}", b"")
    wanted = [f"{number:04d}" for number in range(0, 4000, 50)]
    found, settled = find_by_listing(store, wanted)
    assert (len(found), settled) == (60, 80)


def test_keys_far_apart_are_left_alone_after_a_page() -> None:
    store = MemoryObjectStore()
    for number in range(3000):
        store.put(f"{number:04d}", b"")
    found, settled = find_by_listing(store, ["0000", "0001", "2999"])
    assert (list(found), settled) == (["0000", "0001"], 2)
    assert find_by_listing(store, []) == ({}, 0)
