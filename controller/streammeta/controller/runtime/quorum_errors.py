"""Refusals of the quorum, as errors of the API."""

from __future__ import annotations

from streammeta.controller.errors import ApiError, BusyError, LimitExceededError
from streammeta.controller.quorum.messages import QuorumError


class UncommittedLogFullError(BusyError):
    """Too many bytes are uncommitted: a majority of the voters is slow or unreachable."""


class RecordTooLargeError(LimitExceededError):
    """A payload does not fit a batch."""


class NoDiskSpaceError(LimitExceededError):
    """The disk of this controller, or those of a majority, are full: nothing was written.

    Reads go on; the request may be repeated until there is disk space.
    """


class TooManyReadsError(BusyError):
    """Too many linearizable reads wait for a majority of the voters."""


class NotCaughtUpError(ApiError):
    """A read requires an offset that was not applied here in time."""

    def __init__(self, wanted: int, applied: int) -> None:
        super().__init__(
            f"the read asks for the log below {wanted}, this controller has applied {applied}; "
            "ask again, or ask another controller"
        )
        self.wanted = wanted
        self.applied = applied


class SnapshotFailedError(ApiError):
    """No checkpoint was written; the message gives the reason."""


class TransferRefusedError(ApiError):
    """Leadership was not handed over; the message gives the reason."""


class VoterChangeError(ApiError):
    """A change of the voters was refused.

    With REQUEST_TIMED_OUT and NOT_LEADER it may have happened nevertheless: check the voters.
    """

    def __init__(self, error: QuorumError, reason: str) -> None:
        super().__init__(f"the voters were not changed ({error.name}): {reason}")
        self.error = error
        self.reason = reason
