"""Rejections by the quorum, as errors of the API."""

from __future__ import annotations

from streammeta.controller.errors import ApiError, BusyError, LimitExceededError
from streammeta.controller.quorum.messages import QuorumError


class UncommittedLogFullError(BusyError):
    """Too many bytes are uncommitted: a majority of the voters is slow or unreachable."""


class RecordTooLargeError(LimitExceededError):
    """A payload does not fit into a batch."""


class NoDiskSpaceError(LimitExceededError):
    """The disk of this controller, or of a majority of them, is full, and nothing was written.

    Reads continue. The request may be retried until there is disk space.
    """


class TooManyReadsError(BusyError):
    """Too many linearizable reads wait for a majority of the voters."""


class NotCaughtUpError(ApiError):
    """A read requires an offset that was not applied here in time."""

    def __init__(self, wanted: int, applied: int) -> None:
        super().__init__(
            f"the read requires the log below {wanted}, but this controller has applied {applied}: "
            "retry, or ask another controller"
        )
        self.wanted = wanted
        self.applied = applied


class SnapshotFailedError(ApiError):
    """No checkpoint was written. The message gives the reason."""


class TransferRefusedError(ApiError):
    """Leadership was not transferred. The message gives the reason."""


class VoterChangeError(ApiError):
    """A change of the voters was rejected.

    With REQUEST_TIMED_OUT and NOT_LEADER it may still have happened: check the voters.
    """

    def __init__(self, error: QuorumError, reason: str) -> None:
        super().__init__(f"the voters were not changed ({error.name}): {reason}")
        self.error = error
        self.reason = reason
