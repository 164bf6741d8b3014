"""Data source of a bucket's listing for Spark: `streammeta.listing`.

Each shard is a partition. By default, shards are cut by the bucket's content. Executors list the
bucket themselves, with the credentials that boto3 finds on their machine, and yield Arrow record
batches.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from streammeta.reconcile.cluster.identity import open_store
from streammeta.reconcile.listing import shards
from streammeta.reconcile.listing.source_filters import shard_may_pass
from streammeta.reconcile.listing.table_source import TableSource
from streammeta.reconcile.vocabulary.errors import ConfigurationError
from streammeta.reconcile.vocabulary.tables import LISTING_COLUMNS, arrow_schema
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.address import StoreAddress, without_secrets


class ListingSource(TableSource):
    """Rows of a bucket's keys: key, size, modified_ms, etag, owner, object_id and note.

    Options:

    - `store`: the bucket's address.
    - `namespace`: the cluster's namespace, whose objects have `owner` 0.
    - `cuts`: ascending keys at which shards end, separated by commas. By default the bucket's
      content determines them.
    - `columns`: the columns to read.
    """

    FORMAT = "streammeta.listing"
    OPTIONS = ("store", "namespace", "cuts", "columns")

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        for name in ("store", "namespace"):
            if not self._given.get(name):
                raise ConfigurationError(
                    f"{self.FORMAT} needs the option {name!r}. Give it as .option({name!r}, ...)"
                )

        uri = self._given["store"]
        try:
            address = StoreAddress.parse(uri)
            open_object_store(address).close()
        except ValueError as error:
            raise ConfigurationError(
                f"{self.FORMAT} has the option 'store' as {without_secrets(uri)!r} ({error}),"
                " expected s3://BUCKET?endpoint=URL or file:///FOLDER"
            ) from error

        self._listing = _Listing(address, self._given["namespace"], self._given.get("cuts"))

    def table(self) -> _Listing:
        """See `TableSource.table`."""
        return self._listing


class PushingListingSource(ListingSource):
    """A `ListingSource` to which Spark pushes filters, where the Spark session allows it."""

    pushes_filters = True


@dataclass
class _ShardPartition(InputPartition):
    shard: shards.Shard


@dataclass(frozen=True)
class _Listing:
    """The listing of a bucket, in shards."""

    address: StoreAddress
    namespace: str
    cuts: str | None

    def schema(self) -> pa.Schema:
        return arrow_schema(LISTING_COLUMNS)

    def partitions(self, filters: Sequence[object]) -> Sequence[InputPartition]:
        # On the driver, once. Executors get the bounds only.
        listed = self._shards()
        wanted = [shard for shard in listed if shard_may_pass(filters, shard)]
        return [_ShardPartition(shard) for shard in wanted or listed[:1]]

    def read(self, partition: _ShardPartition, _columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        # The owner column needs whole keys, so columns are cut after the batch is complete.
        with closing(open_object_store(self.address)) as store:
            yield from shards.listed_rows(store, partition.shard, self.namespace)

    def _shards(self) -> Sequence[shards.Shard]:
        if self.cuts is not None:
            return shards.shards_between(self.cuts.split(","))
        with closing(open_store(self.address)) as store:
            return shards.shards_of_content(store, self.namespace)
