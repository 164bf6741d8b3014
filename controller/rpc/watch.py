"""MetadataService.Watch: sends what is committed here, as it is committed, to who follows it.

A watcher costs a cursor and the one message that is being sent: nothing waits for a slow
connection. When the ring has moved beyond what a watcher was to get next, he is cut off and told
where to resume. Any controller answers, whoever leads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from controller.errors import BusyError, InvalidRequestError
from controller.loop.change_feed import ChangeFeed, Cursor, WatcherTooSlowError
from controller.records.codec import decode_records, encode_records
from controller.records.selection import Kind, Selection, select
from controller.rpc.status import Context, abort
from proto import metadata_pb2 as pb

WATCHERS_MAX = 1_000
"""Watchers that one controller serves at a time."""

PROGRESS_S = 1.0
"""A watcher hears at least so often how far he has come."""

ABORT_PATIENCE_S = 5.0
"""How long a stuck connection may take the status that cuts it off before it is dropped."""

IDS_MAX = 10_000
"""Most stream ids, and most node ids, of one watch."""

_EXAMINED_PER_TURN = 64
"""Entries that are looked at for one watcher before others get their turn of the event loop."""

_KINDS = {
    pb.ENTITY_KIND_STREAM: Kind.STREAM,
    pb.ENTITY_KIND_OBJECT: Kind.OBJECT,
    pb.ENTITY_KIND_NODE: Kind.NODE,
    pb.ENTITY_KIND_KV: Kind.KV,
}


class WatchHandler:
    """Serves all watchers of this controller."""

    def __init__(self, changes: ChangeFeed) -> None:
        self._changes = changes
        self._watchers = 0

    async def watch(self, request: pb.WatchRequest, context: Context) -> None:
        """Serve one watcher until he leaves, is cut off, or needs a snapshot."""
        try:
            watcher = _Watcher(self._changes, request, context)
            with self._counted():
                await watcher.follow()
        except WatcherTooSlowError as error:
            # What is being sent may be stuck for good, and then so is the status behind it.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(abort(context, error), ABORT_PATIENCE_S)
        except Exception as error:  # noqa: BLE001 - every failure of a call is a status
            await abort(context, error)

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


class _Watcher:
    """One call: what it asks for and how far it has come."""

    def __init__(self, changes: ChangeFeed, request: pb.WatchRequest, context: Context) -> None:
        self._changes = changes
        self._selection = read_selection(request)
        self._cursor = _cursor(changes, request.from_offset)
        self._context = context
        self._told_at = asyncio.get_running_loop().time()

    async def follow(self) -> None:
        if not self._cursor.is_lost:
            await self._send_changes()
            if not self._cursor.is_replaced:
                raise WatcherTooSlowError(self._cursor.next_offset)
        await self._send(self._response(snapshot_required=True))

    async def _send_changes(self) -> None:
        """Go on until what comes next is gone before it was sent."""
        examined = 0
        while not self._cursor.is_lost:
            change = self._cursor.advance()
            if change is None:
                await self._wait_for_news()
                continue
            records = cut_payload(change.payload, self._selection)
            if records:
                await self._send(self._response(records=records))
            elif self._progress_is_due_in() <= 0:
                await self._send(self._response())
            examined += 1
            if examined % _EXAMINED_PER_TURN == 0:
                await asyncio.sleep(0)

    async def _wait_for_news(self) -> None:
        patience_s = self._progress_is_due_in()
        if patience_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._changes.news()
                return
        await self._send(self._response())

    def _progress_is_due_in(self) -> float:
        return self._told_at + PROGRESS_S - asyncio.get_running_loop().time()

    def _response(self, records: bytes = b"", snapshot_required: bool = False) -> pb.WatchResponse:
        """Without records it only says how far the watcher has come: to the offset before next."""
        return pb.WatchResponse(
            offset=self._cursor.next_offset - 1,
            high_watermark=self._changes.end_offset,
            records=records,
            snapshot_required=snapshot_required,
        )

    async def _send(self, response: pb.WatchResponse) -> None:
        sending = asyncio.ensure_future(self._context.write(response))
        try:
            while not sending.done():
                await asyncio.wait({sending}, timeout=PROGRESS_S)
                if not sending.done() and self._cursor.is_lost and not response.snapshot_required:
                    raise WatcherTooSlowError(self._cursor.next_offset)
        except BaseException:
            sending.add_done_callback(_forget_failure)
            raise
        sending.result()
        self._told_at = asyncio.get_running_loop().time()


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
        if kind != pb.ENTITY_KIND_ALL and kind not in _KINDS:
            raise InvalidRequestError("kinds", f"{kind} is no kind of entity known here")
    takes_all = pb.ENTITY_KIND_ALL in request.kinds
    return Selection(
        kinds=frozenset() if takes_all else frozenset(_KINDS[kind] for kind in request.kinds),
        stream_ids=frozenset(request.stream_ids),
        node_ids=frozenset(request.node_ids),
    )


def cut_payload(payload: bytes, selection: Selection) -> bytes:
    """Return the part of a log entry that is asked for, as a RecordSet; empty if there is none."""
    if selection.is_everything:
        return payload
    records = decode_records(payload)
    chosen = select(records, selection)
    if chosen is None:
        return b""
    unchanged = len(chosen) == len(records) and all(map(_is, chosen, records))
    return payload if unchanged else encode_records(chosen)


def _is(one: object, other: object) -> bool:
    return one is other


def _cursor(changes: ChangeFeed, from_offset: int) -> Cursor:
    if from_offset < 0:
        raise InvalidRequestError("from_offset", f"{from_offset}; an offset is 0 or more")
    return changes.cursor(from_offset)


def _forget_failure(sending: asyncio.Future[None]) -> None:
    if not sending.cancelled():
        sending.exception()
