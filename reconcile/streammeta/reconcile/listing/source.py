"""Data source of a bucket's listing for Spark: `streammeta.listing`.

Each shard is a partition. By default, shards are cut by the bucket's content. Executors list the
bucket themselves, with the credentials that boto3 finds on their machine, and yield Arrow record
batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from streammeta.reconcile.cluster.identity import open_store
from streammeta.reconcile.listing.shards import (
    Shard,
    listed_rows,
    shards_between,
    shards_of_content,
)
from streammeta.reconcile.listing.source_columns import checked_schema, chosen_columns
from streammeta.reconcile.listing.source_filters import row_filter, shard_may_pass
from streammeta.reconcile.vocabulary.errors import ConfigurationError
from streammeta.reconcile.vocabulary.tables import LISTING_COLUMNS, arrow_schema
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.address import without_secrets

FORMAT = "streammeta.listing"
_OPTIONS = ("store", "namespace", "cuts", "columns")


class ListingSource(DataSource):
    """Rows of a bucket's keys: key, size, modified_ms, etag, owner, object_id and note.

    Options:

    - `store`: the bucket's address.
    - `namespace`: the cluster's namespace, whose objects have `owner` 0.
    - `cuts`: ascending keys at which shards end, separated by commas. By default the bucket's
      content determines them.
    - `columns`: the columns to read.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the columns to read. Raises `ConfigurationError`."""
        given = _checked(self.options)
        columns = chosen_columns(FORMAT, arrow_schema(LISTING_COLUMNS), given.get("columns"))
        return from_arrow_schema(columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader that Spark sends to executors. Raises `ConfigurationError`."""
        return _Reader(*self._reading(schema))

    def _reading(self, schema: StructType) -> tuple[Mapping[str, str], pa.Schema]:
        columns = checked_schema(FORMAT, arrow_schema(LISTING_COLUMNS), schema)
        return _checked(self.options), columns


class PushingListingSource(ListingSource):
    """A `ListingSource` to which Spark pushes filters, where the Spark session allows it."""

    def reader(self, schema: StructType) -> DataSourceReader:
        """See `ListingSource.reader`."""
        return _PushingReader(*self._reading(schema))


def _checked(options: Mapping[str, str]) -> Mapping[str, str]:
    given = {name.lower(): value for name, value in options.items()}
    for name in given:
        if name not in _OPTIONS:
            raise ConfigurationError(
                f"{FORMAT} has no option {name!r}. It has {', '.join(_OPTIONS)}"
            )

    for name in ("store", "namespace"):
        if not given.get(name):
            raise ConfigurationError(
                f"{FORMAT} needs the option {name!r}. Give it as .option({name!r}, ...)"
            )

    try:
        open_object_store(given["store"]).close()
    except ValueError as error:
        raise ConfigurationError(
            f"{FORMAT} has the option 'store' as {without_secrets(given['store'])!r} ({error}),"
            " expected s3://BUCKET?endpoint=URL or file:///FOLDER"
        ) from error

    return given


@dataclass
class _ShardPartition(InputPartition):
    after: str | None
    last: str | None


class _Reader(DataSourceReader):
    def __init__(self, options: Mapping[str, str], columns: pa.Schema) -> None:
        self._options = options
        self._columns = columns
        self._filters: Sequence[object] = ()

    def partitions(self) -> Sequence[InputPartition]:
        """Return one for each shard that may have a row. Spark needs at least one."""
        # On the driver, once. Executors get the bounds only.
        shards = self._shards()
        wanted = [shard for shard in shards if shard_may_pass(self._filters, shard)]
        return [_ShardPartition(shard.after, shard.last) for shard in wanted or shards[:1]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _ShardPartition)
        shard = Shard(partition.after, partition.last)
        names, wanted = self._columns.names, row_filter(self._filters, self._columns)
        with closing(open_object_store(self._options["store"])) as store:
            # The owner column needs whole keys, so columns are cut after the batch is complete.
            for batch in listed_rows(store, shard, self._options["namespace"]):
                rows = batch.select(names)
                yield rows if wanted is None else rows.filter(wanted)

    def _shards(self) -> Sequence[Shard]:
        if "cuts" in self._options:
            return shards_between(self._options["cuts"].split(","))
        with closing(open_store(self._options["store"])) as store:
            return shards_of_content(store, self._options["namespace"])


class _PushingReader(_Reader):
    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802
        """Accept filters, and return all of them so that Spark applies them again."""
        self._filters = filters
        return filters
