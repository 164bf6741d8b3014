"""Columns of the tables that go between Spark and Python, written down once for both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa


def arrow_schema(columns: str) -> pa.Schema:
    """The Arrow schema of Spark columns such as "key string, size long"; knows these two types."""
    fields: list[pa.Field[Any]] = []
    for column in columns.split(","):
        name, kind = column.split()
        fields.append(
            pa.field(name, pa.string()) if kind == "string" else pa.field(name, pa.int64())
        )
    return pa.schema(fields)


def record_batch(columns: str, values: Mapping[str, Any]) -> pa.RecordBatch:
    """Rows with these columns, from one list or Arrow array for each of them."""
    return pa.RecordBatch.from_pydict(values, schema=arrow_schema(columns))
