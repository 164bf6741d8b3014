"""Addresses of buckets: two forms, read and written, and no key in any message."""

from __future__ import annotations

import pytest

from streammeta.storage.object_store.address import Checksum, S3Config

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
    ],
)
def test_a_wrong_address_is_told_without_showing_a_secret(uri: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        S3Config.from_uri(uri)
    assert "hidden" not in str(caught.value)
