"""MetadataService.Watch: fan-out of committed changes in bounded turns of the event loop.

Watches with pending changes wait in a queue. A turn serves the first few and then yields the event
loop for as long as it used it, sending included, so commits and the quorum's messages always run in
between, however many watches there are. A slow connection holds up nothing: a watch costs a cursor
and the one message in flight. Under constant change a watch that keeps up and accepts combined
messages pauses between two messages, because a message costs the same whatever its size. A watch
whose next change has left the ring ends with the offset to resume at. Any controller serves
watches.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Awaitable, Iterator
from heapq import heappop, heappush

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.records.selection import Kind, Selection
from streammeta.controller.rpc.calls.error_mapping import Context, abort
from streammeta.controller.rpc.watch.messages import EXAMINED_MAX, WatchMessages
from streammeta.controller.runtime.writer.change_feed import ChangeFeed, Cursor, WatcherTooSlowError
from streammeta.controller.trust.authenticator import current_holder, current_quota
from streammeta.controller.trust.rates import Places
from streammeta.rpc.methods import facts_of
from streammeta.v1 import metadata_pb2 as pb

PROGRESS_S = 1.0
"""Maximum time between two messages to an idle watch, in seconds, unless others wait."""

REST_PER_WATCH_S = 0.00075
"""Pause of a watch after a message, in seconds per open watch.

All watches together receive at most 1333 messages a second while changes are constant. Changes
after a longer silence are sent at once. Only watches with combined messages that are up to date
pause.
"""

REST_S_MAX = 0.5
"""Maximum rest, in seconds."""

WATCHES_PER_TURN = 16
"""Watches served in one turn of the event loop."""

TURN_S = 0.002
"""Time after which a turn serves no further watch, in seconds."""

PAUSE_S_MAX = 0.02
"""Maximum pause between two turns, in seconds."""

SENDING_BYTES_MAX = 64 << 20
"""Bytes of messages in flight above which no further watch is served."""

SENDING_S_MAX = 5.0
"""Maximum time to send a message while other watches wait for memory, in seconds."""

_DUE_PER_TURN = 256
_NOT_TAKEN = (
    f"this watcher did not take a message for {SENDING_S_MAX:g} s while others wait for the memory"
)


class Follower:
    """One watch: its cursor, and the message that it waits for or sends."""

    def __init__(
        self,
        fanout: Fanout,
        selection: Selection,
        cursor: Cursor,
        *,
        combines: bool,
        is_typed: bool,
    ) -> None:
        self.cursor = cursor
        self.group = fanout.messages.join(selection, combines=combines, is_typed=is_typed)
        self._fanout = fanout
        self._sending: asyncio.Timeout | None = None
        self._cut_off: WatcherTooSlowError | None = None
        self.message: asyncio.Future[bytes | None] | None = None
        self.message_bytes = 0
        self.told_at = self.sending_since = asyncio.get_running_loop().time()
        self.rests_until = float("-inf")
        self.has_left = False
        self.needs_snapshot = False

    async def next(self) -> bytes | None:
        """Return the next message, None if the feed can't send the next change."""
        self.message = asyncio.get_running_loop().create_future()
        self._fanout.enqueue(self)
        return await self.message

    async def send(self, sending: Awaitable[None]) -> None:
        """Wait until the message is sent.

        Raises:
            WatcherTooSlowError: it was not sent while its successor was dropped or others needed
                memory.
        """
        try:
            async with asyncio.timeout(None) as self._sending:
                await sending
        except TimeoutError:
            if self._cut_off is not None:
                raise self._cut_off from None
            raise
        finally:
            self._sending = None
        self._fanout.sent(self)

    def cut_off(self, error: WatcherTooSlowError) -> None:
        """End `send`, if the message is still being sent."""
        if self._sending is not None and self._cut_off is None:
            self._cut_off = error
            self._sending.reschedule(asyncio.get_running_loop().time())


class Fanout:
    """All watches of one controller, each of them idle, queued, resting or sending a message."""

    def __init__(self, changes: ChangeFeed) -> None:
        self.messages = WatchMessages(changes)
        self._changes = changes
        self._queue: deque[Follower] = deque()
        self._idle: dict[Follower, None] = {}
        self._resting: deque[Follower] = deque()
        self._sending: dict[Follower, None] = {}
        self._sending_bytes = 0
        self._watches = 0
        self._alarms: list[tuple[float, int, Follower]] = []
        self._joined = 0
        self._has_news = False
        self._is_turn_scheduled = False
        self._alarm: asyncio.TimerHandle | None = None
        changes.subscribe(self._on_news)

    @contextlib.contextmanager
    def following(
        self, selection: Selection, cursor: Cursor, *, combines: bool, is_typed: bool
    ) -> Iterator[Follower]:
        """Serve a watch while the block runs."""
        follower = Follower(self, selection, cursor, combines=combines, is_typed=is_typed)
        self._set_alarm(follower, follower.told_at + PROGRESS_S)
        self._schedule_alarm()
        self._watches += 1
        try:
            yield follower
        finally:
            self._watches -= 1
            follower.has_left = True
            self._idle.pop(follower, None)
            self._forget_sending(follower)
            self.messages.leave(follower.group)

    def enqueue(self, follower: Follower) -> None:
        """Queue a follower that waits for a message."""
        self._queue.append(follower)
        self._schedule_turn()

    def sent(self, follower: Follower) -> None:
        """Note that a message was sent."""
        follower.told_at = asyncio.get_running_loop().time()
        self._forget_sending(follower)

    def _on_news(self) -> None:
        self._has_news = True
        if self._idle:
            self._schedule_turn()

    def _schedule_turn(self) -> None:
        if not self._is_turn_scheduled:
            self._is_turn_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self._has_news:
            self._has_news = False
            self._queue.extend(self._idle)
            self._idle.clear()

        self._wake_rested(began)
        self._wake_due(began)
        has_room = True
        for _ in range(min(len(self._queue), WATCHES_PER_TURN)):
            has_room = self._has_room(began)
            if not has_room:
                break
            self._serve(self._queue.popleft(), began)
            if loop.time() - began >= TURN_S:
                break

        # The watches served now continue in the next turn of the event loop, before this call.
        loop.call_soon(self._pause, began, 0.0 if has_room else PAUSE_S_MAX)

    def _pause(self, began: float, at_least_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self._queue or (self._has_news and self._idle):
            pause_s = min(max(loop.time() - began, at_least_s), PAUSE_S_MAX)
            loop.call_later(pause_s, self._turn)
        else:
            self._is_turn_scheduled = False
            self._schedule_alarm()

    def _has_room(self, now: float) -> bool:
        if self._sending_bytes < SENDING_BYTES_MAX:
            return True
        oldest = next(iter(self._sending))
        if now - oldest.sending_since >= SENDING_S_MAX:
            oldest.cut_off(WatcherTooSlowError(oldest.cursor.next_offset, _NOT_TAKEN))
        return False

    def _serve(self, follower: Follower, now: float) -> None:
        if follower.message is None or follower.message.done():
            return  # its caller has gone

        cursor = follower.cursor
        if cursor.is_lost:
            follower.message.set_result(None)
            return

        if now < follower.rests_until and self._may_rest(follower):
            self._resting.append(follower)
            return

        batch = self.messages.following(follower.group, cursor.next_offset)
        if batch.needs_snapshot:
            follower.needs_snapshot = True
            follower.message.set_result(None)
            return

        has_moved = batch.next_offset > cursor.next_offset
        cursor.next_offset = batch.next_offset
        if batch.message is not None:
            rest_s = min(self._watches * REST_PER_WATCH_S, REST_S_MAX)
            follower.rests_until = now + rest_s
            self._give(follower, batch.message, now)
        elif now - follower.told_at >= PROGRESS_S:
            self._give(follower, self.messages.progress(cursor.next_offset), now)
        elif has_moved and cursor.next_offset < self._changes.end_offset:
            self._queue.append(follower)
        else:
            self._idle[follower] = None

    def _may_rest(self, follower: Follower) -> bool:
        waiting = self._changes.end_offset - follower.cursor.next_offset
        return follower.group.combines and 0 < waiting < EXAMINED_MAX

    def _wake_rested(self, now: float) -> None:
        while self._resting and self._resting[0].rests_until <= now:
            self._queue.append(self._resting.popleft())

    def _give(self, follower: Follower, message: bytes, now: float) -> None:
        assert follower.message is not None
        follower.message.set_result(message)
        follower.message_bytes = len(message)
        follower.sending_since = now
        self._sending[follower] = None
        self._sending_bytes += len(message)

    def _forget_sending(self, follower: Follower) -> None:
        if follower in self._sending:
            del self._sending[follower]
            self._sending_bytes -= follower.message_bytes

    # -- alarms: one for each follower, at the time its next progress message may be sent

    def _wake_due(self, now: float) -> None:
        for _ in range(_DUE_PER_TURN):
            if not self._alarms or self._alarms[0][0] > now:
                return
            _, _, follower = heappop(self._alarms)
            if not follower.has_left:
                self._set_alarm(follower, self._on_alarm(follower, now))

    def _on_alarm(self, follower: Follower, now: float) -> float:
        """Handle a follower's alarm and return the time of its next one."""
        if follower in self._sending and follower.cursor.is_lost:
            follower.cut_off(WatcherTooSlowError(follower.cursor.next_offset))
        if follower in self._idle:
            if follower.told_at + PROGRESS_S > now:
                return follower.told_at + PROGRESS_S
            del self._idle[follower]
            self._queue.append(follower)
        return now + PROGRESS_S

    def _set_alarm(self, follower: Follower, due: float) -> None:
        self._joined += 1  # no two entries are equal
        heappush(self._alarms, (due, self._joined, follower))

    def _schedule_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        due = [follower.rests_until for follower in itertools.islice(self._resting, 1)]
        due += [at for at, _, _ in self._alarms[:1]]
        if due:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_at(min(due), self._schedule_turn)


WATCHERS_MAX = 1_000
"""Maximum number of watches that one controller serves."""

WATCHERS_PER_PRINCIPAL = 16
"""Maximum number of watches of one principal."""

_RETRY_MS = 1_000

ABORT_PATIENCE_S = 5.0
"""Maximum time to send the status that cuts off a stuck connection, in seconds."""

_KINDS = {
    pb.ENTITY_KIND_STREAM: Kind.STREAM,
    pb.ENTITY_KIND_OBJECT: Kind.OBJECT,
    pb.ENTITY_KIND_NODE: Kind.NODE,
    pb.ENTITY_KIND_KV: Kind.KV,
}


class WatchHandler:
    """Handler of MetadataService.Watch. Answers are bytes."""

    def __init__(self, changes: ChangeFeed) -> None:
        self._changes = changes
        self._fanout = Fanout(changes)
        self._places = Places("watches", _RETRY_MS)

    async def watch(self, request: pb.WatchRequest, context: Context) -> None:
        """Serve one watch until its caller leaves, it is cut off, or it needs a snapshot."""
        try:
            selection = read_selection(request)
            cursor = _cursor(self._changes, request)
            given = current_quota().watches
            with (
                self._places.taken(
                    current_holder(),
                    per_holder=WATCHERS_PER_PRINCIPAL if given is None else given,
                    in_all=WATCHERS_MAX,
                ),
                self._fanout.following(
                    selection, cursor, combines=request.may_combine, is_typed=request.typed
                ) as follower,
            ):
                if request.from_now:
                    # Without its position the caller could not resume after a failure.
                    await context.write(self._fanout.messages.progress(cursor.next_offset))
                await self._follow(follower, context)
        except WatcherTooSlowError as error:
            # A message that is stuck permanently delays the status after it.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(abort(context, error), ABORT_PATIENCE_S)
        except Exception as error:  # noqa: BLE001 - every failure of a call is a status
            await abort(context, error)

    async def _follow(self, follower: Follower, context: Context) -> None:
        cursor = follower.cursor
        was_lost = cursor.is_lost
        while (message := await follower.next()) is not None:
            await follower.send(context.write(message))
        if not (was_lost or cursor.is_replaced or follower.needs_snapshot):
            raise WatcherTooSlowError(cursor.next_offset)
        messages = self._fanout.messages
        await context.write(messages.progress(cursor.next_offset, snapshot_required=True))


def read_selection(request: pb.WatchRequest) -> Selection:
    """Return the selection that a watch asks for.

    Raises:
        InvalidRequestError: a kind is unknown, an id negative, or there are too many ids or
            prefixes.
    """
    for limit in facts_of("MetadataService.Watch").request_lists:
        if (count := len(getattr(request, limit.field))) > limit.most:
            raise InvalidRequestError(
                limit.field, f"got {count}, at most {limit.most}. Leave the field empty to get all"
            )

    for field, ids in (("stream_ids", request.stream_ids), ("node_ids", request.node_ids)):
        if any(entity_id < 0 for entity_id in ids):
            raise InvalidRequestError(field, f"{min(ids)}, must be 0 or more")

    for kind in request.kinds:
        if kind not in _KINDS:
            raise InvalidRequestError("kinds", f"{kind} is not a known kind of entity")

    return Selection(
        kinds=frozenset(_KINDS[kind] for kind in request.kinds),
        stream_ids=frozenset(request.stream_ids),
        node_ids=frozenset(request.node_ids),
        kv_prefixes=frozenset((chosen.namespace, chosen.prefix) for chosen in request.kv_prefixes),
    )


def _cursor(changes: ChangeFeed, request: pb.WatchRequest) -> Cursor:
    from_offset = request.from_offset
    if from_offset < 0:
        raise InvalidRequestError("from_offset", f"{from_offset}, must be 0 or more")
    if request.from_now and from_offset:
        raise InvalidRequestError("from_offset", f"{from_offset}, must be 0 with from_now")
    return changes.cursor(changes.end_offset if request.from_now else from_offset)
