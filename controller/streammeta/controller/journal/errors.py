"""Errors of a data directory; each message names the file and the operator's next step."""


class JournalError(Exception):
    """The data directory can't be used; nothing in it was changed."""


class DirectoryNotFormattedError(JournalError):
    """The directory is empty or missing: it must be formatted first."""


class WrongDirectoryError(JournalError):
    """The directory belongs to another node or cluster, or to no controller at all."""


class DirectoryLockedError(JournalError):
    """Another process uses the directory."""


class NewerVersionError(JournalError):
    """The directory, or what the leader sends, holds what only a newer version can read."""


class JournalDamagedError(JournalError):
    """Flushed bytes have changed or are missing, at `offset` of the file `path`.

    `offset` is a position in the file, in bytes.
    """

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
    "Start this node again: it sets the damaged part aside, fetches the missing part from the "
    "leader, and does not vote until it has it back"
)


class BadSnapshotError(Exception):
    """A snapshot file is incomplete or damaged; the message names the problem."""
