"""Why a data directory can't be used. Each message is meant for an operator and says what to do."""


class JournalError(Exception):
    """The data directory can't be used; nothing in it was changed."""


class DirectoryNotFormattedError(JournalError):
    """The directory is empty or missing: it must be formatted first."""


class WrongDirectoryError(JournalError):
    """The directory belongs to another node or cluster, or to no controller at all."""


class DirectoryLockedError(JournalError):
    """Another process uses the directory."""


class JournalDamagedError(JournalError):
    """Bytes that were flushed are not what they were; `path` and `offset` say where.

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
    "Start this node again: it sets the damaged part aside and takes what is missing from the "
    "leader, and does not vote until it has it back"
)


class BadSnapshotError(Exception):
    """A snapshot file is not complete and intact; the message says what is wrong with it."""
