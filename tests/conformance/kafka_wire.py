"""Shape of Kafka's messages on the wire: bytes that are stated, read by the product's codec.

A message has the stated bytes if the codec reads them to their end, writes the same ones again, and
finds all values of the input in them. The API is the one whose schema fits.
"""

from __future__ import annotations

import datetime
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from streammeta.brokers.kafka.protocol.wire import SERVED
from tests.conformance.shape_vocabulary import Given, Shape

_KEY = re.compile(
    r"(?:(?P<kind>request|response)_)?(?:v(?P<version>\d+)_)?(?P<what>header_|body_)?hex"
)
_BESIDES = frozenset(["version", "request_version", "correlation_id", "api", "api_key", "notes"])
_ASKED = frozenset(("request", "key", "group", "group_id", "client_id"))
"""Keys of what was asked for, which an answer need not name."""
_ABSENT = ("-1", "0")
"""What a field says that a version does not have."""
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def _wire(given: Given) -> Any:
    value = {name: given.take(name) for name in given.names()}
    facts: dict[str, Any] = {}
    newer: list[str] = []
    keyed = [(_KEY.fullmatch(str(key)), stated) for key, stated in given.stated.items()]
    named = [(key, stated) for key, stated in keyed if key is not None and isinstance(stated, str)]
    for key, stated in sorted(named, key=lambda message: -int(message[0]["version"] or 0)):
        facts[key[0]] = _read(value, key, stated, newer)
    return facts


def _read(value: Mapping[str, Any], key: re.Match[str], stated: str, newer: list[str]) -> str:
    """Return the bytes as they are written again, or why they are others.

    A version may leave out values that a newer one of the same scenario has: those in `newer`.
    """
    request = value.get("request")
    is_request = key["kind"] == "request"
    part: Any = request if is_request and isinstance(request, Mapping) else value
    if not is_request:
        part = {name: part for name, part in value.items() if name not in _ASKED}
    version = int(key["version"]) if key["version"] else None
    if version is None and is_request:
        version = part.get("version")
    if version is None:
        version = 0 if "request_version" in value else value.get("version")
    try:
        data = bytes.fromhex(re.sub(r"[\s:]", "", stated))
    except ValueError:
        return "no hex"
    has_header = is_request or (key["what"] is None and key["kind"] == "response")
    wanted = sorted(map(repr, _leaves(part)))
    reasons = list[str]()
    versions = range(16) if version is None else [version]
    apis = sorted(range(70), key=lambda api: api not in SERVED)
    for api, number in ((api, number) for api in apis for number in versions):
        read = _message(api, number, data, is_request=is_request, has_header=has_header)
        if read is None:
            continue
        found, again = read
        leaves = list(map(repr, _leaves(found)))
        missing = [
            path for path in _missing(wanted, leaves) if path not in newer and path not in _ABSENT
        ]
        if not missing and again == data:
            newer += leaves
            return stated
        reasons.append(f"API {api} has not {missing}")
    return f"no message with these values: {reasons[:2]}"


def _message(
    api: int, version: int, data: bytes, *, is_request: bool, has_header: bool
) -> tuple[Any, bytes] | None:
    """Read a message to its end; return its values and its bytes when written again."""
    try:
        schema: Any = (load_request_schema if is_request else load_response_schema)(api, version)
        at, out, found = 0, io.BytesIO(), list[Any]()
        if has_header:
            header, at = entity_reader(schema.__header_schema__)(data, 0)
            if is_request and int.from_bytes(data[:2], "big") != api:
                return None
            entity_writer(schema.__header_schema__)(out, header)
            found.append(header)
        body, used = entity_reader(schema)(data, at)
        entity_writer(schema)(out, body)
    except Exception:  # noqa: BLE001 - whatever a schema raises, the bytes are not of it
        return None
    return ([*found, body], out.getvalue()) if at + used == len(data) else None


def _leaves(value: Any) -> Iterator[Any]:
    """Yield numbers, texts and bytes in a tree; what is empty or absent says nothing."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            if str(name).endswith("_hex"):
                yield bytes.fromhex(str(part))
            elif name not in _BESIDES:
                yield from _leaves(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    elif value not in (None, "", b""):
        yield _plain(value)


def _plain(value: Any) -> int | str | bytes:
    """Return a value of the codec as scenarios state it: times in ms, errors by number."""
    if isinstance(value, Enum):
        return int(value.value)
    if isinstance(value, datetime.datetime):
        return (value - _EPOCH) // datetime.timedelta(milliseconds=1)
    if isinstance(value, datetime.timedelta):
        return value // datetime.timedelta(milliseconds=1)
    if isinstance(value, memoryview | bytearray):
        return bytes(value)
    return (
        int(value) if isinstance(value, int) else value if isinstance(value, bytes) else str(value)
    )


def _missing(wanted: list[str], found: list[str]) -> list[str]:
    left = list(found)
    missing = []
    for path in wanted:
        if path in left:
            left.remove(path)
        else:
            missing.append(path)
    return missing


SHAPES = (
    Shape(
        "kafka message",
        _wire,
        facts=r"(?:(?:request|response)_)?(?:v\d+_)?(?:header_|body_)?hex",
        sources="Kafka clients",
        keys="request served request_version version correlation_id",
        by_facts=r"(?:request|response)_(?:v\d+_)?(?:body_)?hex|(?:(?:request|"
        r"response)_)?v\d+_(?:body_)?hex|body_hex",
    ),
)
