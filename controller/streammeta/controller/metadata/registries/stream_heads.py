"""Heads of streams: the fields that decide about requests, and the checks that need only them."""

from typing import Generic, NamedTuple, TypeVar

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.tables.values import StreamState

DELETED = -1
"""State of a row whose stream is deleted."""

_Cell = TypeVar("_Cell")


class Head(NamedTuple, Generic[_Cell]):
    """The fields that decide about requests: numbers of one stream, or columns of many."""

    epoch: _Cell
    state: _Cell
    node_id: _Cell
    start_offset: _Cell
    end_offset: _Cell


def check_epoch(head: Head[int] | None, epoch: int) -> ErrorCode:
    """Return NONE if the stream exists and has exactly this epoch."""
    if head is None:
        return ErrorCode.STREAM_NOT_EXIST
    if head.epoch > epoch:
        return ErrorCode.STREAM_FENCED
    return ErrorCode.NONE if head.epoch == epoch else ErrorCode.STREAM_INNER_ERROR


def check_owner(head: Head[int] | None, epoch: int, node_id: int) -> ErrorCode:
    """Return NONE if `node_id` owns the stream under exactly this epoch, or it is shared."""
    error = check_epoch(head, epoch)
    if head is not None and head.state == StreamState.SHARED:
        return error
    if error is ErrorCode.NONE and head is not None and head.node_id != node_id:
        return ErrorCode.STREAM_FENCED
    return error
