"""The public surface: own types in every signature, every error exported, units in the names."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.message import Message

import streammeta.client
from streammeta.client import BrokerClientError, StorageError, errors
from streammeta.v1.common_pb2 import (
    ERROR_CODE_NONE,
    ERROR_CODE_OBJECT_NOT_EXIST,
    ERROR_CODE_OFFSET_NOT_MATCHED,
    ErrorCode,
)

PUBLIC = {
    name: value
    for name, value in vars(streammeta.client).items()
    if not name.startswith("_") and not inspect.ismodule(value)
}
CLASSES = [value for value in PUBLIC.values() if inspect.isclass(value)]
INTERNAL = {"CoverageError", "DamagedBlockError", "ObjectChangedError"}
"""Errors that end in the report of a compaction or of a copy and never reach a caller."""

DURATIONS = ("deadline", "timeout", "interval", "linger", "patience", "staleness", "silence", "ttl")


def functions(value: Any) -> Iterator[Callable[..., Any]]:
    """The public functions of an export, constructors and properties included."""
    if not inspect.isclass(value):
        yield value
        return
    for name in dir(value):
        # The constructor of a dataclass has its fields.
        if name[0] == "_" and (name != "__init__" or dataclasses.is_dataclass(value)):
            continue
        member = inspect.getattr_static(value, name)
        member = getattr(member, "__func__", member)
        member = member.fget if isinstance(member, property) else member
        if inspect.isfunction(member):
            yield member


def types_in(hint: Any) -> Iterator[Any]:
    """A type and all that it is made of."""
    yield hint
    for part in typing.get_args(hint):
        yield from types_in(part)


def is_message(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, Message) and kind is not Message


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_no_message_of_the_wire_is_taken_or_returned(name: str) -> None:
    value = PUBLIC[name]
    hints = [typing.get_type_hints(value)] if dataclasses.is_dataclass(value) else []
    hints += [typing.get_type_hints(one) for one in functions(value)]
    wrong = [
        hint for each in hints for hint in each.values() if any(map(is_message, types_in(hint)))
    ]
    assert not wrong


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_durations_are_named_with_their_unit(name: str) -> None:
    value = PUBLIC[name]
    names = {each for one in functions(value) for each in inspect.signature(one).parameters}
    if dataclasses.is_dataclass(value):
        names |= {field.name for field in dataclasses.fields(value)}
    assert not [one for one in names if one.rpartition("_")[2] in DURATIONS]


def test_every_error_can_be_imported_from_the_client() -> None:
    packages = (streammeta.client, importlib.import_module("streammeta.client.wal.disk"))
    for package in packages:
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    missing = {
        kind.__name__
        for base in (BrokerClientError, StorageError)
        for kind in subclasses(base)
        if kind.__module__.startswith(("streammeta.client.", "streammeta.storage."))
        and not kind.__name__.startswith("_")
        and kind not in CLASSES
        and kind.__name__ not in PUBLIC
    }
    assert missing == INTERNAL


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


@pytest.mark.parametrize(
    "kind", [one for one in CLASSES if callable(getattr(one, "close", None))], ids=str
)
def test_what_can_be_closed_is_closed_by_await_and_by_its_context(kind: type) -> None:
    assert inspect.iscoroutinefunction(kind.close)  # type: ignore[attr-defined]
    assert inspect.iscoroutinefunction(kind.__aenter__)  # type: ignore[attr-defined]
    assert inspect.iscoroutinefunction(kind.__aexit__)  # type: ignore[attr-defined]
    assert not hasattr(kind, "__enter__")


def test_every_error_code_has_an_exception() -> None:
    assert set(errors.ERRORS_BY_CODE) == set(ErrorCode.values()) - {ERROR_CODE_NONE}


@pytest.mark.parametrize("code", sorted(set(ErrorCode.values()) - {ERROR_CODE_NONE}))
def test_message_names_subject_and_code_and_gives_advice(code: ErrorCode.ValueType) -> None:
    error = errors.rejection(code, "stream 7")
    assert error.code == code
    assert str(error).startswith(f"stream 7 was rejected with {errors.code_name(code)}; ")
    assert str(error).endswith(type(error).advice)
    assert isinstance(error, errors.ERRORS_BY_CODE[code]) or code == ERROR_CODE_OFFSET_NOT_MATCHED


def test_unknown_code_is_a_violation_and_none_is_no_refusal() -> None:
    newer: ErrorCode.ValueType = 777  # type: ignore[assignment]
    assert "unknown error code 777" in str(errors.rejection(newer, "stream 7"))
    with pytest.raises(ValueError, match="NONE"):
        errors.rejection(ERROR_CODE_NONE, "stream 7")


def test_expired_object_tells_to_upload_again() -> None:
    message = str(errors.rejection(ERROR_CODE_OBJECT_NOT_EXIST, "commit of object 5"))
    assert "reconciliation" in message
    assert "new ids and upload again" in message


def test_offset_mismatch_names_both_offsets() -> None:
    assert "starts at offset 40, expected offset 30" in str(errors.OffsetMismatchError(7, 30, 40))
    assert "expected its end offset" in str(errors.OffsetMismatchError(7, None, 40))


def test_only_what_may_succeed_unchanged_is_retriable() -> None:
    retriable = {kind for kind in errors.ERRORS_BY_CODE.values() if kind.retriable}
    assert retriable == {errors.StreamNotClosedError, errors.NodeLockedError}
    assert errors.ControllerUnavailableError("GetObjects", 1.0, {}).retriable
