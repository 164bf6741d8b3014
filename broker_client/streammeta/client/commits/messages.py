"""Messages of CommitPipeline: batching of commits, column encoding, verdicts from the answer.

Owns the limits of a message and the order in it: commits are decided in the order of submission.
Columns are encoded once, at submission, as messages of `columns.proto`. Hosts must be
little-endian, like the controllers. Pure: no I/O, no clock.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from streammeta.client.arguments import check_int, check_kind
from streammeta.client.errors import ProtocolViolationError
from streammeta.rpc.tracing import LINKS_MAX
from streammeta.v1 import columns_pb2, objects_pb2
from streammeta.v1.common_pb2 import ERROR_CODE_NONE, NodeIdentity

MESSAGE_COMMITS_MAX = 10_000
MESSAGE_ROWS_MAX = 20_000
MESSAGE_BYTES_MAX = 1 << 20
"""A larger commit is sent alone, and the controller decides whether it accepts it."""

TIMESTAMP_MAX = 2**63 - 1
CRC32C_MAX = 2**32 - 1

_METHOD = "CommitPipeline"

VerdictT_co = TypeVar("VerdictT_co", covariant=True)
Pending: TypeAlias = "PendingCommit | PendingUpload"
Outcome: TypeAlias = "tuple[Pending, Any]"
"""A commit, and its verdict or the exception by which it failed."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A stream set object in the store: one row for each stream in it, sorted by stream id.

    `stream_epochs` are the epochs the streams were opened with, empty to skip their check. Offsets
    are half-open. No record in the object is older than `min_timestamp_ms` or newer than
    `max_timestamp_ms` (ms since 1970-01-01, both known or neither). `crc32c` covers all its bytes.
    Unknown values are -1. Raises `ValueError` for values that do not fit into a message.
    """

    object_id: int
    object_size: int
    stream_ids: Sequence[int]
    start_offsets: Sequence[int]
    end_offsets: Sequence[int]
    stream_epochs: Sequence[int] = ()
    min_timestamp_ms: int = -1
    max_timestamp_ms: int = -1
    crc32c: int = -1

    def __post_init__(self) -> None:
        check_int("object_id", self.object_id)
        check_int("object_size", self.object_size)
        for name in ("stream_ids", "start_offsets", "end_offsets", "stream_epochs"):
            check_kind(name, getattr(self, name), Sequence, "a sequence of integers")
        rows = len(self.stream_ids)
        lengths = (len(self.start_offsets), len(self.end_offsets))

        if lengths != (rows, rows) or len(self.stream_epochs) not in (0, rows):
            raise ValueError(
                f"columns of object {self.object_id} have {(rows, *lengths)} rows and"
                f" {len(self.stream_epochs)} epochs, expected as many of each"
            )

        if not 1 <= rows <= MESSAGE_ROWS_MAX:
            raise ValueError(
                f"object {self.object_id} has {rows} ranges, expected 1..{MESSAGE_ROWS_MAX}"
            )

        low, high = self.min_timestamp_ms, self.max_timestamp_ms
        if not -1 <= low <= high <= TIMESTAMP_MAX or (low == -1 != high):
            raise ValueError(
                f"object {self.object_id} has records from {low} to {high} ms, expected"
                f" 0 <= from <= to <= {TIMESTAMP_MAX}, or -1 and -1 if unknown"
            )

        if not -1 <= self.crc32c <= CRC32C_MAX:
            raise ValueError(
                f"object {self.object_id} has the CRC-32C {self.crc32c}, expected 0..{CRC32C_MAX},"
                " or -1 if unknown"
            )


@dataclass(frozen=True, slots=True)
class UploadVerdict:
    """Outcome of an upload: all of it is committed, or nothing.

    `range_errors` has one code per row. It is empty if no row was rejected.
    """

    error: int
    range_errors: Sequence[int] = ()


COMMITTED = UploadVerdict(ERROR_CODE_NONE)


@dataclass(slots=True, eq=False)
class PendingUpload:
    """An upload whose caller awaits the verdict, with its columns as bytes."""

    object_id: int
    object_size: int
    rows: int
    columns: tuple[bytes, ...]
    facts: tuple[int, int, int]
    done: Any
    """Future of the verdict. Only the loop that carries out the outcomes uses it."""
    expires: float
    traceparent: str = ""
    is_open: bool = True
    """Whether its caller still waits for an outcome."""

    @classmethod
    def of(cls, upload: Upload, done: Any, expires: float) -> PendingUpload:
        """Encode the columns of `upload`, to be answered by the event loop's time `expires`."""
        names = ("stream_ids", "stream_epochs", "start_offsets", "end_offsets")
        # Encoded here, once, so that a message that is sent again costs no second encoding.
        columns = tuple(_encode_column(upload, name) for name in names)
        rows = len(upload.stream_ids)
        facts = (upload.min_timestamp_ms, upload.max_timestamp_ms, upload.crc32c)
        return cls(upload.object_id, upload.object_size, rows, columns, facts, done, expires)

    @property
    def size(self) -> int:
        """Estimated bytes of the upload in a message."""
        return 32 * self.rows + 48


class Commit(Protocol[VerdictT_co]):
    """A commit of any form, which builds its request and reads its verdict."""

    def request(self, node: NodeIdentity) -> objects_pb2.CommitStreamSetObjectRequest:
        """Build the request, in the name of `node`."""
        ...

    def verdict(self, answer: objects_pb2.CommitStreamSetObjectResponse) -> VerdictT_co:
        """Translate the answer. Raise `ProtocolViolationError` if it does not fit."""
        ...


@dataclass(slots=True, eq=False)
class PendingCommit:
    """A commit of any other form whose caller awaits the verdict."""

    request: objects_pb2.CommitStreamSetObjectRequest
    verdict: Callable[[objects_pb2.CommitStreamSetObjectResponse], Any]
    done: Any
    expires: float
    traceparent: str = ""
    is_open: bool = True

    @property
    def rows(self) -> int:
        """Number of rows, for the limit of a message."""
        parts = (self.request.ranges, self.request.stream_objects, self.request.shared_rows)
        return sum(len(part.stream_id) for part in parts)

    @property
    def size(self) -> int:
        """Estimated bytes of the commit in a message."""
        return self.request.ByteSize() + 8


@dataclass(slots=True, eq=False)
class CommitMessage:
    """Commits, followed by uploads, of one message."""

    sequence: int
    commits: list[PendingCommit] = field(default_factory=list)
    uploads: list[PendingUpload] = field(default_factory=list)

    def encode(self, node: NodeIdentity) -> bytes:
        """Return the bytes to send."""
        message = columns_pb2.PackedCommitPipelineRequest(
            sequence=self.sequence,
            traceparents=self._traceparents(),
            commits=[
                columns_pb2.PackedCommitStreamSetObjectRequest.FromString(
                    commit.request.SerializeToString()
                )
                for commit in self.commits
            ],
        )

        if self.uploads:
            columns = zip(*(upload.columns for upload in self.uploads), strict=True)
            # The columns are bytes already, so a message costs no work per row.
            stream_id, stream_epoch, start_offset, end_offset = map(b"".join, columns)
            facts = zip(*(upload.facts for upload in self.uploads), strict=True)
            min_timestamp_ms, max_timestamp_ms, crc32c = map(_encode_optional_column, facts)
            message.uploads.CopyFrom(
                columns_pb2.PackedUploadColumns(
                    node=node,
                    object_id=[_column([upload.object_id for upload in self.uploads])],
                    object_size=[_column([upload.object_size for upload in self.uploads])],
                    range_count=[_column([upload.rows for upload in self.uploads])],
                    ranges=columns_pb2.PackedRangeColumns(
                        stream_id=[stream_id],
                        stream_epoch=[stream_epoch] if stream_epoch else (),
                        start_offset=[start_offset],
                        end_offset=[end_offset],
                    ),
                    min_timestamp_ms=min_timestamp_ms,
                    max_timestamp_ms=max_timestamp_ms,
                    crc32c=crc32c,
                )
            )

        return message.SerializeToString()

    def _traceparents(self) -> list[str]:
        traced = dict.fromkeys(item.traceparent for item in self.pending if item.traceparent)
        # The server links at most this many spans.
        return list(traced)[:LINKS_MAX]

    def read(self, answer: objects_pb2.CommitPipelineResponse) -> list[Outcome]:
        """Return the outcome of every commit.

        Raises `ProtocolViolationError` when `answer` belongs to another message.
        """
        errors = answer.uploads.errors
        range_errors = answer.uploads.range_errors
        got = (answer.sequence, len(answer.commits))
        # Answers are matched by position, so a shift would give commits another's verdict.
        if got != (self.sequence, len(self.commits)):
            raise ProtocolViolationError(
                _METHOD,
                detail=f"{got} answers message and commits {(self.sequence, len(self.commits))}",
            )

        rows = sum(upload.rows for upload in self.uploads)
        if len(errors) not in (0, len(self.uploads)) or len(range_errors) not in (0, rows):
            raise ProtocolViolationError(
                _METHOD,
                detail=f"{len(errors)} and {len(range_errors)} verdicts answer"
                f" {len(self.uploads)} uploads of {rows} rows",
            )

        outcomes: list[Outcome] = []
        for commit, response in zip(self.commits, answer.commits, strict=True):
            try:
                outcomes.append((commit, commit.verdict(response)))
            except ProtocolViolationError as error:
                # A malformed verdict fails its own commit only.
                outcomes.append((commit, error))

        row = 0
        for index, upload in enumerate(self.uploads):
            # The usual answer has no codes at all, and shares one verdict.
            verdict = COMMITTED
            if errors and errors[index] != ERROR_CODE_NONE:
                verdict = UploadVerdict(errors[index], range_errors[row : row + upload.rows])
            outcomes.append((upload, verdict))
            row += upload.rows
        return outcomes

    @property
    def pending(self) -> list[Pending]:
        """All commits, in the order in which they are decided."""
        return [*self.commits, *self.uploads]

    def drop_settled(self) -> None:
        """Drop commits whose callers wait no longer."""
        self.commits = [commit for commit in self.commits if commit.is_open]
        self.uploads = [upload for upload in self.uploads if upload.is_open]

    def __len__(self) -> int:
        return len(self.commits) + len(self.uploads)


class CommitQueue:
    """Commits that wait to be sent, in the order in which they are to be decided."""

    def __init__(self) -> None:
        self._waiting: deque[Pending] = deque()
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, pending: Pending) -> None:
        """Append a commit or upload."""
        self._waiting.append(pending)

    def take(self) -> CommitMessage:
        """Return a message with as many commits as fit. The queue must not be empty."""
        message = CommitMessage(self._next_sequence())
        rows = size = 0
        # The controllers reject a message that names an object twice.
        ids: set[int] = set()
        while self._waiting:
            item = self._waiting[0]
            rows, size = rows + item.rows, size + item.size
            # Checked before the item is added, but the first item always fits.
            full = rows > MESSAGE_ROWS_MAX or size > MESSAGE_BYTES_MAX
            if len(message) and (full or len(message) >= MESSAGE_COMMITS_MAX):
                break

            if isinstance(item, PendingCommit):
                if message.uploads:
                    break  # the controllers decide a message's uploads after its commits
                message.commits.append(item)
            else:
                if message.uploads and not _fits(item, message.uploads[0], ids):
                    break
                ids.add(item.object_id)
                message.uploads.append(item)

            self._waiting.popleft()
        return message

    def halves(self, message: CommitMessage) -> list[CommitMessage]:
        """Split a message in two, to find the one commit for which it was rejected."""
        # Commits come before uploads in both halves, as in the message.
        middle = len(message) // 2
        commits, uploads = message.commits, message.uploads
        cut = max(0, middle - len(commits))
        return [
            CommitMessage(self._next_sequence(), commits[:middle], uploads[:cut]),
            CommitMessage(self._next_sequence(), commits[middle:], uploads[cut:]),
        ]

    @property
    def pending(self) -> list[Pending]:
        """All commits, in the order of submission."""
        return list(self._waiting)

    def drop_settled(self) -> None:
        """Drop commits whose callers wait no longer."""
        self._waiting = deque(item for item in self._waiting if item.is_open)

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence


def _fits(upload: PendingUpload, first: PendingUpload, ids: set[int]) -> bool:
    """Return whether an upload can share columns: no id twice, all with epochs or none."""
    return upload.object_id not in ids and bool(upload.columns[1]) == bool(first.columns[1])


def _column(values: Sequence[int]) -> bytes:
    return array("q", values).tobytes()


def _encode_column(upload: Upload, name: str) -> bytes:
    try:
        return _column(getattr(upload, name))
    except (TypeError, OverflowError) as error:
        raise TypeError(
            f"{name} of object {upload.object_id} contains a value that is not a 64-bit integer:"
            f" {error}"
        ) from None


def _encode_optional_column(values: Sequence[int]) -> list[bytes]:
    """Encode a column, or leave it out if all values are unknown."""
    return [_column(values)] if any(value != -1 for value in values) else []
