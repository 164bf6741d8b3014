"""Errors of a data directory. Each message contains the file and the operator's next step."""


class JournalError(Exception):
    """The data directory cannot be used. Nothing in it was changed."""


class DirectoryNotFormattedError(JournalError):
    """The directory is empty or missing, and must be formatted first."""


class WrongDirectoryError(JournalError):
    """The directory belongs to another node or cluster, or not to a controller."""


class DirectoryLockedError(JournalError):
    """Another process uses the directory."""


class NewerVersionError(JournalError):
    """The directory, or data sent by the leader, needs a newer version."""


class JournalDamagedError(JournalError):
    """Flushed bytes have changed or are missing, at byte `offset` of the file `path`."""

    def __init__(self, path: object, offset: int, what: str, advice: str = "") -> None:
        super().__init__(f"{path} is damaged at byte {offset}: {what}. {advice or REPLACE_VOTER}")
        self.path = path
        self.offset = offset
        self.what = what


REPLACE_VOTER = (
    "This node must not vote with it. Restore the disk, or replace the voter: remove this node "
    "from the quorum, format an empty directory with --join, and add it again"
)
RESTART_REPAIRS = (
    "Restart this node: it sets the damaged part aside, fetches the missing part from the leader, "
    "and does not vote until it has restored it"
)


class BadSnapshotError(Exception):
    """A snapshot file is incomplete or damaged. The message names the problem."""
