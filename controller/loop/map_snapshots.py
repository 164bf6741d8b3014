"""The map as a checkpoint file, and back. Both take long and belong in a thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from controller.loop.state_machine import SnapshotPoint
from controller.metadata.cluster_map import ClusterMap
from controller.metadata.frozen import FrozenMap
from controller.quorum.messages import SnapshotId
from controller.snapshot.format import CheckpointError, CheckpointId
from controller.snapshot.reader import CheckpointReader
from controller.snapshot.voters import VOTERS_SECTION, voters_section
from controller.snapshot.writer import Sink, write_checkpoint


@dataclass(frozen=True, slots=True)
class FrozenCheckpoint:
    """A view of the map with all that a checkpoint says besides; not yet a file."""

    point: SnapshotPoint
    view: FrozenMap

    @property
    def id(self) -> SnapshotId:
        """Return which checkpoint this is."""
        return self.point.snapshot_id

    def write(self, sink: Sink) -> int:
        """Write the whole file; return its size in bytes."""
        return write_checkpoint(
            sink,
            CheckpointId(self.id.end_offset, self.id.epoch),
            self.point.cluster_id,
            _Sections(self),
        )


class _Sections(Mapping[str, Any]):
    """The voters, then what the map has, each computed when it is asked for."""

    def __init__(self, frozen: FrozenCheckpoint) -> None:
        self._voters = frozen.point.voters
        self._map = frozen.view.sections()

    def __getitem__(self, name: str) -> Any:
        return voters_section(self._voters) if name == VOTERS_SECTION else self._map[name]

    def __iter__(self) -> Iterator[str]:
        yield VOTERS_SECTION
        yield from self._map

    def __len__(self) -> int:
        return 1 + len(self._map)


def read_map(file: BinaryIO, snapshot_id: SnapshotId) -> ClusterMap:
    """Return the map that a checkpoint file holds.

    Raises:
        CheckpointError: the file is damaged, or another checkpoint.
    """
    wanted = CheckpointId(snapshot_id.end_offset, snapshot_id.epoch)
    reader = CheckpointReader(file, wanted.file_name)
    if reader.id != wanted:
        raise CheckpointError(
            f"the file says it is {reader.id.file_name}, wanted is {wanted.file_name}"
        )
    return ClusterMap.from_sections(reader.sections(), snapshot_id.end_offset)
