"""Keys of write-ahead logs in a bucket.

A process of a node has one log, `<namespace>/wal/<node id>/<node epoch>/`, with ids and epochs in
decimal of fixed width, so that a listing has logs in their order. In it are slots, `<sequence>` in
16 hex digits, and perhaps the marks `recovered` and `swept`. Records that can't be committed are
kept under `<namespace>/wal/<node id>/aside/`. All of it lies under the namespace, where no object's
key begins (see `object_key`). Parsing is strict: a key that this module would not have made belongs
to no log.
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
    """The log of the process `node_epoch` of a node."""

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
        """Key of the mark that nothing in the log is needed any more."""
        return f"{self.prefix}{_RECOVERED}"

    @property
    def swept_key(self) -> str:
        """Key of the mark that this log and all earlier ones of the node were swept."""
        return f"{self.prefix}{_SWEPT}"

    def aside_key(self, token: str) -> str:
        """Return the key of a file of records set aside; `token` is 32 hex digits."""
        node = node_prefix(self.namespace, self.node_id)
        return f"{node}{_ASIDE}/{self.node_epoch:0{_EPOCH_DIGITS}}-{token}"


@dataclass(frozen=True, slots=True)
class SlotKey:
    """A slot of a log."""

    log: LogName
    sequence: int


@dataclass(frozen=True, slots=True)
class RecoveredKey:
    """The mark of a log that nothing in it is needed any more."""

    log: LogName


@dataclass(frozen=True, slots=True)
class SweptKey:
    """The mark that a log and all earlier ones of its node were swept."""

    log: LogName


@dataclass(frozen=True, slots=True)
class AsideKey:
    """A file of records that were set aside."""

    node_id: int


LogKey: TypeAlias = SlotKey | RecoveredKey | SweptKey | AsideKey


def logs_prefix(namespace: str) -> str:
    """Return the prefix of the logs of all nodes."""
    return f"{namespace}/wal/"


def node_prefix(namespace: str, node_id: int) -> str:
    """Return the prefix of all logs of a node."""
    return f"{logs_prefix(namespace)}{node_id:0{_NODE_DIGITS}}/"


def parse_log_key(key: str, namespace: str) -> LogKey | None:
    """Return what a key of the namespace's logs names; None: it is of none."""
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
