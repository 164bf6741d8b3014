"""Key of an object in the bucket, and its attributes in the metadata.

A key is `<reversed hex id>/<namespace>/<decimal id>`. The hex id is lower case with at least 8
digits. Reversal spreads consecutive ids over 16 prefixes. Parsing is strict, because an object with
a valid key may be deleted: a key that this module would not have written belongs to nobody.

Attributes are a signed 32-bit integer: bits 0-1 the kind, bits 2-17 the bucket id (signed 16 bit
when read), bit 18 the deep-delete mark, bits 19-31 unused. The bucket is OR-ed in sign-extended, so
a negative bucket id also sets bits 18-31 and always reads back with the deep-delete mark. Existing
metadata contains such integers, so this stays.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from streammeta.storage.object_format.record import INT64_MAX

_MAX_DECIMAL_DIGITS = 19


@dataclass(frozen=True, slots=True)
class OwnKey:
    """Key of an object of this cluster."""

    object_id: int


@dataclass(frozen=True, slots=True)
class OtherClusterKey:
    """Valid key under another namespace, so an object of another cluster."""

    object_id: int
    namespace: str


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """Key with another layout. `reason` names the difference."""

    reason: str


ParsedKey: TypeAlias = OwnKey | OtherClusterKey | ForeignKey


def cluster_namespace(cluster_id: str) -> str:
    """Return a cluster's default namespace. Raises `ValueError` on an id that no key allows."""
    _check_segment("cluster id", cluster_id)
    return _DEFAULT + cluster_id


def cluster_of(namespace: str) -> str | None:
    """Return the cluster with this default namespace, or None for any other namespace."""
    return namespace.removeprefix(_DEFAULT) if namespace.startswith(_DEFAULT) else None


_DEFAULT = "_streammeta_"
"""Prefix of default namespaces."""


def key_for(object_id: int, namespace: str) -> str:
    """Return the key of `object_id` (0..2^63-1). Raises `ValueError` on a bad id or namespace."""
    if not 0 <= object_id <= INT64_MAX:
        raise ValueError(f"object id is {object_id}, expected 0..{INT64_MAX}")
    _check_segment("namespace", namespace)
    return f"{_prefix_of(object_id)}/{namespace}/{object_id}"


def parse_key(key: str, namespace: str) -> ParsedKey:
    """Classify `key`: an object of `namespace`, of another cluster, or foreign."""
    parts = key.split("/")
    if len(parts) != 3:
        return ForeignKey(f"{len(parts)} path segments, expected 3")
    prefix, found, decimal = parts
    if not (decimal.isascii() and decimal.isdigit() and len(decimal) <= _MAX_DECIMAL_DIGITS):
        return ForeignKey("last segment is not a decimal object id")
    object_id = int(decimal)
    if object_id > INT64_MAX or str(object_id) != decimal:
        return ForeignKey("last segment is not a canonical 63-bit object id")
    if prefix != _prefix_of(object_id):
        return ForeignKey(f"first segment is not {_prefix_of(object_id)}, the reversed hex id")
    if not found:
        return ForeignKey("namespace is empty")
    return OwnKey(object_id) if found == namespace else OtherClusterKey(object_id, found)


def _prefix_of(object_id: int) -> str:
    return f"{object_id:08x}"[::-1]


def _check_segment(field: str, value: str) -> None:
    if not value or "/" in value:
        raise ValueError(f"{field} is {value!r}, expected at least one character and no '/'")


_DEEP_DELETE_BIT = 1 << 18
_INT32_SPAN = 1 << 32


class ObjectKind(enum.IntEnum):
    """Content of an object: data blocks, or links to other objects."""

    NORMAL = 0
    COMPOSITE = 1


@dataclass(frozen=True, slots=True)
class ObjectAttributes:
    """Kind, bucket id (-32768..32767; -1 any bucket, -2 local files) and the deep-delete mark."""

    kind: ObjectKind = ObjectKind.NORMAL
    bucket_id: int = 0
    deep_delete: bool = False


def encode_attributes(attributes: ObjectAttributes) -> int:
    """Encode as a signed 32-bit integer. Raises `ValueError` unless the bucket id is 16 bit."""
    if not -(2**15) <= attributes.bucket_id < 2**15:
        raise ValueError(f"bucket_id is {attributes.bucket_id}, expected -32768..32767")
    mark = _DEEP_DELETE_BIT if attributes.deep_delete else 0
    return attributes.kind | attributes.bucket_id << 2 | mark


def decode_attributes(value: int) -> ObjectAttributes:
    """Decode the integer, ignoring bits 19-31.

    Raises `ValueError` unless it is a signed 32-bit integer with a known kind. The value -1, which
    the metadata uses for "not set", has no known kind.
    """
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"attributes are {value}, expected a signed 32-bit integer")
    if value & 0b11 not in (ObjectKind.NORMAL, ObjectKind.COMPOSITE):
        raise ValueError(
            f"attributes {value} have kind {value & 0b11}, expected 0 (normal) or 1 (composite)"
        )
    unsigned = value % _INT32_SPAN
    bucket = unsigned >> 2 & 0xFFFF
    return ObjectAttributes(
        kind=ObjectKind(value & 0b11),
        bucket_id=bucket - 0x10000 if bucket >= 0x8000 else bucket,
        deep_delete=bool(unsigned & _DEEP_DELETE_BIT),
    )
