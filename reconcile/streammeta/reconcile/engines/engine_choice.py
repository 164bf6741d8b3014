"""Choice of the engine: this process while that is faster, Spark for larger buckets."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

from streammeta.reconcile.deletion.order import DeletionOrder
from streammeta.reconcile.engines import engine, local_engine, spark_session
from streammeta.reconcile.engines.spark_engine import spark_engine
from streammeta.reconcile.listing.inventory import Inventory
from streammeta.reconcile.listing.shards import Shard
from streammeta.reconcile.vocabulary.tables import Tally, count_rows
from streammeta.reconcile.vocabulary.verdicts import Owner, Rules, Verdict
from streammeta.storage.object_store.protocol.address import StoreAddress

AUTO_KEYS = 20_000_000
"""Maximum keys of a bucket, and candidates of a plan, for which `EngineName.AUTO` stays in this
process if Spark is installed. They take less than a minute, and about 6 GB of disk."""


@contextmanager
def open_engine(
    name: engine.EngineName,
    spark: spark_session.SparkConfig,
    progress: Callable[[str], None],
    auto_keys: int,
    is_ending: Callable[[], bool] = lambda: False,
) -> Iterator[engine.Engine]:
    """Yield the chosen engine. A Spark session that it starts ends with the block.

    `EngineName.AUTO` switches to Spark above `auto_keys` keys, if Spark is installed. The engine
    starts no further batch of deletions once `is_ending` returns true.

    Raises:
        ReconcileError: Spark was requested and does not start.
        MissingPackageError: Spark was requested and is not installed.
    """
    with ExitStack() as stack:
        if name is engine.EngineName.SPARK:
            progress(f"starting Spark on {spark.place}")
            yield stack.enter_context(spark_engine(spark, is_ending))
        elif name is engine.EngineName.LOCAL or find_spec("pyspark") is None:
            yield local_engine.LocalEngine(is_ending=is_ending)
        else:
            yield _AutoEngine(stack, spark, progress, auto_keys, is_ending)


class _AutoEngine:
    """Works in this process, and switches to Spark for too many keys."""

    def __init__(
        self,
        stack: ExitStack,
        spark: spark_session.SparkConfig,
        progress: Callable[[str], None],
        keys: int,
        is_ending: Callable[[], bool],
    ) -> None:
        self._stack = stack
        self._spark = spark
        self._progress = progress
        self._keys = keys
        self._is_ending = is_ending
        self._chosen: engine.Engine = local_engine.LocalEngine(keys, is_ending)

    @property
    def name(self) -> engine.EngineName:
        """See `Engine.name`."""
        return self._chosen.name

    def list_bucket(
        self, address: StoreAddress, namespace: str, shards: Sequence[Shard], listing: Path
    ) -> int:
        """See `Engine.list_bucket`. A switch to Spark starts the listing again."""
        return self._list(lambda on: on.list_bucket(address, namespace, shards, listing), listing)

    def list_inventory(self, inventory: Inventory, namespace: str, listing: Path) -> int:
        """See `Engine.list_inventory`. A switch to Spark starts the reading again."""
        return self._list(lambda on: on.list_inventory(inventory, namespace, listing), listing)

    def count_owners(self, listing: Path) -> Mapping[Owner, Tally]:
        """See `Engine.count_owners`."""
        return self._chosen.count_owners(listing)

    def judge(self, draft: Path, rules: Rules, namespace: str) -> Mapping[Verdict, Tally]:
        """See `Engine.judge`."""
        return self._chosen.judge(draft, rules, namespace)

    def delete(self, order: DeletionOrder, candidates: Path, outcomes: Path) -> None:
        """See `Engine.delete`."""
        if count_rows(candidates) > self._keys:
            self._switch_to_spark()
        self._chosen.delete(order, candidates, outcomes)

    def _list(self, work: Callable[[engine.Engine], int], listing: Path) -> int:
        try:
            return work(self._chosen)
        except local_engine.TooManyKeysError:
            # Files of the first attempt would repeat the rows.
            shutil.rmtree(listing)
        return work(self._switch_to_spark())

    def _switch_to_spark(self) -> engine.Engine:
        self._progress(f"more than {self._keys} keys: starting Spark on {self._spark.place}")
        # For the rest of the plan, and ended by the caller's block.
        self._chosen = self._stack.enter_context(spark_engine(self._spark, self._is_ending))
        return self._chosen
