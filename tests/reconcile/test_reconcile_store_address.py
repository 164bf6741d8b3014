"""Listings and store addresses: no key escapes the shards, and no secret the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.reconcile.apply import ApplyConfig
from streammeta.reconcile.cluster.identity import open_store, parse_store, place_of
from streammeta.reconcile.listing.key_owners import owner_of
from streammeta.reconcile.listing.shards import list_shard, shards_of
from streammeta.reconcile.plan import PlanConfig
from streammeta.reconcile.vocabulary.errors import ConfigurationError
from streammeta.reconcile.vocabulary.verdicts import Owner
from streammeta.storage.errors import BucketNotFoundError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_log.slot import LogName
from streammeta.storage.object_store.protocol.address import StoreAddress, without_secrets
from tests.kit.memory_store import MemoryObjectStore


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
        (
            "s3://h:1?s3-data-bucket=b&s3-endpoint-protocol=http&s3-access-key=A&s3-secret-key=SK",
            "s3://b?endpoint=http://h:1&region=us-east-1&pathStyle=true",
        ),
    ],
)
def test_store_uris_are_shown_without_secrets(uri: str, shown: str) -> None:
    assert without_secrets(uri) == shown


def test_a_bad_store_uri_is_explained_without_its_secret() -> None:
    with pytest.raises(ConfigurationError, match="store") as raised:
        parse_store("ftp://b?secretKey=SK")
    assert "SK" not in str(raised.value)


def test_configurations_show_no_secret(tmp_path: Path) -> None:
    address = StoreAddress.parse("s3://b?accessKey=AK&secretKey=SK")
    planned = PlanConfig(address, connect=("h:1",), folder=tmp_path, inventory=address.uri)
    assert "SK" not in f"{planned!r} {ApplyConfig(folder=tmp_path, store=address)!r}"


def test_a_missing_bucket_is_named() -> None:
    with pytest.raises(BucketNotFoundError, match="/nowhere/at/all"):
        open_store(StoreAddress.parse("file:///nowhere/at/all"))


@pytest.fixture(autouse=True)
def no_endpoint_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("s3://b", "s3://b at Amazon S3"),
        ("s3://b?region=eu-central-1", "s3://b at Amazon S3"),
        ("s3://b?endpoint=http://h:1", "s3://b at http://h:1"),
        ("s3://b?endpoint=http://user:SK@H:1/&pathStyle=false", "s3://b at http://h:1"),
        ("s3://b?endpoint=https://h", "s3://b at https://h:443"),
        ("s3://b?endpoint=http%3A%2F%2Fh%2Fpath", "s3://b at http://h:80/path"),
        ("s3://h:1?s3-data-bucket=b&s3-endpoint-protocol=http", "s3://b at http://h:1"),
        ("file:///a/../b/", "file:///b"),
    ],
)
def test_one_place_has_one_spelling(uri: str, place: str) -> None:
    assert place_of(parse_store(uri)) == place


def test_an_endpoint_in_the_environment_is_in_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://h:2")
    assert place_of(parse_store("s3://b")) == "s3://b at http://h:2"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://h:3")
    assert place_of(parse_store("s3://b")) == "s3://b at http://h:3"
    assert place_of(parse_store("s3://b?endpoint=http://h:1")) == "s3://b at http://h:1"


def test_a_folder_behind_a_link_is_the_same_place(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "bucket")
    assert place_of(parse_store((tmp_path / "link").as_uri())) == place_of(
        parse_store((tmp_path / "bucket").as_uri())
    )


def test_what_names_no_store_is_rejected() -> None:
    for endpoint in ("ftp://h", "http://h:x", "http://h:0"):
        with pytest.raises(ConfigurationError, match="store"):
            parse_store(f"s3://b?endpoint={endpoint}")


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
        (LogName(NAMESPACE, 7, 3).slot_key(5), Owner.LOG, None),
        (LogName(NAMESPACE, 7, 3).recovered_key, Owner.LOG, None),
        (LogName(NAMESPACE, 7, 3).aside_key("0" * 32), Owner.LOG, None),
        (f"{NAMESPACE}/wal/7/3/5", Owner.FOREIGN, None),
        (LogName("_streammeta_c2", 7, 3).slot_key(5), Owner.OTHER_CLUSTER, None),
        ("_streammeta_c2/cluster.json", Owner.OTHER_CLUSTER, None),
        ("_streammeta_c/claims/1", Owner.OTHER_CLUSTER, None),
        ("cluster.json", Owner.FOREIGN, None),
    ],
)
def test_whose_key_it_is(key: str, owner: Owner, object_id: int | None) -> None:
    assert owner_of(key, NAMESPACE)[:2] == (owner, object_id)
