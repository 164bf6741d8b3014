"""Protocol of reconcile engines: this process, or Spark.

Both do the same work on the same files: list the bucket, compute verdicts, delete candidates. They
share the verdict rules, the rows of the report and the checks of a deletion. Each owns only the
distribution, the join and the counting of rows.
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
from streammeta.storage.object_store.protocol.address import StoreAddress


class EngineName(enum.StrEnum):
    """Choice of an engine."""

    AUTO = "auto"
    LOCAL = "local"
    SPARK = "spark"


class Engine(Protocol):
    """Work on tables. Paths are folders of Parquet files, and output folders must not exist.

    All calls raise `ReconcileError` or `StorageError`.
    """

    @property
    def name(self) -> EngineName:
        """The working engine, never `AUTO`."""
        ...

    def list_bucket(
        self, address: StoreAddress, namespace: str, shards: Sequence[Shard], listing: Path
    ) -> int:
        """Write every key of the bucket with its owner, and return the number of rows."""
        ...

    def list_inventory(self, inventory: Inventory, namespace: str, listing: Path) -> int:
        """Write the rows of an inventory with their owners, and return the number of rows."""
        ...

    def count_owners(self, listing: Path) -> Mapping[Owner, Tally]:
        """Count the keys and bytes of a listing by owner, each key once."""
        ...

    def judge(self, draft: Path, rules: Rules, namespace: str) -> Mapping[Verdict, Tally]:
        """Join a draft's listing and metadata, write verdicts and candidates, and count verdicts.

        One of several rows of a key counts, see `repeated_keys`.
        """
        ...

    def delete(self, order: DeletionOrder, candidates: Path, outcomes: Path) -> None:
        """Carry out an order on candidates, at the order's total rate, and write their outcomes."""
        ...
