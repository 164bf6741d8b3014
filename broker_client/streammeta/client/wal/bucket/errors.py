"""Errors of a write-ahead log in the bucket; each message names the key and the next step."""

from __future__ import annotations

from streammeta.client.wal.disk.errors import WriteAheadLogError


class LogSealedError(WriteAheadLogError):
    """Another process has sealed this log: it speaks for the node now, and this one has to end."""

    def __init__(self, key: str, sealer: str) -> None:
        self.key = key
        super().__init__(
            f"slot {key} of the write-ahead log was taken by {sealer}: what this process had"
            " acknowledged before is recovered there; end this process, and start it anew with a"
            " larger node epoch"
        )


class LogSweptError(LogSealedError):
    """The claim of this log is missing: it was recovered and swept while its process stalled."""

    def __init__(self, key: str) -> None:
        self.key = key
        WriteAheadLogError.__init__(
            self,
            f"the claim {key} of the write-ahead log is missing or of another process: the log was"
            " recovered and removed while this process did not run; end this process, and start it"
            " again with a larger node epoch",
        )


class DamagedSlotError(WriteAheadLogError):
    """A slot that had been in the bucket is missing or has changed; nothing was changed.

    `key` says which.
    """

    def __init__(self, key: str, problem: str) -> None:
        self.key = key
        self.problem = problem
        super().__init__(
            f"slot {key} of a write-ahead log can't be used: {problem}; restore it from a copy or"
            " an earlier version, or give up what was acknowledged in it and in the later slots of"
            " its log by moving all of them out of the log's prefix"
        )


class UnfitStoreError(WriteAheadLogError):
    """The store replaces objects that a put was to create: no log can be fenced in it."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the store created {key} a second time, though it was there: it ignores the condition"
            " of a put (If-None-Match), so a broker taken for dead could go on acknowledging; use"
            " another server, see `streammeta s3 check`, or a log in a local directory"
        )


class ObjectLogFailedError(WriteAheadLogError):
    """The store refused a slot for good; the log takes no more records."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(
            f"the store refused slot {key} of the write-ahead log: {reason}; stop this broker, give"
            " it the right to create, read, list and delete there, and start it again: it recovers"
            " what the log has"
        )
