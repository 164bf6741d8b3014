"""Recovery mode: what a restored cluster answers until the bucket's objects are adopted.

The map of a backup ends where the backup does; brokers went on. Until the objects that they wrote
since are in the map, an append at a restored end would issue offsets a second time. So all that
brokers and compactors change waits; nodes may register, and the leader's own work goes on.
"""

from __future__ import annotations

from streammeta.controller.errors import InvariantError, RecoveringError
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.answers import FinishRestoreAnswer
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.records import record as rec

ALLOWED: frozenset[type[requests.WriteRequest]] = frozenset(
    (
        requests.AdoptObjects,
        requests.FinishRestore,
        # Nodes get ready, and adopted objects are theirs.
        requests.RegisterNode,
        requests.GetNextNodeId,
        requests.SetNodeLock,
        requests.SuperviseNode,
        requests.AssignRecoveries,
        # The leader's upkeep: it destroys nothing that a stream of the map still needs.
        requests.ClaimBucket,
        requests.HoldDeletions,
        requests.ExpireObjects,
        requests.RemoveObjects,
        requests.SweepDeletedStreams,
        requests.DestroyDeadSetObjects,
        requests.SetFeatureLevel,
    )
)
"""Mutations that recovery mode does not refuse."""


class Recovery:
    """The ids that a restore has left undecided, as long as recovery mode lasts."""

    def __init__(self) -> None:
        self._undecided: tuple[int, int] | None = None

    @property
    def undecided(self) -> tuple[int, int] | None:
        """First id and upper bound; None unless in recovery mode."""
        return self._undecided

    def load(self, undecided_from: int, undecided_below: int) -> None:
        """Set the undecided ids of an empty map."""
        self._undecided = (undecided_from, undecided_below)

    def holds(self, object_id: int) -> bool:
        """Return whether an id is among the undecided ones."""
        if self._undecided is None:
            return False
        first, below = self._undecided
        return first <= object_id < below

    def require_allowed(self, request: requests.WriteRequest) -> None:
        """Require that a mutation need not wait for the end of recovery mode.

        Raises:
            RecoveringError: it has to.
        """
        if self._undecided is not None and type(request) not in ALLOWED:
            raise RecoveringError

    def decide_finish(
        self, _request: requests.FinishRestore
    ) -> tuple[rec.RestoreFinished | None, FinishRestoreAnswer]:
        """End recovery mode; no record if it is over."""
        if self._undecided is None:
            return None, FinishRestoreAnswer(was_recovering=False)
        _, below = self._undecided
        return rec.RestoreFinished(undecided_below=below), FinishRestoreAnswer(was_recovering=True)

    def replay_finished(self, record: rec.RestoreFinished, undo: Undo) -> None:
        """See `RestoreFinished`.

        Raises:
            InvariantError: the map is not in recovery mode, or in that of another restore.
        """
        below = None if self._undecided is None else self._undecided[1]
        if record.undecided_below != below:
            raise InvariantError(
                f"record ends a recovery below {record.undecided_below}, but the map's is {below}"
            )
        undo.assign(self, "_undecided", None)
