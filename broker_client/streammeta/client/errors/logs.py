"""Errors of write-ahead logs: each message names the file or the key, and the next step."""

from __future__ import annotations

from pathlib import Path

from streammeta.client.errors.base import BrokerClientError


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


class LogSealedError(WriteAheadLogError):
    """Another process has sealed this log and replaces this process, which has to end."""

    def __init__(self, key: str, sealer: str) -> None:
        self.key = key
        super().__init__(
            f"slot {key} of the write-ahead log was created by {sealer}, which recovers the records"
            " that this process acknowledged. End this process, and start it again with a larger"
            " node epoch"
        )


class LogSweptError(LogSealedError):
    """The claim of this log is missing: it was recovered and swept while its process stalled."""

    def __init__(self, key: str) -> None:
        self.key = key
        WriteAheadLogError.__init__(
            self,
            f"the claim {key} of the write-ahead log is missing, or belongs to another process: the"
            " log was recovered and removed while this process was stalled. End this process, and"
            " start it again with a larger node epoch",
        )


class DamagedSlotError(WriteAheadLogError):
    """A slot that existed in the bucket, `key`, is missing or has changed.

    Nothing was changed.
    """

    def __init__(self, key: str, problem: str) -> None:
        self.key = key
        self.problem = problem
        super().__init__(
            f"slot {key} of a write-ahead log can't be used: {problem}. Restore it from a copy or"
            " an earlier version, or give up the records acknowledged in it and in the later slots"
            " of its log by moving all of them out of the log's prefix"
        )


class UnfitStoreError(WriteAheadLogError):
    """The store replaces existing objects on conditional puts, so it can't fence a log."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the store created {key} a second time, though it existed: it ignores the condition"
            " of a put (If-None-Match), so a fenced broker could continue to acknowledge. Use"
            " another server, see `streammeta s3 check`, or a log in a local directory"
        )


class ObjectLogFailedError(WriteAheadLogError):
    """The store rejected a slot permanently. The log accepts no more records."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(
            f"the store rejected slot {key} of the write-ahead log: {reason}. Stop this broker,"
            " grant it permission to create, read, list and delete there, and start it again: it"
            " recovers the log"
        )


class FailoverSupersededError(BrokerClientError):
    """A newer process of the node has a log and recovers its earlier ones itself."""

    def __init__(self, node_id: int, node_epoch: int, newer: int) -> None:
        super().__init__(
            f"process {node_epoch} of node {node_id} is not recovered here: the node's newer"
            f" process {newer} recovers it"
        )


class FailoverUnsettledError(BrokerClientError):
    """The controllers rejected all uploads. The log is kept, and no stream was closed."""

    def __init__(self, node_id: int, node_epoch: int, attempts: int) -> None:
        super().__init__(
            f"the controllers rejected the uploads for process {node_epoch} of node {node_id}"
            f" {attempts} times, as if others committed in its name. Its log is kept, and the next"
            " heartbeat that assigns it starts again"
        )
