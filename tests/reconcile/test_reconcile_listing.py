"""Listing: no key escapes the shards, and each is told by whose it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.reconcile.listing import list_shard, owner_of, shards_of
from streammeta.reconcile.verdicts import Owner
from streammeta.storage.object_format.object_key import key_for
from tests.kit.memory_store import MemoryObjectStore

edges = st.sampled_from(
    ["0", "f", "00", "ff", "9:", "a", "A", "g", "~", "/", "0/", "é", "\U0001f600"]
)
keys = st.lists(st.one_of(edges, st.text("09afgz/~é\U0001f600\ue000", min_size=1, max_size=4)))


@given(keys, st.integers(0, 2))
def test_every_key_is_in_exactly_one_shard(names: list[str], digits: int) -> None:
    store = MemoryObjectStore()
    for name in names:
        store.put(name, b"")
    listed = [info.key for shard in shards_of(digits) for info in list_shard(store, shard)]
    assert sorted(listed) == sorted(set(names))


def test_the_number_of_shards() -> None:
    assert [len(shards_of(digits)) for digits in (0, 1, 2)] == [2, 17, 257]


NAMESPACE = "_streammeta_c1"


@pytest.mark.parametrize(
    ("key", "owner", "object_id"),
    [
        (key_for(7, NAMESPACE), Owner.OWN, 7),
        (key_for(7, "_streammeta_c2"), Owner.OTHER_CLUSTER, 7),
        (f"{NAMESPACE}/cluster.json", Owner.MARKER, None),
        (f"{NAMESPACE}/claims/00000000000000001000.json", Owner.MARKER, None),
        (f"{NAMESPACE}/claims/1000.json", Owner.FOREIGN, None),
        (f"{NAMESPACE}/claims", Owner.FOREIGN, None),
        (f"{NAMESPACE}/other.json", Owner.FOREIGN, None),
        ("_streammeta_c2/cluster.json", Owner.OTHER_CLUSTER, None),
        ("_streammeta_c/claims/1", Owner.OTHER_CLUSTER, None),
        ("cluster.json", Owner.FOREIGN, None),
    ],
)
def test_whose_key_it_is(key: str, owner: Owner, object_id: int | None) -> None:
    assert owner_of(key, NAMESPACE)[:2] == (owner, object_id)
