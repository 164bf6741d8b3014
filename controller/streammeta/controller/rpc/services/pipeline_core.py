"""State machines of commit pipelines: the messages of one, and the numbers of open ones.

No event loop, clock or connection is used here. `commit_pipeline` feeds the events and carries out
the results. Methods return plain values, because every pipelined commit passes through here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from streammeta.controller.errors import TooManyPipelinesError
from streammeta.controller.metadata.api.requests import CommitStreamSetObject
from streammeta.controller.rpc.services.pipeline_messages import (
    DecidedMessage,
    PipelineCommit,
    PipelineMessage,
    RejectedMessage,
)

BYTES_AHEAD = 4 << 20
"""Maximum size of the messages read and not yet answered, in bytes; one message may be larger."""

ROWS_A_PART = 20_000
"""Rows that all pipelines decide in one turn of the event loop: as many as a commit may hold."""

ROWS_A_COMMIT = 300
"""Cost of a commit in addition to its rows, in rows."""

PIPELINES_MAX = 1_000
"""Maximum number of pipelines open on one controller."""

PIPELINES_PER_PRINCIPAL = 4
"""Maximum number of pipelines that one principal has open on a controller."""

PIPELINES_PER_CONNECTION = 100
"""Maximum number of pipelines open on one connection."""


class OpenPipelines:
    """Numbers of open pipelines, by connection and by principal."""

    def __init__(self) -> None:
        self._by_connection: Counter[str] = Counter()
        self._by_principal: Counter[str] = Counter()

    def require_room(self, connection: str, principal: str, quota: int | None) -> None:
        """Require room for a pipeline. `quota` replaces the limit of a principal, "" has none.

        Raises:
            TooManyPipelinesError: as many are open as may be.
        """
        own = PIPELINES_PER_PRINCIPAL if quota is None else quota
        for count, limit, place in (
            (self._by_principal[principal] if principal else 0, own, "principal"),
            (self._by_connection[connection], PIPELINES_PER_CONNECTION, "connection"),
            (self._by_connection.total(), PIPELINES_MAX, "controller"),
        ):
            if count >= limit:
                raise TooManyPipelinesError(
                    f"{count} commit pipelines are open on this {place}, the maximum. "
                    "Commit on an open one, or close one"
                )

    def count(self, connection: str, principal: str, change: int) -> None:
        """Count a pipeline as open (`change` 1) or no longer (-1)."""
        for counts, key in ((self._by_connection, connection), (self._by_principal, principal)):
            counts[key] += change
            if not counts[key]:
                del counts[key]


class PipelineCore:
    """Messages of one pipeline: waiting, in the batch that is being decided, and to be answered.

    Invariants, after every event:

    - Each message is decided at most once and answered at most once, in the order of arrival.
    - One batch at most is being decided. It ends at `ROWS_A_PART` rows, or at a rejected message.
    - Nothing after a rejected message is decided or answered.
    - A message counts against the limits of reading ahead until it is answered or dropped. While
      `has_room`, there are fewer than `messages_max` messages and than `BYTES_AHEAD` bytes.
    """

    def __init__(self, messages_max: int) -> None:
        self._messages_max = messages_max
        self._bytes = self._rows = 0
        self._came: deque[int] = deque()
        self.waiting: deque[bytes] = deque()
        self.sizes: deque[int] = deque()
        """Sizes of the messages that are not answered, in order."""
        self.came_ns = 0
        """Time when the last message was read, in ns since 1970. 0: tracing is off."""
        self.batch: list[PipelineMessage] = []
        """Messages that are decided together, without the rejected one."""
        self.rejected: RejectedMessage | None = None
        """The message that ends the stream."""
        self.answers: deque[DecidedMessage | RejectedMessage | None] = deque()
        """Decided and rejected messages that are to be answered, in order. None is the end."""
        self.has_ended = False
        """Whether no other message follows the waiting ones."""
        self.is_awaited = False
        """Whether the task that decides messages waits for one."""
        self.is_deciding = False

    @property
    def has_room(self) -> bool:
        """Whether another message may be read."""
        return len(self.sizes) < self._messages_max and self._bytes < BYTES_AHEAD

    def receive(self, data: bytes, came_ns: int = 0) -> None:
        """Add a message that was read, at `came_ns` if its commits are traced."""
        size = len(data)
        self.sizes.append(size)
        self._bytes += size
        self.waiting.append(data)
        if came_ns:
            self._came.append(came_ns)

    def begin_batch(self) -> None:
        """Begin a batch without messages."""
        # Two tasks decide messages. A batch of each at once would mix their order.
        assert not self.is_deciding, "two batches are decided at once"
        assert self.rejected is None, "the stream has ended"
        self.is_deciding = True
        self.batch = []
        self._rows = 0

    def take(self) -> bytes | None:
        """Return the next message of the batch to parse, None if the batch is complete."""
        if not self.waiting or self._rows >= ROWS_A_PART or self.rejected is not None:
            return None
        if self._came:
            self.came_ns = self._came.popleft()
        return self.waiting.popleft()

    def add(self, message: PipelineMessage | RejectedMessage) -> None:
        """Add a parsed message to the batch."""
        if isinstance(message, RejectedMessage):
            self.rejected = message
        else:
            self.batch.append(message)
            self._rows += message.rows

    def settle(self, decided: Sequence[DecidedMessage | RejectedMessage]) -> None:
        """End the batch with its decided messages. Only the last one may be rejected."""
        self.is_deciding = False
        self.answers.extend(decided)
        if decided and isinstance(decided[-1], RejectedMessage):
            self.rejected = decided[-1]
        elif self.rejected is not None:
            self.answers.append(self.rejected)

    def mark_answered(self) -> int:
        """Note that the oldest message is answered or dropped. Return its size."""
        size = self.sizes.popleft()
        self._bytes -= size
        return size

    def drop_waiting(self) -> int:
        """Forget the messages that wait for a decision. Return their size."""
        size = sum(map(len, self.waiting))
        self.waiting.clear()
        return size


def split_message(message: PipelineMessage) -> Iterator[tuple[Sequence[PipelineCommit], int]]:
    """Divide commits into parts that hold the event loop for milliseconds at most.

    Each comes with its work in rows.
    """
    if message.rows <= ROWS_A_PART:
        if message.commits:
            yield message.commits, message.rows
        return

    part: list[PipelineCommit] = []
    rows = 0
    for commit in message.commits:
        size = count_rows(commit)
        if part and rows + size > ROWS_A_PART:
            yield part, rows
            part, rows = [], 0
        part.append(commit)
        rows += size
    yield part, rows


def count_rows(commit: PipelineCommit) -> int:
    """Return the work that a commit is, in rows."""
    rows = ROWS_A_COMMIT + len(commit.ranges.stream_id)
    if isinstance(commit, CommitStreamSetObject):
        rows += len(commit.kv_puts) + len(commit.trims) + len(commit.shared_rows)
    return rows
