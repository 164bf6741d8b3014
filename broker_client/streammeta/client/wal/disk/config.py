"""Configuration of a write-ahead log: its limits and its owner."""

from __future__ import annotations

from dataclasses import dataclass

from streammeta.client.arguments import INT32_MAX, at_least, check_fields, check_int, check_text

_MIB = 1024 * 1024

MAX_NAMESPACE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Sizes in bytes."""

    max_bytes: int = 1024 * _MIB  # of all segments, and of the records that wait for them
    segment_bytes: int = 64 * _MIB  # a segment of this size is followed by a new one
    group_bytes: int = 1 * _MIB  # of records in one frame; one larger record has its own
    max_unflushed_bytes: int = 32 * _MIB  # appended and not yet on the disk

    def __post_init__(self) -> None:
        """Reject contradictory limits."""
        check_fields(self, {"group_bytes": at_least(1, 1024 * _MIB)})
        # One segment is written while the other waits for its trim.
        if self.max_bytes < 2 * self.segment_bytes:
            raise ValueError(
                f"max_bytes is {self.max_bytes}, expected at least twice segment_bytes,"
                f" {self.segment_bytes}: only whole segments are removed"
            )


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """Owner of a log: a process of a node, and the `namespace` of the cluster's objects.

    The namespace and node of a log never change. `node_epoch` grows from process to process.
    """

    namespace: str
    node_id: int
    node_epoch: int

    def __post_init__(self) -> None:
        """Reject values that do not fit into a file header."""
        check_text("namespace", self.namespace, "the cluster's namespace, `session.namespace`")
        check_int("node_id", self.node_id, 0, INT32_MAX)
        check_int("node_epoch", self.node_epoch)
        if len(self.namespace.encode()) > MAX_NAMESPACE_BYTES:
            raise ValueError(f"namespace is longer than {MAX_NAMESPACE_BYTES} bytes")
