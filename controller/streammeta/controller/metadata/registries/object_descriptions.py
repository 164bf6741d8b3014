"""Descriptions of objects, and listings of the objects of one node or one stream."""

import itertools
from collections.abc import Iterator

import numpy as np

from streammeta.controller.metadata.api import answers
from streammeta.controller.metadata.api.object_listings import (
    ListStreamObjects,
    StreamObject,
    StreamSetObject,
    row_of_token,
    token_of_row,
)
from streammeta.controller.metadata.registries.object_queries import ObjectQueries
from streammeta.controller.metadata.tables.object_facts import UNKNOWN
from streammeta.controller.metadata.tables.values import (
    Int64Column,
    ObjectKind,
    ObjectState,
    RangeColumns,
)

ROWS_EXAMINED_MAX = 65_536
"""Maximum number of a stream's ranges that one page of its stream objects examines."""

_SET_OBJECT_COLUMNS = (
    *("object_id", "order_id", "data_time_ms", "object_size", "range_count"),
    *("attributes", "timestamp_ms"),
)
_STREAM_OBJECT_COLUMNS = ("object_size", "attributes", "timestamp_ms")


class ObjectDescriptions(ObjectQueries):
    """Stored objects with their descriptions and listings."""

    def describe(self, row: int) -> answers.ObjectDescription:
        """Return the description of the object in a row."""
        table = self._table
        kind, state = ObjectKind(int(table["kind"][row])), ObjectState(int(table["state"][row]))
        held = self.spans(np.array([row]))
        # An object that was destroyed has no ranges any longer.
        one_stream = kind in (ObjectKind.STREAM, ObjectKind.COMPOSITE) and len(held) == 1
        low, high, crc32c = self._facts.of_one(row)

        return answers.ObjectDescription(
            object_id=int(table["object_id"][row]),
            state=state,
            kind=kind,
            object_size=int(table["object_size"][row]),
            timestamp_ms=int(table["timestamp_ms"][row]),
            attributes=int(table["attributes"][row]),
            node_id=int(table["node_id"][row]),
            stream_id=int(held.stream_id[0]) if one_stream else -1,
            ranges=RangeColumns(
                stream_id=held.stream_id, start_offset=held.start_offset, end_offset=held.end_offset
            ),
            composite_id=int(table["order_id"][row]) if state is ObjectState.LINKED else -1,
            data_time_ms=int(table["data_time_ms"][row]) if kind is ObjectKind.STREAM_SET else -1,
            min_timestamp_ms=low,
            max_timestamp_ms=high,
            crc32c=crc32c,
        )

    def describe_stream_set_objects(
        self, object_ids: Int64Column, *, by_order: bool = False, with_ranges: bool = False
    ) -> tuple[StreamSetObject, ...]:
        """Return the descriptions of SSOs, in the given order or in the order of their node."""
        rows = self.rows(object_ids)
        if by_order:
            rows = rows[np.lexsort((object_ids, self._table["order_id"][rows]))]
        columns = (  # in the order of the fields
            *(self._table[name][rows].tolist() for name in _SET_OBJECT_COLUMNS),
            *self._known_facts(rows),
            self._ranges_of_each(rows) if with_ranges else itertools.repeat(None),
        )
        return tuple(map(StreamSetObject, *columns))

    def _known_facts(self, rows: Int64Column) -> Iterator[list[int]]:
        """Yield the time bounds and the checksums of objects, -1 where they are unknown."""
        facts = self._facts.of(rows)
        for values in (facts.min_timestamp_ms, facts.max_timestamp_ms, facts.crc32c):
            yield values.tolist() if len(values) else [UNKNOWN] * len(rows)

    def _ranges_of_each(self, rows: Int64Column) -> Iterator[RangeColumns]:
        """Yield the ranges in each object."""
        held, end = self.spans(rows), 0
        for count in self.range_counts(rows).tolist():
            part, end = slice(end, end + count), end + count
            yield RangeColumns(
                stream_id=held.stream_id[part],
                start_offset=held.start_offset[part],
                end_offset=held.end_offset[part],
            )

    def page_of_stream_objects(
        self, request: ListStreamObjects, size: int
    ) -> tuple[tuple[StreamObject, ...], str]:
        """Return the first `size` stream objects and composites of a page, and the next token."""
        listed, following = self._ranges.rows_between(
            request.stream_id,
            max((request.start_offset + 1, 0), row_of_token(request.page.page_token)),
            request.end_offset,
            ROWS_EXAMINED_MAX,
        )
        found = listed[self._of_one_stream(listed)]
        # The page may end before the examined rows do.
        following = int(found[size]) if len(found) > size else following

        objects = self._describe_stream_objects(found[:size])
        if following < 0:
            return objects, ""
        return objects, token_of_row(*self._ranges.place_of(following))

    def _describe_stream_objects(self, rows_of_ranges: Int64Column) -> tuple[StreamObject, ...]:
        streams, starts, ends = self._ranges.columns(rows_of_ranges)
        ids = self._ranges.object_ids(rows_of_ranges)
        rows, table = self.rows(ids), self._table
        columns = (  # in the order of the fields
            *(values.tolist() for values in (streams, ids)),
            map(ObjectKind, table["kind"][rows].tolist()),
            *(values.tolist() for values in (starts, ends)),
            *(table[name][rows].tolist() for name in _STREAM_OBJECT_COLUMNS),
            *self._known_facts(rows),
        )
        return tuple(map(StreamObject, *columns))
