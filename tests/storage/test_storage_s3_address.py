"""Addresses of buckets: two forms, read and written, and no key in any message."""

from __future__ import annotations

from pathlib import Path

import pytest

from streammeta.storage.object_store.address import Checksum, S3Config, open_object_store
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.storage.object_store.s3 import S3ObjectStore

FULL = S3Config(
    "automq", "http://192.0.2.1:9000", "ignore-here", "id", "a+b/c=d e&f", True, Checksum.CRC32C
)


def test_the_server_form_is_understood() -> None:
    config = S3Config.from_uri(
        "s3://192.0.2.1:9000?s3-access-key=minioadmin&s3-secret-key=a+b/c&s3-region=ignore-here"
        "&s3-endpoint-protocol=http&s3-data-bucket=automq&s3-path-style=true&s3-ops-bucket=ops"
        "&cluster-id=5kilSYquT962mUNQ8dL7qA"
    )
    assert config == S3Config(
        "automq", "http://192.0.2.1:9000", "ignore-here", "minioadmin", "a+b/c", True
    )
    assert S3Config.from_uri("s3://host?s3-data-bucket=b") == S3Config(
        "b", "https://host", path_style=True
    )


@pytest.mark.parametrize(
    "config",
    [
        FULL,
        S3Config("b"),
        S3Config("b", "https://[::1]:9000", path_style=False),
        S3Config("b", "http://h:1", "r", path_style=True, checksum=Checksum.CRC32),
    ],
)
def test_what_is_written_is_read_again(config: S3Config) -> None:
    assert S3Config.from_uri(config.to_uri()) == config


def test_the_server_form_holds_all_but_the_checksum() -> None:
    read = S3Config.from_uri(FULL.to_server_uri())
    assert read == S3Config(
        FULL.bucket, FULL.endpoint_url, FULL.region, FULL.access_key, FULL.secret_key, True
    )
    with pytest.raises(ValueError, match="wants an endpoint"):
        S3Config("b").to_server_uri()


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("s3://h:1?s3-region=r", "no bucket; wanted s3-data-bucket"),
        ("s3://h:1?s3-data-bucket=b&endpoint=http://x", "option 'endpoint'"),
        ("s3://h:1?s3-data-bucket=b&s3-data-bucket=c", "'s3-data-bucket' 2 times"),
        ("s3://h:1?s3-data-bucket=b&s3-endpoint-protocol=ftp", "wanted http://"),
        ("s3://h:1?s3-data-bucket=b&s3-path-style=1", "wanted true or false"),
        ("s3://h:1?s3-data-bucket=b&s3-secret-key=hidden", "wanted both or none"),
        ("s3://b?checksum=sha1&accessKey=i&secretKey=hidden", "wanted one of md5, crc32, crc32c"),
        ("s3://b?cluster-id=x", "option 'cluster-id'"),
        ("s3://", "wanted s3://bucket"),
        ("s3://b/path", "without a path"),
        ("s3://b?bucket=c", "option 'bucket'"),
        ("s3://b?region=a&region=b", "option 'region' 2 times"),
        ("s3://b?region=", "option 'region'"),
        ("s3://b?pathStyle=yes", "wanted true or false"),
        ("s3://b?endpoint=host:9000", "wanted http://"),
        ("s3://b?accessKey=a", "wanted both or none"),
        ("s3://b?secretKey=hidden", "wanted both or none"),
        ("file://relative/path", "wanted file:///absolute"),
        ("file:///a?b=c", "wanted file:///absolute"),
        ("gs://b?secretKey=hidden", "wanted s3://bucket"),
        ("/a/b", "wanted s3://bucket"),
    ],
)
def test_a_wrong_address_is_told_without_showing_a_secret(uri: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        open_object_store(uri)
    assert "hidden" not in str(caught.value)


def test_an_s3_address_is_read_whole() -> None:
    config = S3Config.from_uri(
        "s3://data?endpoint=http%3A%2F%2F127.0.0.1:5590&region=eu-1&pathStyle=false"
        "&accessKey=id&secretKey=top%2Bsecret"
    )
    assert config == S3Config("data", "http://127.0.0.1:5590", "eu-1", "id", "top+secret", False)
    assert "top+secret" not in repr(config)
    assert S3Config.from_uri("s3://data") == S3Config("data")
    assert S3Config.from_uri("s3://data?endpoint=http://h:1").path_style is True


def test_the_address_says_which_store_it_is(tmp_path: Path) -> None:
    spaced = tmp_path / "with space"
    spaced.mkdir()
    store = open_object_store(f"file://{str(spaced).replace(' ', '%20')}")
    assert isinstance(store, LocalObjectStore)
    store.put("key", b"x")
    assert (spaced / "objects/key").read_bytes() == b"x"
    assert isinstance(open_object_store("s3://b?region=r"), S3ObjectStore)
