"""Listing: no key escapes the shards, and no secret escapes the command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import BucketNotFoundError
from storage.object_store.factory import without_secrets
from storage.object_store.memory import MemoryObjectStore
from storage.reconcile.errors import ConfigurationError
from storage.reconcile.listing import list_shard, open_store, shards_of

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


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://b", "s3://b"),
        ("file:///a/b", "file:///a/b"),
        (
            "s3://b?endpoint=http%3A%2F%2Fh%3A1&accessKey=AK&secretKey=SK&region=r&pathStyle=true",
            "s3://b?endpoint=http://h:1&region=r&pathStyle=true",
        ),
        ("s3://user:SK@b?endpoint=http://AK:SK@h:1", "s3://b?endpoint=http://h:1"),
        ("s3://b?SECRETKEY=SK&token=AK#SK", "s3://b"),
    ],
)
def test_store_uris_are_shown_without_secrets(uri: str, shown: str) -> None:
    assert without_secrets(uri) == shown


def test_a_bad_store_uri_is_explained_without_its_secret() -> None:
    with pytest.raises(ConfigurationError, match="does not name a store") as raised:
        open_store("ftp://b?secretKey=SK")
    assert "SK" not in str(raised.value)


def test_a_missing_bucket_is_named() -> None:
    with pytest.raises(BucketNotFoundError, match="/nowhere/at/all"):
        open_store("file:///nowhere/at/all")
