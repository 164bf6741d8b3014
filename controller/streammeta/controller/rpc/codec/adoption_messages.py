"""Messages of AdoptObjects as the metadata's requests and answers, which are in columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.ids import NONE_ID
from streammeta.controller.metadata.api.answers import AdoptObjectsAnswer
from streammeta.controller.metadata.api.requests import AdoptObjects
from streammeta.controller.metadata.tables.values import Int64Column, RangeColumns, column
from streammeta.controller.records.record import FACT_COLUMNS
from streammeta.controller.rpc.codec.conversion import not_set
from streammeta.v1 import admin_pb2


def adoption_in(message: admin_pb2.AdoptObjectsRequest) -> AdoptObjects:
    """Read a request.

    Raises:
        InvalidRequestError: an id or an epoch is not set, or an object is named without ranges.
    """
    for index, item in enumerate(message.objects):
        # An id of 0 must be stated. The default of a missing field would adopt a wrong object.
        _require_set(item, f"objects[{index}]", "object_id")
        if not item.ranges:
            raise InvalidRequestError(f"objects[{index}].ranges", "empty, must have one or more")
        for place, part in enumerate(item.ranges):
            _require_set(part, f"objects[{index}].ranges[{place}]", "stream_id", "stream_epoch")

    ranges = [part for item in message.objects for part in item.ranges]
    return AdoptObjects(
        object_id=_column(message.objects, "object_id"),
        object_size=_column(message.objects, "object_size"),
        range_count=column([len(item.ranges) for item in message.objects]),
        ranges=RangeColumns(
            stream_id=_column(ranges, "stream_id"),
            stream_epoch=_column(ranges, "stream_epoch"),
            start_offset=_column(ranges, "start_offset"),
            end_offset=_column(ranges, "end_offset"),
        ),
        replaced=column(message.replaced_object_ids),
        after_gap=column([int(part.after_gap) for part in ranges]),
        **{name: _facts(message.objects, name) for name in FACT_COLUMNS},
    )


def adoption_out(
    answer: AdoptObjectsAnswer, range_count: Int64Column
) -> admin_pb2.AdoptObjectsResponse:
    """Write the answer to a request whose objects have so many ranges each."""
    response = admin_pb2.AdoptObjectsResponse()
    # Errors of all ranges are one column. The counts of the request divide it again.
    parts = np.split(answer.range_errors, np.cumsum(range_count)[:-1])
    for error, rows in zip(answer.errors.tolist(), parts, strict=True):
        response.results.add(error=error, range_errors=rows.tolist())
    return response


def _require_set(message: Any, path: str, *names: str) -> None:
    for name in names:
        if not message.HasField(name):
            raise not_set(f"{path}.{name}")


def _column(messages: Iterable[Any], name: str) -> Int64Column:
    return column([getattr(message, name) for message in messages])


def _facts(messages: Iterable[Any], name: str) -> Int64Column:
    return column(
        [
            getattr(message, name) if message.HasField(name) else NONE_ID  # unknown
            for message in messages
        ]
    )
