"""Base of the data sources for Spark: options, columns, and filters that Spark pushes down."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, ClassVar, Protocol

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from streammeta.reconcile.listing.source_filters import row_filter
from streammeta.reconcile.vocabulary.errors import ConfigurationError


class Table(Protocol):
    """A table in partitions. Spark sends it to executors."""

    def schema(self) -> pa.Schema:
        """Return all columns."""
        ...

    def partitions(self, filters: Sequence[object]) -> Sequence[InputPartition]:
        """Return the partitions that may have a row for all filters, at least one."""
        ...

    def read(self, partition: Any, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition with these columns, and any others."""
        ...


class TableSource(DataSource):
    """A data source of one table. The option `columns` selects columns."""

    FORMAT: ClassVar[str]
    OPTIONS: ClassVar[Sequence[str]]
    pushes_filters = False
    """Whether Spark pushes filters to the reader, which the Spark session has to allow."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._given = {name.lower(): value for name, value in options.items()}
        for name in self._given:
            if name not in self.OPTIONS:
                raise ConfigurationError(
                    f"{self.FORMAT} has no option {name!r}. It has {', '.join(self.OPTIONS)}"
                )

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return cls.FORMAT

    @abstractmethod
    def table(self) -> Table:
        """Return the table. Raises `ReconcileError`."""

    def schema(self) -> StructType:
        """Return the columns to read. Raises `ConfigurationError`, and the errors of `table`."""
        whole = self.table().schema()
        return from_arrow_schema(_chosen_columns(self.FORMAT, whole, self._given.get("columns")))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader that Spark sends to executors. Raises the errors of `schema`."""
        table = self.table()
        columns = _checked_schema(self.FORMAT, table.schema(), schema)
        return (_PushingReader if self.pushes_filters else _Reader)(table, columns)


class _Reader(DataSourceReader):
    def __init__(self, table: Table, columns: pa.Schema) -> None:
        self._table = table
        self._columns = columns
        self._filters: Sequence[object] = ()

    def partitions(self) -> Sequence[InputPartition]:
        return self._table.partitions(self._filters)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        names, wanted = self._columns.names, row_filter(self._filters, self._columns)
        for batch in self._table.read(partition, names):
            rows = batch.select(names).cast(self._columns)
            yield rows if wanted is None else rows.filter(wanted)


class _PushingReader(_Reader):
    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802
        """Accept filters, and return all of them so that Spark applies them again."""
        self._filters = filters
        return filters


def _chosen_columns(format_: str, whole: pa.Schema, columns: str | None) -> pa.Schema:
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


def _checked_schema(format_: str, whole: pa.Schema, asked: StructType) -> pa.Schema:
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
