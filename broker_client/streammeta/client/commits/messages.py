"""Messages of CommitPipeline: batching of commits, column encoding, verdicts from the answer.

Owns the bounds of a message and the order in it: what was asked first is judged first. Columns are
encoded once, when they are handed in, by the messages of `columns.proto`; hosts must be
little-endian, as the controllers' are. Pure: no I/O, no clock.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from streammeta.client.arguments import check_int, check_kind
from streammeta.client.errors import ProtocolViolationError
from streammeta.rpc.tracing import LINKS_MAX
from streammeta.v1 import columns_pb2, objects_pb2
from streammeta.v1.common_pb2 import ERROR_CODE_NONE, ErrorCode, NodeIdentity

MESSAGE_COMMITS_MAX = 10_000
MESSAGE_ROWS_MAX = 20_000
MESSAGE_BYTES_MAX = 1 << 20
"""One commit that is larger goes alone; what the controller refuses, it refuses then."""

TIMESTAMP_MAX = 2**63 - 1
CRC32C_MAX = 2**32 - 1

_METHOD = "CommitPipeline"

ResultT = TypeVar("ResultT")
VerdictT_co = TypeVar("VerdictT_co", covariant=True)
PendingT = TypeVar("PendingT", "PendingCommit", "PendingUpload", "PendingCommit | PendingUpload")


@dataclass(frozen=True, slots=True)
class Upload:
    """A stream set object in the store: one row for each stream in it, sorted by stream id.

    `stream_epochs` are those the streams were opened with; empty: not checked. Offsets are
    half-open. No record in the object is older than `min_timestamp_ms` or newer than
    `max_timestamp_ms` (ms since 1970-01-01, both known or neither); `crc32c` is that of all its
    bytes; -1: unknown. Raises `ValueError` for what no message can hold.
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
                f" {len(self.stream_epochs)} epochs, wanted as many of each"
            )
        if not 1 <= rows <= MESSAGE_ROWS_MAX:
            raise ValueError(
                f"object {self.object_id} has {rows} ranges, wanted 1..{MESSAGE_ROWS_MAX}"
            )
        low, high = self.min_timestamp_ms, self.max_timestamp_ms
        if not -1 <= low <= high <= TIMESTAMP_MAX or (low == -1 != high):
            raise ValueError(
                f"object {self.object_id} has records from {low} to {high} ms, wanted"
                f" 0 <= from <= to <= {TIMESTAMP_MAX}, or -1 and -1 if that is not known"
            )
        if not -1 <= self.crc32c <= CRC32C_MAX:
            raise ValueError(
                f"object {self.object_id} has the CRC-32C {self.crc32c}, wanted 0..{CRC32C_MAX},"
                " or -1 if it is not known"
            )


@dataclass(frozen=True, slots=True)
class UploadVerdict:
    """What became of an upload: all of it is committed, or nothing.

    `range_errors` has one code a row; empty: none of the rows was refused for itself.
    """

    error: ErrorCode.ValueType
    range_errors: Sequence[ErrorCode.ValueType] = ()


COMMITTED = UploadVerdict(ERROR_CODE_NONE)


@dataclass(slots=True, eq=False)
class PendingUpload:
    """An upload whose caller awaits its verdict, with its columns as bytes."""

    object_id: int
    object_size: int
    rows: int
    columns: tuple[bytes, ...]
    facts: tuple[int, int, int]
    done: asyncio.Future[UploadVerdict]
    expires: float
    traceparent: str = ""

    @classmethod
    def of(
        cls, upload: Upload, done: asyncio.Future[UploadVerdict], expires: float
    ) -> PendingUpload:
        """Encode the columns of `upload`, to be answered before the event loop's time `expires`."""
        names = ("stream_ids", "stream_epochs", "start_offsets", "end_offsets")
        columns = tuple(_named_column(upload, name) for name in names)
        rows = len(upload.stream_ids)
        facts = (upload.min_timestamp_ms, upload.max_timestamp_ms, upload.crc32c)
        return cls(upload.object_id, upload.object_size, rows, columns, facts, done, expires)

    @property
    def size(self) -> int:
        """Bytes it takes of a message, about."""
        return 32 * self.rows + 48


class Commit(Protocol[VerdictT_co]):
    """A commit of any form: it makes its request, and reads the verdict from the answer."""

    def request(self, node: NodeIdentity) -> objects_pb2.CommitStreamSetObjectRequest:
        """Make the request, in the name of `node`."""
        ...

    def verdict(self, answer: objects_pb2.CommitStreamSetObjectResponse) -> VerdictT_co:
        """Return what the answer means; raise `ProtocolViolationError` if it does not fit."""
        ...


@dataclass(slots=True, eq=False)
class PendingCommit:
    """A commit of any other form whose caller awaits its verdict."""

    request: objects_pb2.CommitStreamSetObjectRequest
    verdict: Callable[[objects_pb2.CommitStreamSetObjectResponse], Any]
    done: asyncio.Future[Any]
    expires: float
    traceparent: str = ""

    @property
    def rows(self) -> int:
        """Rows it has of the bound of a message."""
        return len(self.request.ranges.stream_id) + len(self.request.stream_objects.stream_id)

    @property
    def size(self) -> int:
        """Bytes it takes of a message, about."""
        return self.request.ByteSize() + 8


@dataclass(slots=True, eq=False)
class CommitMessage:
    """Commits, then uploads, that travel together."""

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
                    one.request.SerializeToString()
                )
                for one in self.commits
            ],
        )
        if self.uploads:
            columns = zip(*(one.columns for one in self.uploads), strict=True)
            stream_id, stream_epoch, start_offset, end_offset = map(b"".join, columns)
            facts = zip(*(one.facts for one in self.uploads), strict=True)
            min_timestamp_ms, max_timestamp_ms, crc32c = map(_known_column, facts)
            message.uploads.CopyFrom(
                columns_pb2.PackedUploadColumns(
                    node=node,
                    object_id=[_column([one.object_id for one in self.uploads])],
                    object_size=[_column([one.object_size for one in self.uploads])],
                    range_count=[_column([one.rows for one in self.uploads])],
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
        pending: list[PendingCommit | PendingUpload] = [*self.commits, *self.uploads]
        traced = dict.fromkeys(one.traceparent for one in pending if one.traceparent)
        return list(traced)[:LINKS_MAX]

    def settle(self, answer: objects_pb2.CommitPipelineResponse) -> None:
        """Complete the future of every commit with its verdict.

        Raises `ProtocolViolationError`, completing none, when `answer` is that of another message.
        """
        errors = answer.uploads.errors
        range_errors = answer.uploads.range_errors
        got = (answer.sequence, len(answer.commits))
        if got != (self.sequence, len(self.commits)):
            raise ProtocolViolationError(
                _METHOD,
                detail=f"{got} answers message and commits {(self.sequence, len(self.commits))}",
            )
        rows = sum(one.rows for one in self.uploads)
        if len(errors) not in (0, len(self.uploads)) or len(range_errors) not in (0, rows):
            raise ProtocolViolationError(
                _METHOD,
                detail=f"{len(errors)} and {len(range_errors)} verdicts answer"
                f" {len(self.uploads)} uploads of {rows} rows",
            )
        for commit, response in zip(self.commits, answer.commits, strict=True):
            try:
                _resolve(commit.done, commit.verdict(response))
            except ProtocolViolationError as error:
                if not commit.done.done():
                    commit.done.set_exception(error)
        row = 0
        for index, upload in enumerate(self.uploads):
            verdict = COMMITTED
            if errors and errors[index] != ERROR_CODE_NONE:
                verdict = UploadVerdict(errors[index], range_errors[row : row + upload.rows])
            _resolve(upload.done, verdict)
            row += upload.rows

    def fail(self, error: Exception) -> None:
        """Tell every caller that its commit failed."""
        pending: list[PendingCommit | PendingUpload] = [*self.commits, *self.uploads]
        for one in pending:
            if not one.done.done():
                one.done.set_exception(error)

    def drop_expired(self, now: float, error: Exception) -> None:
        """Fail and drop commits that expired by `now`; drop those whose caller was cancelled."""
        self.commits = _in_time(self.commits, now, error)
        self.uploads = _in_time(self.uploads, now, error)

    def __len__(self) -> int:
        return len(self.commits) + len(self.uploads)


class CommitQueue:
    """What waits to be sent, in the order in which it is to be judged."""

    def __init__(self) -> None:
        self._waiting: deque[PendingCommit | PendingUpload] = deque()
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, pending: PendingCommit | PendingUpload) -> None:
        """Append."""
        self._waiting.append(pending)

    def take(self) -> CommitMessage:
        """Return a message of as much as fits; something must wait."""
        message = CommitMessage(self._next_sequence())
        rows = size = 0
        ids: set[int] = set()
        while self._waiting:
            one = self._waiting[0]
            rows, size = rows + one.rows, size + one.size
            full = rows > MESSAGE_ROWS_MAX or size > MESSAGE_BYTES_MAX
            if len(message) and (full or len(message) >= MESSAGE_COMMITS_MAX):
                break
            if isinstance(one, PendingCommit):
                if message.uploads:
                    break  # a message's uploads are judged after its commits
                message.commits.append(one)
            else:
                if message.uploads and not _fits(one, message.uploads[0], ids):
                    break
                ids.add(one.object_id)
                message.uploads.append(one)
            self._waiting.popleft()
        return message

    def halves(self, message: CommitMessage) -> list[CommitMessage]:
        """Return two messages of a half each, to find the one commit that spoils all."""
        middle = len(message) // 2
        commits, uploads = message.commits, message.uploads
        cut = max(0, middle - len(commits))
        return [
            CommitMessage(self._next_sequence(), commits[:middle], uploads[:cut]),
            CommitMessage(self._next_sequence(), commits[middle:], uploads[cut:]),
        ]

    def drop_expired(self, now: float, error: Exception) -> None:
        """Fail and drop commits that expired by `now`; drop those whose caller was cancelled."""
        self._waiting = deque(_in_time(self._waiting, now, error))

    def fail(self, error: Exception) -> None:
        """Tell every caller that its commit failed, and forget them."""
        while self._waiting:
            self.take().fail(error)

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence


def _fits(upload: PendingUpload, first: PendingUpload, ids: set[int]) -> bool:
    """Tell whether it can share columns with others: no id twice, all with epochs or none."""
    return upload.object_id not in ids and bool(upload.columns[1]) == bool(first.columns[1])


def _in_time(waiting: Iterable[PendingT], now: float, error: Exception) -> list[PendingT]:
    kept: list[PendingT] = []
    for one in waiting:
        if not one.done.done() and one.expires <= now:
            one.done.set_exception(error)
        if not one.done.done():
            kept.append(one)
    return kept


def _column(values: Sequence[int]) -> bytes:
    return array("q", values).tobytes()


def _named_column(upload: Upload, name: str) -> bytes:
    try:
        return _column(getattr(upload, name))
    except (TypeError, OverflowError) as error:
        raise TypeError(
            f"{name} of object {upload.object_id} holds what is no 64-bit integer: {error}"
        ) from None


def _known_column(values: Sequence[int]) -> list[bytes]:
    """Return the pieces of a column that is left out if all of it is unknown."""
    return [_column(values)] if any(value != -1 for value in values) else []


def _resolve(done: asyncio.Future[ResultT], result: ResultT) -> None:
    if not done.done():
        done.set_result(result)
