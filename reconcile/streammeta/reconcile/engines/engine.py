"""Engines of reconciliation: the process itself, or Spark.

Both do the same work on the same files: list the bucket, judge every key, delete candidates. They
have the ladder of verdicts, the rows of the report and the checks of a deletion in common; each
owns only the ways in which rows are spread, joined and counted.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from streammeta.reconcile.deletion.order import DeletionOrder
from streammeta.reconcile.listing.inventory import Inventory
from streammeta.reconcile.listing.shards import Shard
from streammeta.reconcile.vocabulary.tables import Tally
from streammeta.reconcile.vocabulary.verdicts import Owner, Rules, Verdict


class EngineName(enum.StrEnum):
    """Choice of an engine."""

    AUTO = "auto"
    LOCAL = "local"
    SPARK = "spark"


class Engine(Protocol):
    """The work on tables. Paths are folders of Parquet files; those written must not exist.

    All calls raise `ReconcileError` or `StorageError`.
    """

    @property
    def name(self) -> EngineName:
        """The engine that works: never `AUTO`."""
        ...

    def list_bucket(self, uri: str, namespace: str, shards: Sequence[Shard], listing: Path) -> int:
        """Write every key of the bucket with its owner; returns the number of rows listed."""
        ...

    def list_inventory(self, inventory: Inventory, namespace: str, listing: Path) -> int:
        """Write the rows of an inventory with their owners; returns the number of rows read."""
        ...

    def count_owners(self, listing: Path) -> Mapping[Owner, Tally]:
        """Count the keys and bytes of a listing by owner; each key once, as `judge` does."""
        ...

    def judge(self, draft: Path, rules: Rules, namespace: str) -> Mapping[Verdict, Tally]:
        """Join listing and map of a draft; write verdicts and candidates; count by verdict.

        Of several rows of a key one is judged, see `repeated_keys`.
        """
        ...

    def delete(self, order: DeletionOrder, candidates: Path, outcomes: Path) -> None:
        """Carry out an order on candidates, at the order's rate in all; write their outcomes."""
        ...
