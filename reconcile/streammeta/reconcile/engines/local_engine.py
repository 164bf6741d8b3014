"""Reconciliation in the process itself: no JVM, in memory that does not grow with the bucket.

Shards are listed by a few threads. Listing and map are joined batch by batch; memory holds one bit
for each object of the map, and nothing else of each key. Deletion is one task.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from streammeta.reconcile.deletion.order import DeletionOrder
from streammeta.reconcile.deletion.pacing import LARGEST_BATCH
from streammeta.reconcile.deletion.run_signals import relayed
from streammeta.reconcile.deletion.tasks import carry_out
from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.engines.local_verdicts import judge_locally
from streammeta.reconcile.listing.inventory import Inventory
from streammeta.reconcile.listing.inventory_rows import inventory_rows
from streammeta.reconcile.listing.repeated_keys import KeyNumbers, keep_one_row_a_key
from streammeta.reconcile.listing.shards import Shard, listed_rows
from streammeta.reconcile.parquet.arrow_start import return_memory
from streammeta.reconcile.vocabulary.attempts import ONLY_ATTEMPT
from streammeta.reconcile.vocabulary.errors import ReconcileError
from streammeta.reconcile.vocabulary.tables import (
    CANDIDATE_COLUMNS,
    LISTING_COLUMNS,
    OUTCOME_COLUMNS,
    ROWS_A_GROUP,
    Counts,
    Tally,
    arrow_schema,
    gathered,
    read_batches,
    table_writer,
)
from streammeta.reconcile.vocabulary.verdicts import Owner, Rules, Verdict
from streammeta.storage.object_store.opening import open_object_store

_LISTINGS_AT_ONCE = 8
_FILES_AT_ONCE = 2  # reading them is work of this process, and takes memory
_ROWS_SORTED = 500_000
_Part: TypeAlias = Generator[pa.RecordBatch, None, None]


class TooManyKeysError(ReconcileError):
    """The bucket has more keys than the engine was to list."""


class _EndedError(Exception):
    """Another shard has failed, so this one is given up."""


class LocalEngine:
    """See `Engine`. With `most_keys` a larger bucket is refused as soon as that is known.

    Once `is_ending` is true no further batch is deleted.
    """

    name = EngineName.LOCAL

    def __init__(
        self, most_keys: int | None = None, is_ending: Callable[[], bool] = lambda: False
    ) -> None:
        self._most_keys = most_keys
        self._is_ending = is_ending

    def list_bucket(self, uri: str, namespace: str, shards: Sequence[Shard], listing: Path) -> int:
        """See `Engine.list_bucket`. Raises `TooManyKeysError`."""
        with closing(open_object_store(uri)) as store:
            parts = [listed_rows(store, shard, namespace) for shard in shards]
            return _write_parts(parts, _Budget(self._most_keys), listing, _LISTINGS_AT_ONCE)

    def list_inventory(self, inventory: Inventory, namespace: str, listing: Path) -> int:
        """See `Engine.list_inventory`. Raises `TooManyKeysError`."""
        budget = _Budget(self._most_keys)
        parts = [
            inventory_rows(inventory, file, namespace, budget.check) for file in inventory.files
        ]
        return _write_parts(parts, budget, listing, _FILES_AT_ONCE)

    def count_owners(self, listing: Path) -> Mapping[Owner, Tally]:
        """See `Engine.count_owners`."""
        counts = Counts("owner")
        for batch in read_batches(listing, LISTING_COLUMNS):
            counts.add(batch)
        return {Owner(owner): tally for owner, tally in counts.tallies().items()}

    def judge(self, draft: Path, rules: Rules, namespace: str) -> Mapping[Verdict, Tally]:
        """See `Engine.judge`."""
        return judge_locally(draft, rules, namespace)

    def delete(self, order: DeletionOrder, candidates: Path, outcomes: Path) -> None:
        """See `Engine.delete`. The outcomes of a batch are on disk before the next is begun."""
        outcomes.mkdir(parents=True)
        schema = arrow_schema(OUTCOME_COLUMNS)
        wanted = _sorted_candidates(candidates)
        with relayed(self._is_ending, Path(order.signals_folder)):
            for number, rows in enumerate(carry_out(order, ONLY_ATTEMPT, wanted)):
                with pq.ParquetWriter(outcomes / f"part-{number:06d}.parquet", schema) as writer:
                    writer.write_batch(rows)


class _Budget:
    """The number of keys that all shards together may still list; none once it has ended."""

    def __init__(self, keys: int | None) -> None:
        self._left = keys
        self._has_ended = False
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise `_EndedError` if it has ended."""
        if self._has_ended:
            raise _EndedError("another shard failed")

    def take(self, keys: int) -> None:
        """Count keys. Raises `TooManyKeysError` when there are more than there may be."""
        with self._lock:
            self.check()
            if self._left is not None:
                self._left -= keys
                if self._left < 0:
                    raise TooManyKeysError("the bucket has more keys than may be listed here")

    def counted(self, part: _Part) -> _Part:
        """The same rows, each counted as it comes. Raises `TooManyKeysError`."""
        for rows in part:
            self.take(rows.num_rows)
            yield rows

    def end(self) -> None:
        """Have all shards give up."""
        self._has_ended = True


@contextmanager
def _given_up(pool: ThreadPoolExecutor, budget: _Budget) -> Iterator[None]:
    """Have all shards give up if a signal breaks off the block, since the pool waits for them."""
    try:
        yield
    except BaseException:
        budget.end()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _write_parts(parts: Sequence[_Part], budget: _Budget, listing: Path, at_once: int) -> int:
    """Write each part of a listing to a file of its own; returns the number of rows.

    If a key is found more than once, all files are written anew with one row for each.
    """
    listing.mkdir()
    with tempfile.TemporaryFile(dir=listing.parent, buffering=0) as scratch:
        keys = KeyNumbers(scratch)
        with ThreadPoolExecutor(at_once) as pool, _given_up(pool, budget):
            under_way = [
                pool.submit(_write_part, rows, path, budget, keys)
                for number, rows in enumerate(parts)
                for path in [listing / f"part-{number:05d}.parquet"]
            ]
            failures = [error for one in under_way if (error := one.exception()) is not None]
        return_memory()
        if failures:
            raise next(error for error in failures if not isinstance(error, _EndedError))
        may_repeat = keys.may_repeat()

    if may_repeat:
        keep_one_row_a_key(listing)

    return_memory()
    return sum(one.result() for one in under_way)


def _write_part(part: _Part, path: Path, budget: _Budget, keys: KeyNumbers) -> int:
    total = 0
    try:
        with closing(part), table_writer(path, LISTING_COLUMNS) as writer:
            for rows in gathered(budget.counted(part), ROWS_A_GROUP):
                writer.write_batch(rows)
                keys.add(rows)
                total += rows.num_rows
    except BaseException:
        budget.end()
        raise
    return total


def _sorted_candidates(folder: Path) -> Iterator[pa.RecordBatch]:
    """The candidates, no more of them at once than are deleted with one request.

    They are in the order of keys, in which neighbours are looked up together; of very many only
    each run is, which is what memory holds.
    """
    schema = arrow_schema(CANDIDATE_COLUMNS)
    batches = read_batches(folder, CANDIDATE_COLUMNS)
    while run := list(_first_rows(batches, _ROWS_SORTED)):
        table = pa.Table.from_batches(run, schema=schema).sort_by("key")
        yield from table.to_batches(max_chunksize=LARGEST_BATCH)


def _first_rows(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The next batches, until they have so many rows together."""
    while rows > 0 and (batch := next(batches, None)) is not None:
        rows -= batch.num_rows
        yield batch
