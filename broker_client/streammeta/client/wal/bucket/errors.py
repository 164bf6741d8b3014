"""Errors of a write-ahead log in the bucket. Each message names the key and the next step."""

from __future__ import annotations

from streammeta.client.wal.disk.errors import WriteAheadLogError


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
