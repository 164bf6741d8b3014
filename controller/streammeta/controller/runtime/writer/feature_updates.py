"""Changes of the cluster's feature level, and the checks before them and before new voters.

These checks compare the versions of connected controllers. The metadata only compares levels.
"""

from __future__ import annotations

from streammeta.controller.errors import FeatureLevelError, InvalidRequestError
from streammeta.controller.features import BASE_LEVEL, data_changes
from streammeta.controller.ids import NodeId
from streammeta.controller.metadata.api.answers import SetFeatureLevelAnswer
from streammeta.controller.metadata.api.requests import SetFeatureLevel
from streammeta.controller.runtime.replication.peer_versions import PeerVersions
from streammeta.controller.runtime.replication.quorum_driver import QuorumDriver
from streammeta.controller.runtime.writer.controller import Answered, MetadataController


class FeatureUpdates:
    """Changes the level on behalf of operators."""

    def __init__(
        self, driver: QuorumDriver, controller: MetadataController, versions: PeerVersions
    ) -> None:
        self._driver = driver
        self._controller = controller
        self.versions = versions

    @property
    def level(self) -> int:
        """The level of this controller's metadata."""
        return self._controller.cluster_metadata.feature_level

    async def update(self, level: int, *, is_lower: bool, dry_run: bool) -> Answered:
        """Set the level, if all controllers can run at it. With `dry_run` only check that.

        The current level is answered and changes nothing. `is_lower` states that a lower level is
        wanted, and then only a lower one is accepted.

        Raises:
            InvalidRequestError: `level` is invalid.
            NotLeaderError: this node does not lead.
            FeatureLevelError: a controller can't run at the level, the direction is wrong, or a
                level in between has changed data.
        """
        if level < BASE_LEVEL:
            raise InvalidRequestError("level", f"{level}, must be at least {BASE_LEVEL}")
        # Proves leadership: a former leader would compare with an outdated level.
        offset = await self._driver.read_barrier()
        before = self.level
        if level != before:
            _check_direction(before, level, is_lower=is_lower)
            # After the direction, whose error does not depend on who is connected.
            self._check_versions(level)
        if dry_run:
            return Answered(SetFeatureLevelAnswer(before=before, level=level), offset)
        return await self._controller.write(SetFeatureLevel(level=level))

    def check_voter(self, node_id: NodeId) -> None:
        """Check that a replica which is to become a voter can run at the current level.

        The quorum itself rejects a replica that is not connected, because it does not fetch.

        Raises:
            FeatureLevelError: the replica can't run at the level.
        """
        software = self.versions.of(node_id)
        # An unknown one cannot be compared here.
        if software is not None and not software.levels.include(self.level):
            raise FeatureLevelError(
                self.level,
                f"controller {node_id} runs {software}, but the cluster is at level {self.level}: "
                "upgrade it first",
                [node_id],
            )

    def _check_versions(self, level: int) -> None:
        voters = [voter.key.node_id for voter in self._driver.describe().voters]
        blocking = self.versions.blocking(level, voters)
        if blocking:
            reasons = ", ".join(f"controller {node} {why}" for node, why in blocking.items())
            raise FeatureLevelError(
                level,
                f"not every controller can run at level {level}: {reasons}",
                list(blocking),
            )


def _check_direction(before: int, level: int, *, is_lower: bool) -> None:
    if is_lower and level > before:
        raise FeatureLevelError(level, f"level {level} is not below the current level {before}")
    if not is_lower and level < before:
        raise FeatureLevelError(level, f"level {level} is below the current level {before}")
    # Lowering is safe only while nothing of the higher level was written.
    if changes := data_changes(level, before):
        names = ", ".join(map(str, changes))
        raise FeatureLevelError(
            level,
            f"the log and checkpoints may contain data of level {names}, which versions at level "
            f"{level} can't read: the level stays {before}",
        )
