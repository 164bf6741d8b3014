"""Identifiers: names for the integers and strings that must not be mixed up, and snapshot ids.

An offset of the quorum's log is never an offset of a stream, and an exclusive end is never the
last offset it contains; the type checker keeps them apart where these names are used.
"""

from dataclasses import dataclass
from typing import NewType

NodeId = NewType("NodeId", int)
"""A controller's or broker's id, >= 0. Brokers issued by the controller start at 1000."""

Epoch = NewType("Epoch", int)
"""A quorum epoch (Raft's term). 0 is primordial and never has a leader."""

EndOffset = NewType("EndOffset", int)
"""An exclusive end in the quorum's log: everything below it is meant."""

ClusterId = NewType("ClusterId", str)
"""A cluster's name, fixed when it is created; letters, digits, `-` and `_`, at most 64."""

DirectoryId = NewType("DirectoryId", str)
"""A UUID stored in a controller's data directory: the identity of the disk, not the node."""

NONE_ID = -1
"""Stands for "no object", "no stream" and "no node" in ids and on the wire."""


@dataclass(frozen=True, slots=True, order=True)
class SnapshotId:
    """A snapshot holds everything below `end_offset`, where a batch ends; its last is of `epoch`.

    The end is exclusive, as all ends are (KAFKA-14618 was a mix-up of the two).
    """

    end_offset: EndOffset
    epoch: Epoch

    @property
    def file_name(self) -> str:
        """Name of the snapshot's checkpoint file."""
        return f"{self.end_offset:020}-{self.epoch:010}.checkpoint"
