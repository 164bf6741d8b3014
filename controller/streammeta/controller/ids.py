"""Identifiers: types for integers and strings that must not be confused, and snapshot ids.

An offset of the quorum's log is never an offset of a stream, and an exclusive end is never the last
offset before it. The type checker keeps them apart where these types are used.
"""

from dataclasses import dataclass
from typing import NewType

NodeId = NewType("NodeId", int)
"""Id of a controller or broker, >= 0. Ids issued to brokers start at 1000."""

Epoch = NewType("Epoch", int)
"""A quorum epoch (Raft's term). 0 is the initial epoch and never has a leader."""

EndOffset = NewType("EndOffset", int)
"""An exclusive end in the quorum's log, for everything below it."""

ClusterId = NewType("ClusterId", str)
"""A cluster's name, fixed at creation: letters, digits, `-` and `_`, at most 64."""

DirectoryId = NewType("DirectoryId", str)
"""A UUID stored in a controller's data directory. It identifies the disk, not the node."""

NONE_ID = -1
"""Represents "no object", "no stream" and "no node" in ids and on the wire."""


@dataclass(frozen=True, slots=True, order=True)
class SnapshotId:
    """Id of a snapshot of everything below `end_offset`. The last batch below it has `epoch`.

    The end is exclusive, as all ends are (KAFKA-14618 confused the two).
    """

    end_offset: EndOffset
    epoch: Epoch

    @property
    def file_name(self) -> str:
        """Name of the snapshot's checkpoint file."""
        return f"{self.end_offset:020}-{self.epoch:010}.checkpoint"
