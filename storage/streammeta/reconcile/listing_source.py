"""The listing of a bucket as a data source for Spark: `streammeta.listing`.

One partition a shard, cut by what the bucket holds unless told otherwise. Executors list with a
store of their own, whose credentials come from where boto3 looks on their machine, and yield record
batches of Arrow. Knows nothing of the map.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from streammeta.reconcile.errors import ConfigurationError
from streammeta.reconcile.identity import open_store
from streammeta.reconcile.listing import Shard, listed_rows, shards_between, shards_of_content
from streammeta.reconcile.tables import LISTING_COLUMNS
from streammeta.storage.object_store.address import open_object_store, without_secrets

FORMAT = "streammeta.listing"
_OPTIONS = ("store", "namespace", "cuts")


class ListingSource(DataSource):
    """Rows of a bucket's keys: key, size, modified_ms, etag, owner, object_id and note.

    Options: `store`, the bucket's address; `namespace`, that of the cluster whose keys are its own
    (`owner` 0); `cuts`, keys at which shards end, ascending and separated by commas: without it
    the bucket is looked at.
    """

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    def schema(self) -> str:
        """The columns, as Spark writes them."""
        return LISTING_COLUMNS

    def reader(self, schema: object) -> DataSourceReader:
        """Give the reader that Spark sends to executors. Raises `ConfigurationError`."""
        return _Reader(_checked(self.options))


def _checked(options: Mapping[str, str]) -> Mapping[str, str]:
    given = {name.lower(): value for name, value in options.items()}
    for name in given:
        if name not in _OPTIONS:
            raise ConfigurationError(
                f"{FORMAT} has no option {name!r}; it has {', '.join(_OPTIONS)}"
            )
    for name in ("store", "namespace"):
        if not given.get(name):
            raise ConfigurationError(
                f"{FORMAT} needs the option {name!r}; give it as .option({name!r}, ...)"
            )
    try:
        open_object_store(given["store"]).close()
    except ValueError as error:
        raise ConfigurationError(
            f"{FORMAT} has the option 'store' as {without_secrets(given['store'])!r} ({error});"
            " wanted s3://BUCKET?endpoint=URL or file:///FOLDER"
        ) from error
    return given


@dataclass
class _ShardPartition(InputPartition):
    after: str | None
    last: str | None


class _Reader(DataSourceReader):
    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        return [_ShardPartition(shard.after, shard.last) for shard in self._shards()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _ShardPartition)
        shard = Shard(partition.after, partition.last)
        with closing(open_object_store(self._options["store"])) as store:
            yield from listed_rows(store, shard, self._options["namespace"])

    def _shards(self) -> Sequence[Shard]:
        if "cuts" in self._options:
            return shards_between(self._options["cuts"].split(","))
        with closing(open_store(self._options["store"])) as store:
            return shards_of_content(store, self._options["namespace"])
