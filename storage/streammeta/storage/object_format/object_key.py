"""Where an object is kept: its key, from its id and the namespace of the cluster, and back.

A key is `<reversed hex id>/<namespace>/<decimal id>`; the hex is lower case and at least 8 digits.
Reversal spreads consecutive ids over 16 prefixes. Parsing is strict, because what parses may be
deleted: a key that this module would not itself have made belongs to somebody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from streammeta.storage.object_format.record import INT64_MAX

_MAX_DECIMAL_DIGITS = 19


@dataclass(frozen=True, slots=True)
class OwnKey:
    """A key of an object of this cluster."""

    object_id: int


@dataclass(frozen=True, slots=True)
class OtherClusterKey:
    """A well-formed key under another namespace: the object of another cluster."""

    object_id: int
    namespace: str


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A key that is not of this layout at all; `reason` says how it differs."""

    reason: str


ParsedKey: TypeAlias = OwnKey | OtherClusterKey | ForeignKey


def cluster_namespace(cluster_id: str) -> str:
    """Give the default namespace of a cluster. Raises `ValueError` on an id no key can hold."""
    _check_segment("cluster id", cluster_id)
    return f"_streammeta_{cluster_id}"


def key_for(object_id: int, namespace: str) -> str:
    """Give the key of `object_id` (0..2^63-1). Raises `ValueError` on a bad id or namespace."""
    if not 0 <= object_id <= INT64_MAX:
        raise ValueError(f"object id is {object_id}, wanted 0..{INT64_MAX}")
    _check_segment("namespace", namespace)
    return f"{_prefix_of(object_id)}/{namespace}/{object_id}"


def parse_key(key: str, namespace: str) -> ParsedKey:
    """Tell whose `key` is: an object of `namespace`, of another cluster, or foreign."""
    parts = key.split("/")
    if len(parts) != 3:
        return ForeignKey(f"{len(parts)} path segments, wanted 3")
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
        raise ValueError(f"{field} is {value!r}, wanted at least one character and no '/'")
