"""MetadataService.Watch: sends what is committed here, as it is committed, to who follows it.

Reads the request and ends the call; `watch_fanout` decides when a watcher is served, and
`watch_messages` what is sent. When the ring has moved beyond what a watcher was to get next, it is
cut off and told where to resume. Any controller answers, leader or not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from streammeta.controller.errors import BusyError, InvalidRequestError
from streammeta.controller.records.selection import Kind, Selection
from streammeta.controller.rpc.status import Context, abort
from streammeta.controller.rpc.watch_fanout import Fanout, Follower
from streammeta.controller.runtime.change_feed import ChangeFeed, Cursor, WatcherTooSlowError
from streammeta.v1 import metadata_pb2 as pb

WATCHERS_MAX = 1_000
"""Watchers that one controller serves at a time."""

ABORT_PATIENCE_S = 5.0
"""How long a stuck connection may take the status that cuts it off before it is dropped."""

IDS_MAX = 10_000
"""Most stream ids, and most node ids, of one watch."""

_KINDS = {
    pb.ENTITY_KIND_STREAM: Kind.STREAM,
    pb.ENTITY_KIND_OBJECT: Kind.OBJECT,
    pb.ENTITY_KIND_NODE: Kind.NODE,
    pb.ENTITY_KIND_KV: Kind.KV,
}


class WatchHandler:
    """Serves all watchers of this controller; messages out are bytes."""

    def __init__(self, changes: ChangeFeed) -> None:
        self._changes = changes
        self._fanout = Fanout(changes)
        self._watchers = 0

    async def watch(self, request: pb.WatchRequest, context: Context) -> None:
        """Serve one watcher until it leaves, is cut off, or needs a snapshot."""
        try:
            selection = read_selection(request)
            cursor = _cursor(self._changes, request.from_offset)
            with (
                self._counted(),
                self._fanout.following(selection, request.may_combine, cursor) as follower,
            ):
                await self._follow(follower, context)
        except WatcherTooSlowError as error:
            # What is being sent may be stuck for good, and then so is the status behind it.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(abort(context, error), ABORT_PATIENCE_S)
        except Exception as error:  # noqa: BLE001 - every failure of a call is a status
            await abort(context, error)

    async def _follow(self, follower: Follower, context: Context) -> None:
        cursor = follower.cursor
        was_lost = cursor.is_lost
        while (message := await follower.next()) is not None:
            await follower.send(context.write(message))
        if not was_lost and not cursor.is_replaced:
            raise WatcherTooSlowError(cursor.next_offset)
        messages = self._fanout.messages
        await context.write(messages.progress(cursor.next_offset, snapshot_required=True))

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        if self._watchers >= WATCHERS_MAX:
            raise BusyError(
                f"{self._watchers} watchers follow this controller already; watch another one"
            )
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1


def read_selection(request: pb.WatchRequest) -> Selection:
    """Return what a watch asks for.

    Raises:
        InvalidRequestError: a kind is unknown, an id negative, or there are too many ids.
    """
    for field, ids in (("stream_ids", request.stream_ids), ("node_ids", request.node_ids)):
        if len(ids) > IDS_MAX:
            raise InvalidRequestError(
                field, f"{len(ids)} ids, at most {IDS_MAX}; leave the field empty to get all"
            )
        if any(each < 0 for each in ids):
            raise InvalidRequestError(field, f"{min(ids)}; an id is 0 or more")
    for kind in request.kinds:
        if kind not in _KINDS:
            raise InvalidRequestError("kinds", f"{kind} is no kind of entity known here")
    return Selection(
        kinds=frozenset(_KINDS[kind] for kind in request.kinds),
        stream_ids=frozenset(request.stream_ids),
        node_ids=frozenset(request.node_ids),
    )


def _cursor(changes: ChangeFeed, from_offset: int) -> Cursor:
    if from_offset < 0:
        raise InvalidRequestError("from_offset", f"{from_offset}; an offset is 0 or more")
    return changes.cursor(from_offset)
