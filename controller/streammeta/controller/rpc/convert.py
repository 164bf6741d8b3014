"""Fields that several messages share, from protobuf to plain values and back."""

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import TypeVar, cast

import numpy as np
from google.protobuf.message import Message

from streammeta.controller.errors import ErrorCode, InvalidRequestError
from streammeta.controller.ids import NONE_ID
from streammeta.controller.metadata.values import Int64Column, NodeIdentity, PageRequest, Tags
from streammeta.v1 import columns_pb2, common_pb2, objects_pb2

EnumT = TypeVar("EnumT", bound=IntEnum)
MessageT = TypeVar("MessageT", bound=Message)


def require(message: Message, where: str, *fields: str) -> None:
    """Refuse a message that lacks one of `fields`; `where` is its own path with a dot, or empty.

    Raises:
        InvalidRequestError: a field is not set; zero, too, has to be said.
    """
    for field in fields:
        if not message.HasField(field):
            raise InvalidRequestError(f"{where}{field}", "not set; wanted a value, 0 or more")


def complete(messages: Iterable[MessageT], field: str, *fields: str) -> Iterator[MessageT]:
    """Yield the messages of a repeated `field`, each of which must have `fields`.

    Raises:
        InvalidRequestError: one of them is not set.
    """
    for index, message in enumerate(messages):
        for name in fields:
            if not message.HasField(name):
                require(message, f"{field}[{index}].", name)
        yield message


def optional_in(message: Message, field: str) -> int:
    """Return an optional field's value, or -1 if it is absent.

    Raises:
        InvalidRequestError: the value is negative; what there is not is left out.
    """
    if not message.HasField(field):
        return NONE_ID
    value: int = getattr(message, field)
    if value < 0:
        raise InvalidRequestError(field, f"{value}; wanted 0 or more, or no value")
    return value


def optional_out(value: int) -> int | None:
    """Return what goes into an optional field: nothing for -1."""
    return None if value < 0 else value


def node_identity(message: common_pb2.NodeIdentity, field: str = "node") -> NodeIdentity:
    """Return the node and process in whose name a request is made."""
    if not (message.HasField("node_id") and message.HasField("node_epoch")):
        require(message, f"{field}.", "node_id", "node_epoch")
    return NodeIdentity(message.node_id, message.node_epoch)


def page_request(message: common_pb2.PageRequest) -> PageRequest:
    """Read which page is wanted."""
    return PageRequest(message.page_size, message.page_token)


def tags_in(messages: Iterable[common_pb2.Tag]) -> Tags:
    """Read labels.

    Raises:
        InvalidRequestError: a key appears twice.
    """
    tags = tuple((tag.key, tag.value) for tag in messages)
    if len({key for key, _ in tags}) != len(tags):
        keys = ", ".join(key for key, _ in tags)
        raise InvalidRequestError("tags", f"a key appears twice among {keys}; wanted once each")
    return tags


def tags_out(tags: Tags) -> list[common_pb2.Tag]:
    """Write labels."""
    return [common_pb2.Tag(key=key, value=value) for key, value in tags]


def enum_in(kind: type[EnumT], field: str, number: int) -> EnumT:
    """Read a value of an enum, of which a newer caller may know more values.

    Raises:
        InvalidRequestError: the value is not set, or this version does not know it.
    """
    try:
        return kind(number)
    except ValueError:
        known = ", ".join(f"{one.name} ({one.value})" for one in kind)
        given = number or "not set"
        raise InvalidRequestError(field, f"{given}; wanted one of {known}") from None


def error_out(code: ErrorCode) -> common_pb2.ErrorCode.ValueType:
    """Write an outcome; both enums have the same numbers."""
    return cast(common_pb2.ErrorCode.ValueType, int(code))


def facts_in(
    message: objects_pb2.CommitStreamObjectRequest | columns_pb2.PackedCommitStreamSetObjectRequest,
) -> tuple[int, int, int]:
    """Return an object's time bounds and checksum; -1 where one is not known."""
    return (
        optional_in(message, "min_timestamp_ms"),
        optional_in(message, "max_timestamp_ms"),
        optional_in(message, "crc32c"),
    )


def column_in(values: Sequence[int]) -> Int64Column:
    """Read one repeated field of integers."""
    column = np.array(values, dtype=np.int64)
    column.setflags(write=False)
    return column
