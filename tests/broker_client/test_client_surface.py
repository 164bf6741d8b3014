"""The public surface: own types, exported errors, units in names, and former names that warn."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.protobuf.message import Message

import streammeta.client
import streammeta.client.parts
import streammeta.client.prometheus
import streammeta.client.sync
from streammeta.client import SilentObserver, errors
from streammeta.client.deprecations import find_rejection_callback
from streammeta.client.errors import BrokerClientError, StorageError
from streammeta.v1.common_pb2 import (
    ERROR_CODE_NONE,
    ERROR_CODE_OBJECT_NOT_EXIST,
    ERROR_CODE_OFFSET_NOT_MATCHED,
    ErrorCode,
)


def public_names(module: ModuleType) -> dict[str, Any]:
    """Return what a module defines or exports, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if name[0] != "_" and not inspect.ismodule(value) and name != "find_renamed"
    }


WAITING = {
    **public_names(streammeta.client),
    **public_names(streammeta.client.parts),
    **public_names(errors),
}
BLOCKING = {
    f"sync.{name}": value
    for name, value in public_names(streammeta.client.sync).items()
    if getattr(value, "__module__", "") == streammeta.client.sync.__name__
}
PUBLIC = WAITING | BLOCKING
CLASSES = [value for value in WAITING.values() if inspect.isclass(value)]
RAW_CALLS = {"ControllerClient.call", "ControllerClient.read", "ControllerClient.pages"}
"""Calls of any RPC, for the parts of the client itself: their messages are chosen by the caller."""
ROOT = Path(__file__).resolve().parents[2]
INTERNAL = {"CoverageError", "DamagedBlockError", "ObjectChangedError"}
"""Errors that end in the report of a compaction or of a copy and never reach a caller."""

DURATIONS = ("deadline", "timeout", "interval", "linger", "patience", "staleness", "silence", "ttl")


def functions(value: Any) -> Iterator[Callable[..., Any]]:
    """The public functions of an export, constructors and properties included."""
    if not inspect.isclass(value):
        if inspect.isfunction(value):
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
    if isinstance(hint, list | tuple):  # the parameters of a callable
        for part in hint:
            yield from types_in(part)
        return
    yield hint
    if isinstance(hint, typing.TypeVar) and hint.__bound__ is not None:
        yield hint.__bound__
    for part in typing.get_args(hint):
        yield from types_in(part)


def is_message(kind: Any) -> bool:
    # Classes and numbers of messages are generated in one package.
    return inspect.isclass(kind) and (
        issubclass(kind, Message) or kind.__module__.startswith(("streammeta.v1", "google."))
    )


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_no_message_of_the_wire_is_taken_or_returned(name: str) -> None:
    value = PUBLIC[name]
    hints = typing.get_type_hints(value) if dataclasses.is_dataclass(value) else {}
    for function in functions(value):
        if function.__qualname__ not in RAW_CALLS:
            found = typing.get_type_hints(function)
            hints |= {f"{function.__qualname__}.{part}": hint for part, hint in found.items()}
    assert not [part for part, hint in hints.items() if any(map(is_message, types_in(hint)))]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_no_number_of_the_wire_is_named_in_a_signature(name: str) -> None:
    value = PUBLIC[name]
    written = dict(vars(value).get("__annotations__", {})) if inspect.isclass(value) else {}
    for function in functions(value):
        written |= function.__annotations__
    assert not [hint for hint in written.values() if "_pb2" in hint or "ValueType" in hint]


def test_the_top_level_has_few_names() -> None:
    assert len(public_names(streammeta.client)) < 47
    assert not [name for name in public_names(streammeta.client) if name.endswith("Error")]


def test_the_brokers_use_public_modules_alone() -> None:
    """The list of docs/broker-client.md."""
    public = {"", ".errors", ".parts", ".prometheus", ".sync"}
    documented = (ROOT / "docs" / "broker-client.md").read_text()
    assert not [name for name in public if f"`streammeta.client{name}`" not in documented]
    imports = re.compile(r"^\s*(?:from|import) streammeta\.(?:client([\w.]*)|(v1))", re.MULTILINE)
    for path in (ROOT / "brokers").rglob("*.py"):
        for client, wire in imports.findall(path.read_text()):
            assert not wire, f"{path} imports messages"
            assert client in public, f"{path} imports streammeta.client{client}"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_durations_are_named_with_their_unit(name: str) -> None:
    value = PUBLIC[name]
    names = {
        parameter
        for function in functions(value)
        for parameter in inspect.signature(function).parameters
    }
    if dataclasses.is_dataclass(value):
        names |= {field.name for field in dataclasses.fields(value)}
    assert not [name for name in names if name.rpartition("_")[2] in DURATIONS]


def test_every_error_can_be_imported_from_one_module() -> None:
    for found in pkgutil.walk_packages(streammeta.client.__path__, "streammeta.client."):
        importlib.import_module(found.name)
    missing = {
        kind.__name__
        for base in (BrokerClientError, StorageError)
        for kind in subclasses(base)
        if kind.__module__.startswith(("streammeta.client.", "streammeta.storage."))
        and not kind.__name__.startswith("_")
        and kind.__name__ not in public_names(errors)
    }
    assert missing == INTERNAL


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


@pytest.mark.parametrize(
    "kind", [class_ for class_ in CLASSES if callable(getattr(class_, "close", None))], ids=str
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


FORMER = {
    **{name: value for name, value in public_names(errors).items() if inspect.isclass(value)},
    **public_names(streammeta.client.parts),
    "BucketRefusedError": errors.BucketRejectedError,
    "MapOlderThanBucketError": errors.MetadataOlderThanBucketError,
    "RefusedError": errors.RejectedError,
}


@pytest.mark.parametrize("former", FORMER)
def test_a_former_name_warns_and_gives_the_renamed_class(former: str) -> None:
    with pytest.warns(DeprecationWarning, match=FORMER[former].__name__):
        assert getattr(streammeta.client, former) is FORMER[former]


def test_a_name_that_never_existed_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NeverThere"):
        getattr(streammeta.client, "NeverThere")  # noqa: B009 - mypy knows that it is missing


class FormerObserver(SilentObserver):
    """Observer of the version before the rename of its method."""

    async def on_refused(self, object_ids: Sequence[int], error: Exception) -> None:
        """Do nothing."""


class ObserverOfBothVersions(FormerObserver):
    """Observer that works with both versions."""

    async def on_rejected(self, object_ids: Sequence[int], error: Exception) -> None:
        """Do nothing."""


class DuckTypedObserver:
    """Observer without a base class of the library."""

    async def on_refused(self, object_ids: Sequence[int], error: Exception) -> None:
        """Do nothing."""


@pytest.mark.parametrize("former", [FormerObserver(), DuckTypedObserver()])
def test_an_observer_with_the_former_method_is_called_with_a_warning(former: Any) -> None:
    with pytest.warns(DeprecationWarning, match="on_rejected"):
        assert find_rejection_callback(former) == former.on_refused


@pytest.mark.parametrize("observer", [SilentObserver(), ObserverOfBothVersions()])
def test_the_current_method_of_an_observer_wins_without_a_warning(observer: Any) -> None:
    assert find_rejection_callback(observer) == observer.on_rejected
