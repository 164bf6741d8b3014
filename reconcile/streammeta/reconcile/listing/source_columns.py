"""Columns that a query reads of a data source, by the option `columns` or by a schema."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from streammeta.reconcile.vocabulary.errors import ConfigurationError


def chosen_columns(format_: str, whole: pa.Schema, columns: str | None) -> pa.Schema:
    """Return the columns in the comma-separated option, or all without it.

    Raises:
        ConfigurationError: the table has no such column, or one is named twice.
    """
    if columns is None:
        return whole
    names = [name.strip() for name in columns.split(",")]
    for name in names:
        if name not in whole.names or names.count(name) > 1:
            raise ConfigurationError(
                f"{format_} has the option 'columns' as {columns!r}, expected each column once, of"
                f" {', '.join(whole.names)}"
            )
    return pa.schema([whole.field(name) for name in names])


def checked_schema(format_: str, whole: pa.Schema, asked: StructType) -> pa.Schema:
    """Return the columns of a query. Spark passes a schema of the user on without a check.

    Raises:
        ConfigurationError: a column is not in the table, or has another type.
    """
    types = {field.name: field.dataType for field in from_arrow_schema(whole)}
    for field in asked.fields:
        wanted = types.get(field.name)
        if wanted is None:
            raise ConfigurationError(
                f"{format_} has no column {field.name!r}. Leave .schema() out, or select from"
                f" {', '.join(whole.names)}"
            )
        if field.dataType != wanted:
            raise ConfigurationError(
                f"{format_} has the column {field.name!r} as {wanted.simpleString()}, .schema()"
                f" wants {field.dataType.simpleString()}. Leave .schema() out, or cast the column"
            )
    return pa.schema([whole.field(field.name) for field in asked.fields])
