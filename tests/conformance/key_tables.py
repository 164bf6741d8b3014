"""Checks tables of storage keys and object attributes against the object format.

Keys of kinds of objects that this product does not have must be foreign to it: they are never
touched. Addresses of buckets are written differently here and are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from streammeta.storage.object_format.object_key import (
    ForeignKey,
    ObjectAttributes,
    ObjectKind,
    OwnKey,
    decode_attributes,
    encode_attributes,
    key_for,
    parse_key,
)
from tests.conformance.conformance_report import Mismatch, ScenarioResult, compare
from tests.conformance.scenario_args import Args, Check


def _object_key(args: Args) -> Iterator[Mismatch]:
    object_id, namespace, key = args.take("object"), args.take("namespace"), args.take("key")
    yield from compare(key, key_for(object_id, namespace), "key")
    parsed = parse_key(key, namespace)
    actual = parsed.object_id if isinstance(parsed, OwnKey) else repr(parsed)
    yield from compare(object_id, actual, "object")


def _foreign_key(args: Args) -> Iterator[Mismatch]:
    args.take("node"), args.take("namespace")
    yield from _check_foreign(args.take("key"), "key")


def _check_foreign(key: str, path: str) -> Iterator[Mismatch]:
    parts = key.split("/")
    parsed = parse_key(key, parts[1] if len(parts) > 1 else "DEFAULT")
    if not isinstance(parsed, ForeignKey):
        yield Mismatch(path, "a foreign key", repr(parsed))


def _wal_paths(args: Args) -> Iterator[Mismatch]:
    for name in ("cluster", "node", "type"):
        args.take(name, None)
    for name, key in args.take("expect").items():
        yield from _check_foreign(key, f"expect.{name}")


def _parse_object_id(args: Args) -> Iterator[Mismatch]:
    """Parse a key; one whose first element is not made of the id is nobody's here."""
    key, object_id = args.take("key"), args.take("object", None)
    expected = args.take("expect", None)
    parts = key.split("/")
    namespace = parts[1] if len(parts) == 3 else "DEFAULT"
    parsed = parse_key(key, namespace)
    is_exact = object_id is not None and expected is None and key == key_for(object_id, namespace)
    if is_exact:
        yield from compare(OwnKey(object_id), parsed, "object")
    elif not isinstance(parsed, ForeignKey):
        yield Mismatch("object", "a foreign key", repr(parsed))


def _attributes(args: Args) -> Iterator[Mismatch]:
    chosen = args.within("set")
    kind = ObjectKind.COMPOSITE if chosen.take("composite", False) else ObjectKind.NORMAL
    attributes = ObjectAttributes(kind, chosen.take("bucket", 0), chosen.take("deep", False))
    value = args.take("attributes")
    yield from compare(value, encode_attributes(attributes), "attributes")
    decoded = decode_attributes(value)
    actual = {
        "type": decoded.kind.name.lower(),
        "bucket": decoded.bucket_id,
        "deep_delete": decoded.deep_delete,
    }
    yield from compare(args.take("decoded"), actual, "decoded")


_TABLES: dict[str, tuple[Callable[[Args], Iterator[Mismatch]], str]] = {
    "object_keys": (_object_key, ""),
    "index_keys": (_foreign_key, "no-index-objects"),
    "parse_object_id": (_parse_object_id, "strict-keys"),
    "attributes": (_attributes, ""),
    "wal_paths": (_wal_paths, "no-index-objects"),
}
"""The check of an entry, and the deviation that every entry meets."""


def _check(section: str, args: Args, result: ScenarioResult) -> Iterator[Mismatch]:
    check, feature = _TABLES[section]
    if feature:
        result.deviate(0, section, feature)
    yield from check(args)


KEY_TABLES: dict[str, Check] = {section: partial(_check, section) for section in _TABLES}

NOT_OFFERED = ("bucket_uris", "id_uris", "position_cache")
"""Sections about what the contract does not have."""
