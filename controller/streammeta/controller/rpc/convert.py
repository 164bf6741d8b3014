"""Fields that several messages share, from protobuf to plain values and back."""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TypeVar, cast

import numpy as np

from streammeta.controller.errors import ErrorCode, InvalidRequestError
from streammeta.controller.metadata.values import Int64Column, NodeIdentity, PageRequest, Tags
from streammeta.v1 import columns_pb2, common_pb2, objects_pb2

EnumT = TypeVar("EnumT", bound=IntEnum)


def node_identity(message: common_pb2.NodeIdentity) -> NodeIdentity:
    """Read who speaks."""
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
    """Read an object's time bounds and checksum; -1 where one is not known."""
    has = message.HasField
    return (
        message.min_timestamp_ms if has("min_timestamp_ms") else -1,
        message.max_timestamp_ms if has("max_timestamp_ms") else -1,
        message.crc32c if has("crc32c") else -1,
    )


def column_in(values: Sequence[int]) -> Int64Column:
    """Read one repeated field of integers."""
    column = np.array(values, dtype=np.int64)
    column.setflags(write=False)
    return column
