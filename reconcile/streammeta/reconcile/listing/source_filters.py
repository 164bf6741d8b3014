"""Filters that Spark pushes down to a data source, applied to Arrow rows and key ranges.

Spark applies every filter again. An unknown filter is therefore ignored, and rows with null values
may pass. A matching row is never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import datasource

from streammeta.reconcile.listing.shards import Shard

_KEY = "key"

_EXPRESSIONS: Mapping[str, Callable[[pc.Expression, Any], pc.Expression]] = {
    "EqualTo": lambda column, value: column == value,
    "GreaterThan": lambda column, value: column > value,
    "GreaterThanOrEqual": lambda column, value: column >= value,
    "LessThan": lambda column, value: column < value,
    "LessThanOrEqual": lambda column, value: column <= value,
    "In": lambda column, values: column.isin(list(values)),
    "IsNull": lambda column, _none: column.is_null(),
    "IsNotNull": lambda column, _none: column.is_valid(),
    "StringStartsWith": pc.starts_with,
}
"""By the names that pyspark gives to its filters, as of version 4.1."""


def row_filter(filters: Sequence[object], schema: pa.Schema) -> pc.Expression | None:
    """Return the condition on rows of these columns, None if any row may pass."""
    found = None
    for expression in _expressions(filters, schema):
        found = expression if found is None else found & expression
    return found


def _expressions(filters: Sequence[object], schema: pa.Schema) -> Iterator[pc.Expression]:
    for filter_ in filters:
        name, value = _column_of(filter_), getattr(filter_, "value", None)
        make = _EXPRESSIONS.get(type(filter_).__name__)
        # Spark applies the filter itself.
        if make is None or name not in schema.names:
            continue
        if all(_is_of_type(literal, schema.field(name).type) for literal in _values(value)):
            yield make(pc.field(name), value)


def shard_may_pass(filters: Sequence[object], shard: Shard) -> bool:
    """Return whether a shard of a listing may have a key that satisfies all filters."""
    after = None if shard.after is None else shard.after.encode()
    last = None if shard.last is None else shard.last.encode()
    return all(_may_pass(filter_, after, last) for filter_ in filters)


def _may_pass(filter_: object, after: bytes | None, last: bytes | None) -> bool:
    """Return whether keys after `after`, up to and including `last`, may satisfy a filter."""
    value = getattr(filter_, "value", None)
    if _column_of(filter_) != _KEY or not isinstance(value, str):
        return True

    wanted = value.encode()
    ends_before = last is not None and last < wanted
    begins_behind = after is not None and after >= wanted

    match type(filter_).__name__:
        case "EqualTo":
            return not ends_before and not begins_behind
        case "GreaterThan" | "GreaterThanOrEqual":
            return not ends_before
        case "LessThan" | "LessThanOrEqual":
            return not begins_behind
        case "StringStartsWith":
            is_past = begins_behind and after is not None and not after.startswith(wanted)
            return not ends_before and not is_past
        case _:
            return True


def has_pushdown() -> bool:
    """Return whether this version of Spark pushes filters down."""
    return hasattr(datasource, "Filter")


def _column_of(filter_: object) -> str:
    """Return the column of a filter, empty for several columns or a nested field."""
    path: Sequence[str] = getattr(filter_, "attribute", ())
    return path[0] if len(path) == 1 else ""


def _values(value: object) -> Sequence[object]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def _is_of_type(value: object, column: pa.DataType) -> bool:
    """Return whether a literal compares with a column of this type without a conversion."""
    # Before `int`, of which `bool` is a subclass.
    if isinstance(value, bool):
        return bool(pa.types.is_boolean(column))
    if isinstance(value, int):
        return bool(pa.types.is_integer(column))
    return isinstance(value, str) and bool(pa.types.is_string(column))
