"""Modes of the whole cluster: its feature level, and recovery after a restore.

The level is at most the highest that this version supports. It is lowered only if no level in
between changed the format of log or checkpoints.

Recovery mode is the behaviour of a restored cluster until the bucket's objects are adopted.
Restored metadata ends where its backup does, but brokers continued to write. Until their later
objects are adopted, an append at a restored end would issue offsets a second time. Changes by
brokers and compactors are therefore rejected. Nodes may register, and the leader's own work
continues.
"""

from __future__ import annotations

from streammeta.controller import errors
from streammeta.controller.features import BASE_LEVEL, SUPPORTED, data_changes
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.answers import FinishRestoreAnswer, SetFeatureLevelAnswer
from streammeta.controller.metadata.api.requests import SetFeatureLevel
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.records import record as rec


class FeatureLevel:
    """The cluster's feature level, see `features`."""

    def __init__(self) -> None:
        self._current = BASE_LEVEL
        self._levels = SUPPORTED

    @property
    def current(self) -> int:
        """The cluster's level."""
        return self._current

    def require(self, level: int, what: str) -> None:
        """Require a feature level for `what`, the subject of a request.

        Raises:
            FeatureLevelError: the cluster is below it.
        """
        if self._current < level:
            raise errors.FeatureLevelError(
                level,
                f"{what} need feature level {level}, and the cluster is at {self._current}: raise "
                "it once all controllers run this version (streammeta features upgrade)",
            )

    def load(self, level: int) -> None:
        """Set the level of empty metadata."""
        self._current = level

    def decide(
        self, request: SetFeatureLevel
    ) -> tuple[rec.FeatureLevelSet | None, SetFeatureLevelAnswer]:
        """Set the level. Returns no record if it is unchanged or cannot be lowered that far."""
        before = self._current
        if request.level == before or data_changes(request.level, before):
            return None, SetFeatureLevelAnswer(before=before, level=before)
        record = rec.FeatureLevelSet(level=request.level)
        return record, SetFeatureLevelAnswer(before=before, level=request.level)

    def replay(self, record: rec.FeatureLevelSet, undo: Undo) -> None:
        """Replay `FeatureLevelSet`.

        Raises:
            InvariantError: the level does not change, or the change is not allowed.
            NewerLogError: this version does not support it.
        """
        if record.level == self._current or data_changes(record.level, self._current):
            raise errors.InvariantError(
                f"record sets feature level {record.level}, but it is {self._current}"
            )
        if not self._levels.include(record.level):
            raise errors.NewerLogError(
                f"the cluster is at feature level {record.level}, and this version runs at "
                f"{self._levels}: start a version that runs at level {record.level}"
            )
        undo.assign(self, "_current", record.level)


ALLOWED: frozenset[type[requests.WriteRequest]] = frozenset(
    (
        requests.AdoptObjects,
        requests.FinishRestore,
        # Nodes may prepare, and adopted objects will belong to them.
        requests.RegisterNode,
        requests.GetNextNodeId,
        requests.SetNodeLock,
        requests.SuperviseNode,
        requests.AssignRecoveries,
        # The leader's upkeep never destroys data that a restored stream still needs.
        requests.ClaimBucket,
        requests.HoldDeletions,
        requests.ExpireObjects,
        requests.ExpireProducers,
        requests.RemoveObjects,
        requests.SweepDeletedStreams,
        requests.DestroyDeadStreamSetObjects,
        requests.SetFeatureLevel,
    )
)
"""Mutations accepted in recovery mode."""


class Recovery:
    """The ids that a restore left undecided, while recovery mode lasts."""

    def __init__(self) -> None:
        self._undecided: tuple[int, int] | None = None

    @property
    def undecided(self) -> tuple[int, int] | None:
        """First id and upper bound. None unless in recovery mode."""
        return self._undecided

    def load(self, undecided_from: int, undecided_below: int) -> None:
        """Set the undecided ids of empty metadata."""
        self._undecided = (undecided_from, undecided_below)

    def holds(self, object_id: int) -> bool:
        """Return whether an id is undecided."""
        if self._undecided is None:
            return False
        first, below = self._undecided
        return first <= object_id < below

    def require_allowed(self, request: requests.WriteRequest) -> None:
        """Require that a mutation is accepted in the present mode.

        Raises:
            RecoveringError: it must wait for the end of recovery mode.
        """
        if self._undecided is not None and type(request) not in ALLOWED:
            raise errors.RecoveringError

    def decide_finish(
        self, _request: requests.FinishRestore
    ) -> tuple[rec.RestoreFinished | None, FinishRestoreAnswer]:
        """End recovery mode. Returns no record if it is over."""
        if self._undecided is None:
            return None, FinishRestoreAnswer(was_recovering=False)
        _, below = self._undecided
        return rec.RestoreFinished(undecided_below=below), FinishRestoreAnswer(was_recovering=True)

    def replay_finished(self, record: rec.RestoreFinished, undo: Undo) -> None:
        """Replay `RestoreFinished`.

        Raises:
            InvariantError: the metadata is not in recovery mode, or another restore began it.
        """
        below = None if self._undecided is None else self._undecided[1]
        if record.undecided_below != below:
            raise errors.InvariantError(
                f"record ends a recovery below {record.undecided_below}, but it is below {below}"
            )
        undo.assign(self, "_undecided", None)
