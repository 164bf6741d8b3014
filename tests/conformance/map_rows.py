"""The sections of a map as rows that can be edited, and sections again.

For states that no sequence of requests leads to. Works with whatever sections and columns a map
has: those it does not name are passed on as they are, and get a default in new rows. Knows nothing
of scenarios and checks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

Row: TypeAlias = dict[str, Any]

_KEYS = {
    "streams": ("stream_id",),
    "stream_tags": ("stream_id", "key"),
    "ranges": ("stream_id", "range_index"),
    "objects": ("object_id",),
    "object_ranges": ("object_id", "stream_id", "start_offset"),
    "object_facts": ("object_id",),
    "nodes": ("node_id",),
    "node_tags": ("node_id", "key"),
    "kvs": ("namespace", "key"),
}
"""By which columns the rows of a section are sorted; others keep their order."""

_DEFAULTS: Row = {
    "epoch": -1,
    "range_index": -1,
    "node_id": -1,
    "order_id": -1,
    "data_time_ms": -1,
    "recovered_by": -1,
    "wal_config": "",
    "failover": False,
    "locked": False,
    "departed": False,
    "supervised": False,
}
"""What a new row holds in columns it is not given a value for; 0 in all others."""


class MetadataRows:
    def __init__(self, sections: Mapping[str, Mapping[str, Any]]) -> None:
        self._columns: dict[str, list[str]] = {}
        self._rows: dict[str, list[Row]] = {}
        for name, section in sections.items():
            self._columns[name] = list(section)
            values = [np.asarray(column, dtype=object).tolist() for column in section.values()]
            self._rows[name] = [
                dict(zip(section, cells, strict=True)) for cells in zip(*values, strict=True)
            ]

    def rows(self, section: str, **wanted: Any) -> list[Row]:
        """Return the rows that have these values; changing one changes the section."""
        return [
            row
            for row in self._rows[section]
            if all(row[name] == value for name, value in wanted.items())
        ]

    def one(self, section: str, **wanted: Any) -> Row | None:
        return next(iter(self.rows(section, **wanted)), None)

    @property
    def counters(self) -> Row:
        return self._rows["counters"][0]

    def put(self, section: str, key: Row, **values: Any) -> Row:
        """Change the row with this key, or add it; return it."""
        row = self.one(section, **key)
        if row is None:
            row = {name: _DEFAULTS.get(name, 0) for name in self._columns[section]}
            row.update(key)
            self._rows[section].append(row)
        row.update({name: value for name, value in values.items() if name in row})
        return row

    def drop(self, section: str, **wanted: Any) -> None:
        gone = [id(row) for row in self.rows(section, **wanted)]
        self._rows[section] = [row for row in self._rows[section] if id(row) not in gone]

    def sections(self) -> dict[str, dict[str, list[Any]]]:
        """Return the columns, rows sorted and counts of ranges set.

        Ranges of streams that were never created, which no map holds, are left out.
        """
        counts: dict[int, int] = {}
        next_id = self.counters["next_stream_id"]
        held = self._rows["object_ranges"]
        self._rows["object_ranges"] = [row for row in held if row["stream_id"] < next_id]
        for row in self._rows["object_ranges"]:
            counts[row["object_id"]] = counts.get(row["object_id"], 0) + 1
        for row in self._rows["objects"]:
            row["range_count"] = counts.get(row["object_id"], 0)
        return {name: self._section(name) for name in self._columns}

    def _section(self, name: str) -> dict[str, list[Any]]:
        rows, key = self._rows[name], _KEYS.get(name)
        if key is not None:
            rows = sorted(rows, key=lambda row: tuple(row[column] for column in key))
        return {column: [row[column] for row in rows] for column in self._columns[name]}
