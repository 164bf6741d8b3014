"""Errors of a write-ahead log. Each message names the file and the next step."""

from __future__ import annotations

from pathlib import Path

from streammeta.client.errors import BrokerClientError


class WriteAheadLogError(BrokerClientError):
    """Base class of all errors of a write-ahead log."""


class WrongLogError(WriteAheadLogError):
    """The log belongs to another node, cluster or release. Nothing was changed."""


class LogMissingError(WriteAheadLogError):
    """The node has open streams and registered another log than this process has.

    Nothing was changed. `registered` and `present` name both logs, as in registrations.
    """

    def __init__(self, node_id: int, registered: str, present: str) -> None:
        self.registered = registered
        self.present = present
        super().__init__(
            f"node {node_id} has registered the write-ahead log {registered!r}, this process has"
            f" {present!r}: start it with that log, for example mount its volume. Or, if the log is"
            " lost, start with allow_missing_log=True, and its records are set aside if it returns"
        )


class LogLockedError(WriteAheadLogError):
    """Another process uses the directory. Nothing was changed."""


class DamagedLogError(WriteAheadLogError):
    """Flushed bytes have changed or are missing, in file `path` at byte `offset`.

    Nothing was changed.
    """

    def __init__(self, path: Path, offset: int, problem: str) -> None:
        self.path = path
        self.offset = offset
        self.problem = problem
        super().__init__(
            f"{path} is damaged at byte {offset}: {problem}. Restore it from a copy, or open the"
            ' log with damage="quarantine": that keeps the damaged file aside, continues with all'
            " readable records, and reports how many are lost"
        )


class WriteAheadLogBrokenError(WriteAheadLogError):
    """A write or a sync failed, so the state of the disk is unknown. The log accepts no records.

    Records acknowledged before are as safe as the disk. The sync is never retried: a second one may
    succeed without having written anything.
    """

    def __init__(self, directory: Path, reason: str) -> None:
        self.directory = directory
        super().__init__(
            f"the write-ahead log in {directory} is broken: {reason}. Stop this broker, check the"
            " disk, and start it again: it recovers the records in the log"
        )


class WriteAheadLogFullError(WriteAheadLogError):
    """The disk is full, or the log's limit is reached. Rejected records are not in the log."""


class WriteAheadLogClosedError(WriteAheadLogError):
    """The log is closed and accepts no more records."""
