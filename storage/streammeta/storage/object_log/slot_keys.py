"""Keys of write-ahead logs in a bucket.

A process of a node has one log, `<namespace>/wal/<node id>/<node epoch>/`. Ids and epochs are
decimal numbers of fixed width, so that a listing has logs in their order. A log contains slots,
`<sequence>` in 16 hex digits, and possibly the marks `recovered` and `swept`. Records that cannot
be committed are kept under `<namespace>/wal/<node id>/aside/`. All keys lie under the namespace,
where no object's key begins (see `object_key`). Parsing is strict: a key that this module would not
have written belongs to no log.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from streammeta.storage.object_format.record import INT64_MAX

_NODE_DIGITS = 10
_EPOCH_DIGITS = 19
_ASIDE = "aside"
_RECOVERED = "recovered"
_SWEPT = "swept"
_NODE = re.compile(r"[0-9]{10}", re.ASCII)
_EPOCH = re.compile(r"[0-9]{19}", re.ASCII)
_SEQUENCE = re.compile(r"[0-9a-f]{16}", re.ASCII)
_ASIDE_NAME = re.compile(r"[0-9]{19}-[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LogName:
    """Log of the process `node_epoch` of a node."""

    namespace: str
    node_id: int
    node_epoch: int

    @property
    def prefix(self) -> str:
        """Prefix of all keys of the log."""
        return f"{node_prefix(self.namespace, self.node_id)}{self.node_epoch:0{_EPOCH_DIGITS}}/"

    def slot_key(self, sequence: int) -> str:
        """Return the key of a slot."""
        return f"{self.prefix}{sequence:016x}"

    @property
    def recovered_key(self) -> str:
        """Key of the mark that the log is no longer needed."""
        return f"{self.prefix}{_RECOVERED}"

    @property
    def swept_key(self) -> str:
        """Key of the mark that this log and all earlier logs of the node were swept."""
        return f"{self.prefix}{_SWEPT}"

    def aside_key(self, token: str) -> str:
        """Return the key of a file of records set aside. `token` has 32 hex digits."""
        node = node_prefix(self.namespace, self.node_id)
        return f"{node}{_ASIDE}/{self.node_epoch:0{_EPOCH_DIGITS}}-{token}"


@dataclass(frozen=True, slots=True)
class SlotKey:
    """Key of a slot."""

    log: LogName
    sequence: int


@dataclass(frozen=True, slots=True)
class RecoveredKey:
    """Key of the mark that a log is no longer needed."""

    log: LogName


@dataclass(frozen=True, slots=True)
class SweptKey:
    """Key of the mark that a log and all earlier logs of its node were swept."""

    log: LogName


@dataclass(frozen=True, slots=True)
class AsideKey:
    """Key of a file of records set aside."""

    node_id: int


LogKey: TypeAlias = SlotKey | RecoveredKey | SweptKey | AsideKey


def logs_prefix(namespace: str) -> str:
    """Return the prefix of the logs of all nodes."""
    return f"{namespace}/wal/"


def node_prefix(namespace: str, node_id: int) -> str:
    """Return the prefix of all logs of a node."""
    return f"{logs_prefix(namespace)}{node_id:0{_NODE_DIGITS}}/"


def parse_log_key(key: str, namespace: str) -> LogKey | None:
    """Parse a key of the namespace's logs. Returns None for any other key."""
    prefix = logs_prefix(namespace)
    if not key.startswith(prefix):
        return None

    parts = key[len(prefix) :].split("/")
    if len(parts) != 3 or not _NODE.fullmatch(parts[0]):
        return None

    node, epoch, name = parts
    if epoch == _ASIDE:
        return AsideKey(int(node)) if _ASIDE_NAME.fullmatch(name) else None
    if not _EPOCH.fullmatch(epoch) or int(epoch) > INT64_MAX:
        return None

    log = LogName(namespace, int(node), int(epoch))
    if name == _RECOVERED:
        return RecoveredKey(log)
    if name == _SWEPT:
        return SweptKey(log)
    if not _SEQUENCE.fullmatch(name) or int(name, 16) > INT64_MAX:
        return None

    return SlotKey(log, int(name, 16))
