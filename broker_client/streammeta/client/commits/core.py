"""State machine of a commit pipeline: one event in, messages and outcomes out.

No clock, connection or event loop is used here. `pipeline` feeds the events and carries out the
results. The stream of messages may break at any point, also between a message and its answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from streammeta.client import errors
from streammeta.client.commits.messages import CommitMessage, CommitQueue, Outcome, Pending
from streammeta.v1 import objects_pb2
from streammeta.v1.common_pb2 import NodeIdentity

MESSAGES_IN_FLIGHT = 4
PENDING_MAX = 20_000
"""Maximum number of commits in flight. Further callers wait."""

_METHOD = "CommitPipeline"


class PipelineCore:
    """Commits of one node between submission and outcome.

    Invariants, after every event:

    - A commit has at most one outcome, and none after its caller cancelled it. Until then it is in
      exactly one place: in a message in flight, or in the queue.
    - Messages in flight followed by the queue are in the order of submission. Messages on a stream
      are written in that order, and a new stream begins with the oldest message in flight.
    - Messages are answered from the oldest on, and only if written on the present stream.
      No message changes between its write and its answer.
    - At most `MESSAGES_IN_FLIGHT` messages are written and unanswered, and none was sent empty.
    - `answer_due` is set exactly while a written message has no answer.
    """

    def __init__(self, node: NodeIdentity, answer_timeout_s: float) -> None:
        self._node = node
        self._answer_timeout_s = answer_timeout_s
        self._queue = CommitQueue()
        self._in_flight: deque[CommitMessage] = deque()
        self._written = 0
        self.open = 0
        """Number of commits whose callers wait for an outcome."""
        self.answer_due: float | None = None
        """Time by which the oldest written message must be answered, None without any."""
        self.rejection: Exception | None = None
        """Error for every further commit, None while commits are accepted."""

    @property
    def is_full(self) -> bool:
        """Whether further callers have to wait before they submit."""
        return self.open >= PENDING_MAX

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to send, again or for the first time."""
        return not self._in_flight and not self._queue

    # -- callers

    def submit(self, pending: Pending) -> None:
        """Append a commit to the queue."""
        self.open += 1
        self._queue.add(pending)

    def cancel(self, pending: Pending) -> None:
        """Note that nobody waits for an outcome. The commit may be sent, or sent already."""
        self._settle([(pending, None)])

    def close(self) -> None:
        """Accept no further commits. Those submitted are still sent."""
        if self.rejection is None:
            self.rejection = errors.WriterClosedError("a commit came after its pipeline was closed")

    # -- the stream of messages

    def next_message(self, now: float) -> bytes | None:
        """Return the next message to write to the stream, None if there is none now."""
        if self._written >= MESSAGES_IN_FLIGHT:
            return None
        if self._written == len(self._in_flight):
            if not self._queue:
                return None
            self._in_flight.append(self._queue.take())

        message = self._in_flight[self._written]
        self._written += 1
        if self.answer_due is None:
            self.answer_due = now + self._answer_timeout_s
        return message.encode(self._node)

    def receive(self, data: bytes, now: float) -> list[Outcome]:
        """Return the outcomes of the oldest message, which `data` answers.

        Raises `ProtocolViolationError` when it does not.
        """
        try:
            answer = objects_pb2.CommitPipelineResponse.FromString(data)
        except DecodeError as error:
            raise errors.ProtocolViolationError(
                _METHOD, detail="an answer does not parse"
            ) from error
        if not self._written:
            raise errors.ProtocolViolationError(
                _METHOD, detail="an answer arrived without a message in flight"
            )

        outcomes = self._settle(self._in_flight[0].read(answer))
        self._in_flight.popleft()
        self._written -= 1
        self.answer_due = now + self._answer_timeout_s if self._written else None
        return outcomes

    def disconnect(self) -> None:
        """Note that the stream ended. The next one begins with all messages in flight."""
        self._written = 0
        self.answer_due = None

    # -- failures, without a stream

    def expire(self, now: float, error: Exception) -> list[Outcome]:
        """Fail commits that expired by `now`, and forget the commits of cancelled callers."""
        return self._fail((item for item in self._pending() if item.expires <= now), error)

    def reject(self, error: errors.BrokerClientError) -> list[Outcome]:
        """Fail the commit for which the oldest message was rejected, or split the message."""
        # These errors concern the caller, so every other commit would fail in the same way.
        if isinstance(error, errors.UnsupportedError | errors.PermissionDeniedError):
            return self._fail(self._pending(), error)
        if not self._in_flight:
            return []
        if len(self._in_flight[0]) == 1:
            return self._fail(self._in_flight[0].pending, error)

        # Bisection finds the bad commit with a logarithmic number of messages.
        self._in_flight.extendleft(reversed(self._queue.halves(self._in_flight.popleft())))
        return []

    def end(self, error: Exception) -> list[Outcome]:
        """Fail every commit, and accept no further ones."""
        self.disconnect()
        if self.rejection is None:
            self.rejection = error
        return self._fail(self._pending(), error)

    def _pending(self) -> list[Pending]:
        sent = [item for message in self._in_flight for item in message.pending]
        return sent + self._queue.pending

    def _fail(self, pending: Iterable[Pending], error: Exception) -> list[Outcome]:
        assert not self._written, "a message was changed while its answer is expected"
        outcomes = self._settle([(item, error) for item in pending])
        for message in self._in_flight:
            message.drop_settled()
        self._in_flight = deque(message for message in self._in_flight if message)
        self._queue.drop_settled()
        return outcomes

    def _settle(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Close commits, and return the outcomes of those that were open."""
        news = [outcome for outcome in outcomes if outcome[0].is_open]
        for item, _ in news:
            item.is_open = False
        self.open -= len(news)
        return news
