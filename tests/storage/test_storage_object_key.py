"""Keys and attributes: known values in both directions, and what must never be taken for ours.

The tables of `tests/vectors/keys.yaml` are run by the tests of conformance.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.storage.object_format.object_key import (
    ForeignKey,
    ObjectAttributes,
    ObjectKind,
    OtherClusterKey,
    OwnKey,
    cluster_namespace,
    decode_attributes,
    encode_attributes,
    key_for,
    parse_key,
)


@pytest.mark.parametrize(
    ("object_id", "key"),
    [
        (68, "44000000/_kafka_C/68"),
        (78, "e4000000/_kafka_C/78"),
        (4096, "00010000/_kafka_C/4096"),
        (123456789, "51dcb570/_kafka_C/123456789"),
        (4294967296, "000000001/_kafka_C/4294967296"),
    ],
)
def test_known_keys_hold_in_both_directions(object_id: int, key: str) -> None:
    assert key_for(object_id, "_kafka_C") == key
    assert parse_key(key, "_kafka_C") == OwnKey(object_id)


@given(st.integers(0, 2**63 - 1))
def test_a_key_is_ours_in_our_namespace_only(object_id: int) -> None:
    ours = cluster_namespace("abc")
    key = key_for(object_id, ours)
    assert parse_key(key, ours) == OwnKey(object_id)
    assert parse_key(key, cluster_namespace("abd")) == OtherClusterKey(object_id, ours)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "//",
        "readme.txt",
        "00000001/n/16",  # prefix not of this id, though a lenient parser reads 16
        "10000000/n/01",
        "10000000/n/+1",
        "10000000/n/ 1",
        "10000000/n/1 ",
        "10000000/n/1_0",
        "10000000/n/-1",
        "10000000/n/",
        "10000000//1",
        "10000000/n/1/",
        "/10000000/n/1",
        "10000000/n/1/2",
        "0000001/n/16",
        "A0000000/n/10",
        "a0000000/n/१०",
        "0000000000000008/n/9223372036854775808",
        "10000000/n/" + "1" * 5000,
        "52674dec/n/node-1",
    ],
)
def test_anything_else_is_foreign(key: str) -> None:
    assert isinstance(parse_key(key, "n"), ForeignKey)


@given(st.text(alphabet="0123456789abcdefn/_-", max_size=30))
def test_what_parses_is_exactly_what_would_be_made(key: str) -> None:
    match parse_key(key, "n"):
        case OwnKey(object_id):
            assert key == key_for(object_id, "n")
        case OtherClusterKey(object_id, namespace):
            assert key == key_for(object_id, namespace)
            assert namespace != "n"
        case ForeignKey(reason):
            assert reason


def test_ids_and_namespaces_out_of_range_are_refused() -> None:
    assert cluster_namespace("C") == "_streammeta_C"
    for object_id in (-1, 2**63):
        with pytest.raises(ValueError, match="object id is"):
            key_for(object_id, "n")
    for namespace in ("", "a/b"):
        with pytest.raises(ValueError, match="namespace is"):
            key_for(1, namespace)
        with pytest.raises(ValueError, match="cluster id is"):
            cluster_namespace(namespace)


@given(st.sampled_from(ObjectKind), st.integers(0, 2**15 - 1), st.booleans())
def test_attributes_of_real_buckets_survive(kind: ObjectKind, bucket: int, deep: bool) -> None:
    attributes = ObjectAttributes(kind, bucket, deep)
    assert decode_attributes(encode_attributes(attributes)) == attributes


@pytest.mark.parametrize("value", [-1, 2, 3, 2**31, -(2**31) - 1])
def test_attributes_without_a_known_kind_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match="attributes"):
        decode_attributes(value)


@pytest.mark.parametrize("bucket", [2**15, -(2**15) - 1])
def test_a_bucket_over_16_bits_is_refused(bucket: int) -> None:
    with pytest.raises(ValueError, match="bucket_id is"):
        encode_attributes(ObjectAttributes(bucket_id=bucket))
