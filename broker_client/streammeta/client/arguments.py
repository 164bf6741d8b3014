"""Argument checks of the public entry points: types, ranges, and the wording of their errors.

A wrong type is a `TypeError`, a value out of range a `ValueError`. Each names the argument. Only
lossless conversions are made: `str` paths, integers of other libraries, bytes-like payloads. Pure.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
PORT_MAX = 65_535

_SHOWN = 80
"""Characters of a wrong value shown in an error."""


def check_int(name: str, value: Any, least: int = 0, most: int = INT64_MAX) -> int:
    """Return `value` as an int of `least`..`most`. A bool or a float is rejected."""
    wanted = f"an integer of {least}..{most}"
    # A bool is an int in Python, but never a meant one here.
    if isinstance(value, bool):
        refuse_type(name, value, wanted)
    try:
        number = operator.index(value)
    except TypeError:
        refuse_type(name, value, wanted)
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}, expected {wanted}")
    return number


def check_seconds(
    name: str,
    value: Any,
    *,
    may_be_zero: bool = False,
    least: float = 0.0,
    most: float = math.inf,
) -> float:
    """Return a duration of `least`..`most`, finite, and more than 0 unless it may be zero."""
    wanted = f"seconds, {'0 or more' if may_be_zero else 'more than 0'}"
    if least > 0 or most < math.inf:
        wanted = f"seconds, {least:.0f}..{most:.0f}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse_type(name, value, wanted)
    # An infinite deadline would hide a hanging call.
    is_in_range = math.isfinite(value) and least <= value <= most
    if not is_in_range or (value == 0 and not may_be_zero):
        raise ValueError(f"{name} is {value}, expected {wanted}")
    return value


def check_kind(name: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raise `TypeError` unless `value` is an instance of `kind`, which `wanted` describes."""
    if not isinstance(value, kind):
        refuse_type(name, value, wanted)


def check_callable(name: str, value: Any, wanted: str) -> None:
    """Raise `TypeError` unless `value` can be called."""
    if not callable(value):
        refuse_type(name, value, wanted)


def check_offers(name: str, value: Any, method: str, wanted: str) -> None:
    """Raise `TypeError` unless `value` has `method`. Any class with the method is accepted."""
    # A class instead of an instance is a common mistake.
    if isinstance(value, type) or not callable(getattr(value, method, None)):
        refuse_type(name, value, wanted)


def check_client(value: Any) -> None:
    """Raise `TypeError` unless `value` calls controllers."""
    check_offers("client", value, "call", "a ControllerClient")


def check_session(value: Any) -> None:
    """Raise `TypeError` unless `value` is a registered session."""
    check_offers("session", value, "heartbeat", "a BrokerSession; await BrokerSession.open()")


def check_store(value: Any) -> None:
    """Raise `TypeError` for an address or a path in place of an object store."""
    wanted = (
        'an object store, such as open_object_store("file:///absolute/directory") of'
        " streammeta.storage.object_store.protocol.address"
    )
    check_offers("store", value, "put", wanted)


def check_path(name: str, value: Any) -> Path:
    """Return a path given as `str` or `os.PathLike[str]`."""
    if not isinstance(value, str | os.PathLike) or value == "":
        refuse_type(name, value, "a path: a str that is not empty, or an os.PathLike")
    return Path(value)


def check_items(name: str, value: Any, wanted: str) -> tuple[Any, ...]:
    """Return the items of a sequence or other iterable. A string or a mapping is rejected."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not isinstance(
        value, Iterable
    ):
        refuse_type(name, value, wanted)
    return tuple(value)


def check_ints(name: str, value: Any, wanted: str, most: int = INT64_MAX) -> tuple[int, ...]:
    """Return a sequence of integers of 0..`most`."""
    items = check_items(name, value, wanted)
    return tuple(check_int(f"{name}[{i}]", item, 0, most) for i, item in enumerate(items))


def check_int_mapping(name: str, value: Any, what: str) -> dict[int, int]:
    """Return a mapping of stream ids to integers, which `what` describes."""
    check_kind(name, value, Mapping, f"a mapping of stream ids to {what}")
    return {
        check_int(f"stream id in {name}", key): check_int(f"{name}[{key}]", number)
        for key, number in value.items()
    }


def check_tags(name: str, value: Any) -> dict[str, str]:
    """Return a mapping of strings to strings."""
    wanted = 'a mapping of str to str, such as {"topic": "example"}'
    check_kind(name, value, Mapping, wanted)
    for key, text in value.items():
        check_kind(f"key {key!r} of {name}", key, str, wanted)
        check_kind(f"{name}[{key!r}]", text, str, wanted)
    return dict(value)


def check_text(name: str, value: Any, wanted: str) -> str:
    """Return a `str` that is not empty."""
    check_kind(name, value, str, wanted)
    if not value:
        raise ValueError(f"{name} is empty, expected {wanted}")
    return str(value)


def as_payload(name: str, value: Any) -> bytes:
    """Return the bytes of a bytes-like object.

    `bytes()` alone would turn the number 5 into five zero bytes, and its error for a `str` does not
    name the argument.
    """
    if not isinstance(value, bytes | bytearray | memoryview):
        try:
            # Accepts every type with the buffer protocol, such as arrays.
            value = memoryview(value)
        except TypeError:
            refuse_type(name, value, "a bytes-like object (encode a str first)")
    return bytes(value)


def check_endpoints(name: str, value: Any) -> tuple[str, ...]:
    """Return addresses HOST:PORT, at least one, all different. IPv6 hosts are in brackets."""
    wanted = 'a sequence of HOST:PORT strings, such as ["127.0.0.1:9091"]'
    endpoints = check_items(name, value, wanted)
    if not endpoints:
        raise ValueError(f"{name} is empty, expected {wanted}")
    for index, endpoint in enumerate(endpoints):
        check_kind(f"{name}[{index}]", endpoint, str, 'HOST:PORT, such as "127.0.0.1:9091"')
        if not _is_endpoint(endpoint):
            raise ValueError(
                f'{name}[{index}] is {endpoint!r}, expected HOST:PORT, such as "127.0.0.1:9091" or'
                f' "[::1]:9091", with a port of 1..{PORT_MAX} and no scheme'
            )
    if len(set(endpoints)) != len(endpoints):
        raise ValueError(f"{name} is {list(endpoints)}, expected each address once")
    return endpoints


def _is_endpoint(text: str) -> bool:
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= PORT_MAX):
        return False
    if host.startswith("[") and host.endswith("]"):
        return len(host) > 2
    return bool(host) and not any(character in ":/@[] \t\r\n" for character in host)


def check_fields(config: Any, checks: Mapping[str, Callable[[str, Any], Any]]) -> None:
    """Apply a check to each numeric field of the dataclass `config`, by name.

    Without one in `checks` an int is at least 1, and a float more than 0.
    """
    usual: dict[Any, Callable[[str, Any], Any]] = {"int": at_least(1), "float": seconds()}
    for field in fields(config):
        if field.type in usual:
            check = checks.get(field.name, usual[field.type])
            check(field.name, getattr(config, field.name))


def at_least(least: int, most: int = INT64_MAX) -> Callable[[str, Any], int]:
    """Return the check of an integer of `least`..`most`, for `check_fields`."""
    return lambda name, value: check_int(name, value, least, most)


def seconds(
    least: float = 0.0, most: float = math.inf, *, may_be_zero: bool = False
) -> Callable[[str, Any], float]:
    """Return the check of a duration of `least`..`most`, for `check_fields`."""
    return lambda name, value: check_seconds(
        name, value, may_be_zero=may_be_zero, least=least, most=most
    )


def refuse_type(name: str, value: Any, wanted: str) -> NoReturn:
    """Raise the `TypeError` of an argument."""
    shown = repr(value)
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}..."
    raise TypeError(f"{name} is {shown}, a {type(value).__name__}, expected {wanted}")
