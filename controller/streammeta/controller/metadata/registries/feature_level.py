"""Replicated feature level, at most the highest that this version supports.

It is lowered only if no level in between changed the format of log or checkpoints.
"""

from __future__ import annotations

from streammeta.controller.errors import FeatureLevelError, InvariantError, NewerLogError
from streammeta.controller.features import BASE_LEVEL, SUPPORTED, data_changes
from streammeta.controller.metadata.api.answers import SetFeatureLevelAnswer
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
            raise FeatureLevelError(
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
            raise InvariantError(
                f"record sets feature level {record.level}, but it is {self._current}"
            )
        if not self._levels.include(record.level):
            raise NewerLogError(
                f"the cluster is at feature level {record.level}, and this version runs at "
                f"{self._levels}: start a version that runs at level {record.level}"
            )
        undo.assign(self, "_current", record.level)
