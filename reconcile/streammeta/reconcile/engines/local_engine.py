"""Reconciliation in the process itself: no JVM, in memory that does not grow with the bucket.

A few threads list the shards. Listing and metadata are joined batch by batch. Memory contains one
bit per object in the metadata, and nothing else per key. Deletion is one task.
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

from streammeta.reconcile.deletion import run_signals, tasks
from streammeta.reconcile.deletion.order import DeletionOrder
from streammeta.reconcile.engines import engine, local_verdicts
from streammeta.reconcile.listing.inventory import Inventory
from streammeta.reconcile.listing.inventory_rows import inventory_rows
from streammeta.reconcile.listing.repeated_keys import KeyNumbers, keep_one_row_a_key
from streammeta.reconcile.listing.shards import Shard, listed_rows
from streammeta.reconcile.parquet.arrow_start import return_memory
from streammeta.reconcile.vocabulary import attempts, errors, tables
from streammeta.reconcile.vocabulary.verdicts import Owner, Rules, Verdict
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.address import StoreAddress

# Threads wait for the network. More would contend for Python's lock while they decode pages.
_LISTINGS_AT_ONCE = 8
_FILES_AT_ONCE = 2  # decoding files takes CPU time and memory of this process
# About 100 MB of keys.
_ROWS_SORTED = 500_000
_Part: TypeAlias = Generator[pa.RecordBatch, None, None]


class TooManyKeysError(errors.ReconcileError):
    """The bucket has more keys than this engine may list."""


class _EndedError(Exception):
    """Another shard failed, so this one is aborted."""


class LocalEngine:
    """See `Engine`. Rejects a bucket with more than `most_keys` keys as soon as possible.

    No further batch of deletions starts once `is_ending` returns true.
    """

    name = engine.EngineName.LOCAL

    def __init__(
        self, most_keys: int | None = None, is_ending: Callable[[], bool] = lambda: False
    ) -> None:
        self._most_keys = most_keys
        self._is_ending = is_ending

    def list_bucket(
        self, address: StoreAddress, namespace: str, shards: Sequence[Shard], listing: Path
    ) -> int:
        """See `Engine.list_bucket`. Raises `TooManyKeysError`."""
        with closing(open_object_store(address)) as store:
            parts = [listed_rows(store, shard, namespace) for shard in shards]
            return _write_parts(parts, _Budget(self._most_keys), listing, _LISTINGS_AT_ONCE)

    def list_inventory(self, inventory: Inventory, namespace: str, listing: Path) -> int:
        """See `Engine.list_inventory`. Raises `TooManyKeysError`."""
        budget = _Budget(self._most_keys)
        parts = [
            inventory_rows(inventory, file, namespace, budget.check) for file in inventory.files
        ]
        return _write_parts(parts, budget, listing, _FILES_AT_ONCE)

    def count_owners(self, listing: Path) -> Mapping[Owner, tables.Tally]:
        """See `Engine.count_owners`."""
        counts = tables.Counts("owner")
        for batch in tables.read_batches(listing, tables.LISTING_COLUMNS):
            counts.add(batch)
        return {Owner(owner): tally for owner, tally in counts.tallies().items()}

    def judge(self, draft: Path, rules: Rules, namespace: str) -> Mapping[Verdict, tables.Tally]:
        """See `Engine.judge`."""
        return local_verdicts.judge_locally(draft, rules, namespace)

    def delete(self, order: DeletionOrder, candidates: Path, outcomes: Path) -> None:
        """See `Engine.delete`. The outcomes of a batch are on disk before the next batch."""
        outcomes.mkdir(parents=True)
        schema = tables.arrow_schema(tables.OUTCOME_COLUMNS)
        wanted = _sorted_candidates(candidates)
        with run_signals.relayed(self._is_ending, Path(order.signals_folder)):
            for number, rows in enumerate(tasks.carry_out(order, attempts.ONLY_ATTEMPT, wanted)):
                with pq.ParquetWriter(outcomes / f"part-{number:06d}.parquet", schema) as writer:
                    writer.write_batch(rows)


class _Budget:
    """Number of keys that all shards together may still list."""

    def __init__(self, keys: int | None) -> None:
        self._left = keys
        self._has_ended = False
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise `_EndedError` if another shard failed."""
        if self._has_ended:
            raise _EndedError("another shard failed")

    def take(self, keys: int) -> None:
        """Count keys. Raises `TooManyKeysError` above the limit."""
        with self._lock:
            self.check()
            if self._left is not None:
                # Shared by all shards, so the limit holds for the bucket and not for each shard.
                self._left -= keys
                if self._left < 0:
                    raise TooManyKeysError(
                        "bucket has more keys than this process may list. Use Spark"
                    )

    def count(self, part: _Part) -> _Part:
        """Yield the rows and count them. Raises `TooManyKeysError`."""
        for rows in part:
            self.take(rows.num_rows)
            yield rows

    def end(self) -> None:
        """Abort all shards."""
        self._has_ended = True


@contextmanager
def _abort_on_signal(pool: ThreadPoolExecutor, budget: _Budget) -> Iterator[None]:
    """Abort all shards if a signal interrupts the block, because the pool waits for them."""
    try:
        yield
    except BaseException:
        budget.end()
        # Leaving the pool's block would wait for hours of listing.
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _write_parts(parts: Sequence[_Part], budget: _Budget, listing: Path, at_once: int) -> int:
    """Write each part of a listing to a separate file, and return the number of rows.

    If a key occurs more than once, all files are rewritten with one row per key.
    """
    listing.mkdir()
    with tempfile.TemporaryFile(dir=listing.parent, buffering=0) as scratch:
        keys = KeyNumbers(scratch)
        with ThreadPoolExecutor(at_once) as pool, _abort_on_signal(pool, budget):
            under_way = [
                pool.submit(_write_part, rows, path, budget, keys)
                for number, rows in enumerate(parts)
                for path in [listing / f"part-{number:05d}.parquet"]
            ]
            failures = [error for future in under_way if (error := future.exception()) is not None]
        return_memory()
        if failures:
            # The other shards were aborted because of this one.
            raise next(error for error in failures if not isinstance(error, _EndedError))
        may_repeat = keys.may_repeat()

    if may_repeat:
        keep_one_row_a_key(listing)

    return_memory()
    return sum(future.result() for future in under_way)


def _write_part(part: _Part, path: Path, budget: _Budget, keys: KeyNumbers) -> int:
    total = 0
    try:
        with closing(part), tables.table_writer(path, tables.LISTING_COLUMNS) as writer:
            for rows in tables.gather_batches(budget.count(part), tables.ROWS_A_GROUP):
                writer.write_batch(rows)
                # After the write, so that a failed part does not count.
                keys.add(rows)
                total += rows.num_rows
    except BaseException:
        budget.end()
        raise
    return total


def _sorted_candidates(folder: Path) -> Iterator[pa.RecordBatch]:
    """Yield the candidates in batches of at most one request.

    They are in key order, so that neighbours are looked up together. Of very many candidates, each
    run that fits memory is sorted separately.
    """
    schema = tables.arrow_schema(tables.CANDIDATE_COLUMNS)
    batches = tables.read_batches(folder, tables.CANDIDATE_COLUMNS)
    while run := list(_first_rows(batches, _ROWS_SORTED)):
        table = pa.Table.from_batches(run, schema=schema).sort_by("key")
        yield from table.to_batches(max_chunksize=run_signals.LARGEST_BATCH)


def _first_rows(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the next batches until they have `rows` rows in total."""
    while rows > 0 and (batch := next(batches, None)) is not None:
        rows -= batch.num_rows
        yield batch
