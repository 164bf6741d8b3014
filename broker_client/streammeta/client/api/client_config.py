"""Configuration of a `StreamClient` and of its parts."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from streammeta.client.api.background_compaction import INTERVAL_S
from streammeta.client.arguments import check_seconds
from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.config import ReaderConfig, WriterConfig
from streammeta.client.controllers.controller_client import DEFAULT_DEADLINE_S
from streammeta.client.wal.bucket.config import ObjectLogConfig
from streammeta.client.wal.disk.config import LogConfig


@dataclass(frozen=True, slots=True)
class StreamClientConfig:
    """Configurations of the parts, None for the defaults of a part.

    `deadline_s` limits a call to the controllers, in seconds. With a `wal_directory` the writer
    acknowledges appends from a write-ahead log there (`durability="wal"`), with an `object_log`
    from a log in the bucket, which other brokers recover if this one is lost. A node's session ends
    after `session_timeout_s` seconds of silence, at least 2, or 0 for the controllers' default.

    A client with a node compacts every `compaction_interval_s` seconds, never with None.
    `network_rate` limits its traffic with the bucket, in bytes per second and direction, 0: no
    limit. Uploads come before reads, and reads before compaction.

    A process without the log that its node has registered is rejected while the node has open
    streams. With `allow_missing_log` it starts, and the records of a log that returns later are set
    aside.
    """

    deadline_s: float = DEFAULT_DEADLINE_S
    writer: WriterConfig | None = None
    reader: ReaderConfig | None = None
    wal_directory: str | os.PathLike[str] | None = None
    wal: LogConfig | None = None
    object_log: ObjectLogConfig | None = None
    compaction: CompactionConfig | None = None
    compaction_interval_s: float | None = INTERVAL_S
    network_rate: float = 0.0
    session_timeout_s: float = 0.0
    allow_missing_log: bool = False

    def __post_init__(self) -> None:
        """Reject two logs, and numbers without a meaning."""
        if self.compaction_interval_s is not None:
            check_seconds("compaction_interval_s", self.compaction_interval_s)
        if not 0 <= self.network_rate < math.inf:
            raise ValueError(f"network_rate is {self.network_rate}, expected bytes a second, or 0")
        if self.wal_directory is not None and self.object_log is not None:
            raise ValueError("wal_directory and object_log are both given, expected at most one")

    def check_node(self, node_id: int | None) -> None:
        """Raise `ValueError` for a write-ahead log without a node id."""
        if node_id is None and self.has_log:
            name = "wal_directory" if self.object_log is None else "object_log"
            raise ValueError(f"{name} needs a node_id: a write-ahead log belongs to a node")

    @property
    def has_log(self) -> bool:
        """True if appends are acknowledged from a write-ahead log."""
        return self.wal_directory is not None or self.object_log is not None
