"""Reconciliation in the process itself: no JVM, for buckets of up to some millions of keys.

Shards are listed by a few threads. The join keeps the map in memory, 48 bytes an object, and reads
the listing batch by batch; nothing else grows with the bucket. Deletion is one task.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from streammeta.reconcile import plan_folder
from streammeta.reconcile.deletion import carry_out
from streammeta.reconcile.deletion_order import DeletionOrder
from streammeta.reconcile.engine import EngineName
from streammeta.reconcile.errors import ReconcileError
from streammeta.reconcile.listing import Shard, listed_rows
from streammeta.reconcile.tables import (
    CANDIDATE_COLUMNS,
    LISTING_COLUMNS,
    MAP_COLUMNS,
    OUTCOME_COLUMNS,
    VERDICT_COLUMNS,
    Counts,
    Tally,
    arrow_schema,
    read_batches,
)
from streammeta.reconcile.verdict_rows import judged_rows
from streammeta.reconcile.verdicts import ABSENT, Int64Column, Owner, Rules, Verdict
from streammeta.storage.object_store.address import open_object_store
from streammeta.storage.object_store.base import ObjectStore

_LISTINGS_AT_ONCE = 8
_ROWS_A_BATCH = 20_000


class TooManyKeysError(ReconcileError):
    """The bucket has more keys than the engine was to list."""


class _EndedError(Exception):
    """Another shard has failed, so this one is given up."""


class LocalEngine:
    """See `Engine`. With `most_keys` a larger bucket is refused as soon as that is known."""

    name = EngineName.LOCAL

    def __init__(self, most_keys: int | None = None) -> None:
        self._most_keys = most_keys

    def list_bucket(self, uri: str, namespace: str, shards: Sequence[Shard], listing: Path) -> int:
        """See `Engine.list_bucket`. Raises `TooManyKeysError`."""
        listing.mkdir()
        budget = _Budget(self._most_keys)
        with (
            closing(open_object_store(uri)) as store,
            ThreadPoolExecutor(_LISTINGS_AT_ONCE) as pool,
        ):
            under_way = [
                pool.submit(_write_shard, store, shard, namespace, path, budget)
                for number, shard in enumerate(shards)
                for path in [listing / f"shard-{number:05d}.parquet"]
            ]
            failures = [error for one in under_way if (error := one.exception()) is not None]
        if failures:
            raise next(error for error in failures if not isinstance(error, _EndedError))
        return sum(one.result() for one in under_way)

    def count_owners(self, listing: Path) -> Mapping[Owner, Tally]:
        """See `Engine.count_owners`."""
        counts = Counts("owner")
        for batch in read_batches(listing, LISTING_COLUMNS):
            counts.add(batch)
        return {Owner(owner): tally for owner, tally in counts.tallies().items()}

    def judge(self, draft: Path, rules: Rules, namespace: str) -> Mapping[Verdict, Tally]:
        """See `Engine.judge`."""
        counts = Counts("verdict")
        with ExitStack() as stack:
            verdicts = stack.enter_context(_writer(draft / plan_folder.VERDICTS, VERDICT_COLUMNS))
            candidates = stack.enter_context(
                _writer(draft / plan_folder.CANDIDATES, CANDIDATE_COLUMNS)
            )
            for joined in _joined(draft):
                rows = judged_rows(joined, rules, namespace)
                orphans = pc.equal(rows.column("verdict"), str(Verdict.ORPHAN))
                verdicts.write_batch(rows)
                candidates.write_batch(
                    rows.filter(orphans).select(arrow_schema(CANDIDATE_COLUMNS).names)
                )
                counts.add(rows)
        return {Verdict(verdict): tally for verdict, tally in counts.tallies().items()}

    def delete(self, order: DeletionOrder, candidates: Path, outcomes: Path) -> None:
        """See `Engine.delete`. The outcomes of a batch are on disk before the next is begun."""
        outcomes.mkdir(parents=True)
        schema = arrow_schema(OUTCOME_COLUMNS)
        for number, rows in enumerate(carry_out(order, "00000", _sorted_candidates(candidates))):
            with pq.ParquetWriter(outcomes / f"part-{number:06d}.parquet", schema) as writer:
                writer.write_batch(rows)


class _Budget:
    """The number of keys that all shards together may still list; none once it has ended."""

    def __init__(self, keys: int | None) -> None:
        self._left = keys
        self._has_ended = False
        self._lock = threading.Lock()

    def take(self, keys: int) -> None:
        """Count keys. Raises `TooManyKeysError` when there are more than there may be."""
        with self._lock:
            if self._has_ended:
                raise _EndedError("another shard failed")
            if self._left is not None:
                self._left -= keys
                if self._left < 0:
                    raise TooManyKeysError("the bucket has more keys than may be listed here")

    def end(self) -> None:
        """Have all shards give up."""
        self._has_ended = True


def _write_shard(
    store: ObjectStore, shard: Shard, namespace: str, path: Path, budget: _Budget
) -> int:
    total = 0
    try:
        with pq.ParquetWriter(path, arrow_schema(LISTING_COLUMNS)) as writer:
            for rows in listed_rows(store, shard, namespace):
                budget.take(rows.num_rows)
                writer.write_batch(rows)
                total += rows.num_rows
    except BaseException:
        budget.end()
        raise
    return total


@contextmanager
def _writer(folder: Path, columns: str) -> Iterator[pq.ParquetWriter]:
    """Give a writer of a table's only file."""
    folder.mkdir()
    with pq.ParquetWriter(folder / "part-00000.parquet", arrow_schema(columns)) as writer:
        yield writer


class MapJoin:
    """The objects of the map by id, in memory, and those of them that were met in the bucket."""

    def __init__(self, folder: Path) -> None:
        table = pa.Table.from_batches(
            read_batches(folder, MAP_COLUMNS), schema=arrow_schema(MAP_COLUMNS)
        )
        columns = {name: table.column(name).to_numpy() for name in table.column_names}
        order = np.argsort(columns["object_id"], kind="stable")
        self._columns: dict[str, Int64Column] = {
            name: values[order] for name, values in columns.items()
        }
        self._ids = self._columns.pop("object_id")
        self._is_met = np.zeros(len(self._ids), dtype=np.bool_)

    def join(self, listed: pa.RecordBatch) -> pa.RecordBatch:
        """Add to rows of the listing what the map has of them."""
        is_own = np.asarray(listed.column("owner")) == Owner.OWN
        ids: Int64Column = listed.column("object_id").fill_null(ABSENT).to_numpy()
        at = np.searchsorted(self._ids, ids)
        inside = np.flatnonzero(is_own & (at < len(self._ids)))
        known = inside[self._ids[at[inside]] == ids[inside]]
        self._is_met[at[known]] = True
        joined = listed
        for name, values in self._columns.items():
            column = np.full(len(ids), ABSENT, dtype=np.int64)
            column[known] = values[at[known]]
            is_absent = np.ones(len(ids), dtype=np.bool_)
            is_absent[known] = False
            joined = joined.append_column(name, pa.array(column, mask=is_absent))
        return joined

    def unmet(self) -> Iterator[pa.RecordBatch]:
        """The objects that no key of the listing belongs to, as joined rows."""
        rest = np.flatnonzero(~self._is_met)
        for first in range(0, len(rest), _ROWS_A_BATCH):
            part = rest[first : first + _ROWS_A_BATCH]
            values = {"object_id": self._ids[part]}
            values |= {name: column[part] for name, column in self._columns.items()}
            nothing = {
                field.name: pa.nulls(len(part), field.type)
                for field in arrow_schema(LISTING_COLUMNS)
                if field.name != "object_id"
            }
            yield pa.RecordBatch.from_pydict(nothing | values)


def _joined(draft: Path) -> Iterator[pa.RecordBatch]:
    """Keys with what the map knows of them, then objects of the map without a key."""
    of_map = MapJoin(draft / plan_folder.MAP)
    for listed in read_batches(draft / plan_folder.LISTING, LISTING_COLUMNS):
        yield of_map.join(listed)
    yield from of_map.unmet()


def _sorted_candidates(folder: Path) -> Iterator[pa.RecordBatch]:
    """The candidates in the order of keys, in which neighbours are looked up together."""
    batches = read_batches(folder, CANDIDATE_COLUMNS)
    table = pa.Table.from_batches(batches, schema=arrow_schema(CANDIDATE_COLUMNS))
    yield from table.sort_by("key").to_batches(max_chunksize=_ROWS_A_BATCH)
