"""Broker session: the registered process of a node, its heartbeats, and the streams it opens.

Owns registration, the batching of stream operations, and the heartbeats that keep the session
alive. Every item of a batch has its own outcome: one refused stream neither hides nor undoes the
others. A node that has sent a heartbeat is fenced when it falls silent for the session timeout, and
its open streams are recovered by others. Knows nothing of records and objects.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Self, TypeVar

from streammeta.client import arguments, errors
from streammeta.client.controllers import methods
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.model import (
    HeartbeatAnswer,
    NodeIdentity,
    Recovery,
    heartbeat_answer,
    node_message,
)
from streammeta.client.nodes.process_id import own_process_id
from streammeta.client.resources.resources import ClosedAtExit, warn_unclosed
from streammeta.v1 import common_pb2, nodes_pb2, streams_pb2

_BATCH = 5_000
_EPOCHS = "the epochs with which the streams are opened, such as {7: 1}"

ItemT = TypeVar("ItemT")
DoneT = TypeVar("DoneT")
Tags = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class OpenedStream:
    """A stream this node owns: epoch, first visible offset, and where the next commit starts."""

    stream_id: int
    epoch: int
    start_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Outcomes(Generic[DoneT]):
    """What happened to each stream of a batch: an entry in `done` or in `failed`, by stream id."""

    done: dict[int, DoneT] = field(default_factory=dict)
    failed: dict[int, errors.RefusedError] = field(default_factory=dict)

    def require_all(self) -> dict[int, DoneT]:
        """Return `done` if nothing failed; otherwise raise the failure of the smallest id."""
        if self.failed:
            raise self.failed[min(self.failed)]
        return self.done


@dataclass(frozen=True, eq=False)
class BrokerSession:
    """One registered process of a node. Make it with `open`.

    It calls with `client`, and `node` fences every mutating call of the process. `namespace` is in
    the keys of the cluster's objects. `inherited` are the streams that an earlier process of the
    node left open, by id, under new epochs. `timeout_s` is the session that its heartbeats ask for,
    in seconds, 0 for the longest that the controllers give.
    """

    client: ControllerClient
    node: NodeIdentity
    namespace: str
    inherited: tuple[OpenedStream, ...] = ()
    timeout_s: float = 0.0

    @classmethod
    async def open(
        cls,
        client: ControllerClient,
        node_id: int,
        node_epoch: int,
        *,
        wal_config: str = "",
        tags: Tags | None = None,
        timeout_s: float = 0.0,
    ) -> BrokerSession:
        """Register the process `node_epoch` of node `node_id`; older processes are fenced.

        `node_epoch` grows with each start, for example the start time in ms. Raises
        `NodeEpochExpiredError` when a newer process has registered, or another one with this epoch.
        """
        arguments.check_client(client)
        arguments.check_int("node_id", node_id, 0, arguments.INT32_MAX)
        arguments.check_int("node_epoch", node_epoch)
        arguments.check_seconds("timeout_s", timeout_s, may_be_zero=True)
        arguments.check_kind("wal_config", wal_config, str, "a str")
        node = NodeIdentity(node_id, node_epoch)
        await _register(client, node, wal_config, tags)
        listed = await _opening_streams(client, node)
        namespace = await client.object_namespace()
        session = cls(client, node, namespace, (), timeout_s)
        return replace(session, inherited=await session._take_over(listed))

    async def register_log(self, wal_config: str, tags: Tags | None = None) -> None:
        """Replace the registered place of the write-ahead log, and the tags."""
        await _register(self.client, self.node, wal_config, tags)

    async def _take_over(self, streams: Sequence[OpenedStream]) -> tuple[OpenedStream, ...]:
        """Open what an earlier process left open under the next epochs, before anything is written.

        So the offsets that this process writes are never taken for those of an earlier one, whose
        write-ahead log may come back.
        """
        outcomes = await self.open_streams({one.stream_id: one.epoch + 1 for one in streams})
        for _, failure in sorted(outcomes.failed.items()):
            if not isinstance(failure, errors.StreamNotFoundError):  # it was deleted meanwhile
                raise failure
        return tuple(outcomes.done.values())

    async def heartbeat(
        self, *, wants_shutdown: bool = False, closes: bool = False, deadline_s: float | None = None
    ) -> HeartbeatAnswer:
        """Keep the node's session alive; the answer says for how long.

        With `closes` the process ends in good order, so that its silence raises no alarm.
        """
        request = nodes_pb2.HeartbeatRequest(
            node=node_message(self.node),
            wants_shutdown=wants_shutdown,
            closes=closes,
            session_timeout_ms=round(self.timeout_s * 1000),
        )
        answer = await self.client.call(methods.HEARTBEAT, request, deadline_s)
        _check(answer.error, f"heartbeat of node {self.node.node_id}")
        return heartbeat_answer(answer)

    async def create_streams(self, tags: Sequence[Tags]) -> list[int]:
        """Create a closed, empty stream for each element of `tags`; return their ids in order."""
        wanted = 'a sequence with the tags of each stream, such as [{"topic": "example"}]'
        streams = [
            arguments.check_tags(f"tags[{i}]", one)
            for i, one in enumerate(arguments.check_items("tags", tags, wanted))
        ]
        ids: list[int] = []
        for batch in _batches(streams):
            new = [streams_pb2.NewStream(tags=_tags(one)) for one in batch]
            answer = await self._answer(methods.CREATE_STREAMS, new)
            _check(answer.error, f"creation of {len(batch)} streams")
            _same_length("CreateStreams", len(batch), len(answer.stream_ids))
            ids.extend(answer.stream_ids)
        return ids

    async def open_streams(self, epochs: Mapping[int, int]) -> Outcomes[OpenedStream]:
        """Open each stream of `epochs` (stream id to stream epoch) for this node.

        A stream that this node has open begins another range under a larger epoch: its earlier
        range ends with what is committed, and whatever was under way for it is not.
        """
        outcomes: Outcomes[OpenedStream] = Outcomes()
        wanted = _epochs_of(partial(streams_pb2.StreamToOpen, reopen=True), epochs)
        for batch in _batches(wanted):
            answer = await self._answer(methods.OPEN_STREAMS, batch)
            _same_length("OpenStreams", len(batch), len(answer.streams))
            for stream, one in zip(batch, answer.streams, strict=True):
                stream_id, epoch = stream.stream_id, stream.stream_epoch
                if one.error != common_pb2.ERROR_CODE_NONE:
                    outcomes.failed[stream_id] = errors.refusal(
                        one.error, f"opening stream {stream_id} at epoch {epoch}"
                    )
                    continue
                outcomes.done[stream_id] = OpenedStream(
                    stream_id, epoch, one.start_offset, one.next_offset
                )
        return outcomes

    async def close_streams(self, epochs: Mapping[int, int]) -> Outcomes[None]:
        """Close streams of which everything acknowledged is committed; `epochs` as when opened."""
        streams = _epochs_of(streams_pb2.StreamToClose, epochs)
        return await self._change(methods.CLOSE_STREAMS, "closing", streams)

    async def trim_streams(
        self,
        epochs: Mapping[int, int],
        new_starts: Mapping[int, int],
        appended_ends: Mapping[int, int] | None = None,
    ) -> Outcomes[int]:
        """Move the first visible offset of each stream of `new_starts` forward.

        A trim ends at the stream's committed end at the latest, or at its offset in
        `appended_ends` if that is larger: the end of what its writer has appended. So no writer
        continues below a start. `done` has the offset at which each stream starts now.
        """
        starts = arguments.check_int_mapping("new_starts", new_starts, "new start offsets")
        known = arguments.check_int_mapping("epochs", epochs, _EPOCHS)
        if missing := starts.keys() - known.keys():
            raise ValueError(f"epochs has no stream {min(missing)}, which new_starts names")
        ends = arguments.check_int_mapping("appended_ends", appended_ends or {}, "end offsets")
        streams = [
            streams_pb2.StreamToTrim(
                stream_id=stream_id,
                stream_epoch=known[stream_id],
                new_start_offset=start,
                appended_end_offset=ends.get(stream_id, 0),
            )
            for stream_id, start in sorted(starts.items())
        ]
        outcomes: Outcomes[int] = Outcomes()
        for batch in _batches(streams):
            answer = await self._answer(methods.TRIM_STREAMS, batch)
            _note_trims(outcomes, batch, answer)
        return outcomes

    async def delete_streams(self, epochs: Mapping[int, int]) -> Outcomes[None]:
        """Delete closed streams for good, with all their data."""
        streams = _epochs_of(streams_pb2.StreamToDelete, epochs)
        return await self._change(methods.DELETE_STREAMS, "deleting", streams)

    async def _change(
        self, method: methods.Method[Any, Any], doing: str, streams: Sequence[Any]
    ) -> Outcomes[None]:
        """Call `method`, whose answer has an error code for each stream, batch by batch."""
        outcomes: Outcomes[None] = Outcomes()
        for batch in _batches(streams):
            answer = await self._answer(method, batch)
            _same_length(method.name, len(batch), len(answer.errors))
            for one, code in zip(batch, answer.errors, strict=True):
                if code == common_pb2.ERROR_CODE_NONE:
                    outcomes.done[one.stream_id] = None
                else:
                    outcomes.failed[one.stream_id] = errors.refusal(
                        code, f"{doing} stream {one.stream_id}"
                    )
        return outcomes

    async def _answer(self, method: methods.Method[Any, Any], streams: Sequence[Any]) -> Any:
        request = method.request(node=node_message(self.node), streams=streams)
        return await self.client.call(method, request)


async def _register(
    client: ControllerClient, node: NodeIdentity, wal_config: str, tags: Tags | None
) -> None:
    request = nodes_pb2.RegisterNodeRequest(
        node=node_message(node),
        wal_config=wal_config,
        process_id=own_process_id(),
        tags=_tags(arguments.check_tags("tags", {} if tags is None else tags)),
    )
    answer = await client.call(methods.REGISTER_NODE, request)
    _check(answer.error, f"registration of node {node.node_id} at epoch {node.node_epoch}")


async def _opening_streams(client: ControllerClient, node: NodeIdentity) -> list[OpenedStream]:
    """List what an earlier process of the node left open; the first page registers the epoch."""
    streams: list[OpenedStream] = []
    request = streams_pb2.GetOpeningStreamsRequest(node=node_message(node))
    async for answer in client.pages(methods.GET_OPENING_STREAMS, request):
        _check(answer.error, f"open streams of node {node.node_id} at epoch {node.node_epoch}")
        streams.extend(
            OpenedStream(one.stream_id, one.epoch, one.start_offset, one.end_offset)
            for one in answer.streams
            if not one.HasField("upload_end_offset")  # closed fast: it owes an upload
        )
    return streams


def _note_trims(
    outcomes: Outcomes[int],
    trims: Sequence[streams_pb2.StreamToTrim],
    answer: streams_pb2.TrimStreamsResponse,
) -> None:
    """Note the outcome of each trim."""
    _same_length("TrimStreams", len(trims), len(answer.errors))
    # A leader of an older version trims as far as it is asked to, and does not say where.
    starts = answer.start_offsets or [trim.new_start_offset for trim in trims]
    _same_length("TrimStreams", len(trims), len(starts))
    for trim, code, start in zip(trims, answer.errors, starts, strict=True):
        if code == common_pb2.ERROR_CODE_NONE:
            outcomes.done[trim.stream_id] = start
        else:
            outcomes.failed[trim.stream_id] = errors.refusal(
                code, f"trimming stream {trim.stream_id}"
            )


def _batches(items: Sequence[ItemT]) -> Iterator[Sequence[ItemT]]:
    """Cut `items` so that one request stays well below the limits of the contract."""
    return (items[i : i + _BATCH] for i in range(0, len(items), _BATCH))


def _epochs_of(kind: Callable[..., ItemT], epochs: Mapping[int, int]) -> list[ItemT]:
    """Make a message for each stream, by id."""
    by_id = sorted(arguments.check_int_mapping("epochs", epochs, _EPOCHS).items())
    return [kind(stream_id=stream_id, stream_epoch=epoch) for stream_id, epoch in by_id]


def _tags(tags: Tags) -> list[common_pb2.Tag]:
    return [common_pb2.Tag(key=key, value=value) for key, value in sorted(tags.items())]


def _check(code: common_pb2.ErrorCode.ValueType, subject: str) -> None:
    if code != common_pb2.ERROR_CODE_NONE:
        raise errors.refusal(code, subject)


def _same_length(method: str, wanted: int, got: int) -> None:
    if wanted != got:
        raise errors.ProtocolViolationError(method, detail=f"{got} rows answer {wanted} items")


FIRST_INTERVAL_S = 2.0
"""Time between heartbeats until an answer says how long a session lasts."""

LAST_BEAT_S = 0.5
"""Time for the heartbeat by which a process that ends says so, in seconds."""

HEARTBEATS_PER_SESSION = 4
"""So many fit into one session timeout: three may be lost."""

_log = logging.getLogger(__name__)


class Heartbeat(ClosedAtExit):
    """Sends a session's heartbeats from `start`, or entering its context, to `close`.

    `on_taken_over` is called with the refusal when this process no longer holds its node id. The
    last answer says whose data this node is to recover (`recoveries`), and which departed nodes'
    objects it is to compact (`compactions`). Each answer that names recoveries sets `assigned`.
    """

    def __init__(
        self,
        session: BrokerSession,
        on_taken_over: Callable[[errors.BrokerClientError], None],
        rng: random.Random | None = None,
    ) -> None:
        arguments.check_session(session)
        arguments.check_callable(
            "on_taken_over", on_taken_over, "a function of one argument, the refusal"
        )
        self._session = session
        self._on_taken_over = on_taken_over
        self._rng = rng or random.Random()
        self._interval_s = FIRST_INTERVAL_S
        self.recoveries: tuple[Recovery, ...] = ()
        self.compactions: tuple[NodeIdentity, ...] = ()
        self.assigned = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._is_of_use = True

    def __del__(self) -> None:
        if getattr(self, "_task", None) is not None and not self._is_stopped:
            node = self._session.node
            warn_unclosed(
                self,
                f"the heartbeats of node {node.node_id}, which is fenced when they are missed",
                "`await heartbeat.close()` when its streams are closed",
            )

    def start(self) -> None:
        """Begin, at once with a first heartbeat, unless it has begun."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def close(self, *, cleanly: bool = True) -> None:
        """Send no more heartbeats; the last one tells the controllers that this is on purpose.

        It is sent once, unless the process was taken over or does not end `cleanly`; without it an
        alarm names the node when its session ends.
        """
        is_last = self._task is not None and self._is_of_use and not self._is_stopped
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if is_last and cleanly:
            try:
                await self._session.heartbeat(closes=True, deadline_s=LAST_BEAT_S)
            except Exception as error:  # noqa: BLE001 - an alarm more, and no failure to close
                _log.info("the controllers were not told of the end: %s", error)

    async def _run(self) -> None:
        while self._is_of_use:
            self._is_of_use = await self._beat()
            await asyncio.sleep(self._interval_s * self._rng.uniform(0.9, 1.1))

    async def _beat(self) -> bool:
        """Send one; return whether there is any use in the next."""
        try:
            answer = await self._session.heartbeat()
        except errors.ControllerUnavailableError as error:
            _log.warning("no heartbeat got through: %s", error)
        except (
            errors.NodeEpochExpiredError,
            errors.NodeFencedError,
            errors.NodeNotRegisteredError,
        ) as error:
            _log.warning("the node was taken over: %s", error)
            self._on_taken_over(error)
            return False
        except (errors.ClientClosedError, errors.UnsupportedError):
            return False  # no client to send with, or controllers without sessions
        except errors.BrokerClientError as error:
            _log.warning("a heartbeat was refused: %s", error)
        except Exception:  # noqa: BLE001 - without heartbeats the node is fenced
            _log.exception("a heartbeat failed unexpectedly, the next one follows")
        else:
            if answer.session_timeout_s > 0:
                self._interval_s = answer.session_timeout_s / HEARTBEATS_PER_SESSION
            self.recoveries = answer.recoveries
            self.compactions = answer.compactions
            if answer.recoveries:
                self.assigned.set()
        return True
