"""Broker session: the registered process of a node, its heartbeats, and the streams it opens.

Owns registration, the batching of stream operations, and the heartbeats that keep the session
alive. Every item of a batch has its own outcome: a rejected stream neither hides nor undoes the
others. A node that has sent a heartbeat is fenced after a silence of the session timeout, and other
brokers recover its open streams. Knows nothing of records and objects.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Self, TypeVar

from streammeta.client import arguments, errors, model
from streammeta.client.controllers import methods
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.nodes.created_streams import require_shared
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
    """A stream that this node owns: epoch, first visible offset, and start of the next commit."""

    stream_id: int
    epoch: int
    start_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Outcomes(Generic[DoneT]):
    """Outcome of each stream of a batch: an entry in `done` or in `failed`, by stream id."""

    done: dict[int, DoneT] = field(default_factory=dict)
    failed: dict[int, errors.RejectedError] = field(default_factory=dict)

    def require_all(self) -> dict[int, DoneT]:
        """Return `done` if nothing failed. Otherwise raise the failure of the smallest id."""
        if self.failed:
            raise self.failed[min(self.failed)]
        return self.done


@dataclass(frozen=True, eq=False)
class BrokerSession:
    """One registered process of a node. Create it with `open`.

    It calls the controllers with `client`, and `node` fences every mutating call of the process.
    `namespace` is in the keys of the cluster's objects. `inherited` are the streams that an earlier
    process of the node left open, under new epochs, by id. `timeout_s` is the session timeout that
    the heartbeats request, in seconds, 0 for the longest that the controllers allow.
    """

    client: ControllerClient
    node: model.NodeIdentity
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
        """Register the process `node_epoch` of node `node_id`. Older processes are fenced.

        `node_epoch` grows with each start, for example the start time in ms. Raises
        `NodeEpochExpiredError` when a newer process, or another one with this epoch, has
        registered.
        """
        arguments.check_client(client)
        arguments.check_int("node_id", node_id, 0, arguments.INT32_MAX)
        arguments.check_int("node_epoch", node_epoch)
        arguments.check_seconds("timeout_s", timeout_s, may_be_zero=True)
        arguments.check_kind("wal_config", wal_config, str, "a str")
        node = model.NodeIdentity(node_id, node_epoch)

        await _register(client, node, wal_config, tags)
        listed = await _list_opening_streams(client, node)
        namespace = await client.object_namespace()
        # Without inherited streams at first: opening them needs a session.
        session = cls(client, node, namespace, (), timeout_s)
        return replace(session, inherited=await session._take_over(listed))

    async def register_log(self, wal_config: str, tags: Tags | None = None) -> None:
        """Replace the registered place of the write-ahead log, and the tags."""
        await _register(self.client, self.node, wal_config, tags)

    async def _take_over(self, streams: Sequence[OpenedStream]) -> tuple[OpenedStream, ...]:
        """Open an earlier process's open streams under the next epochs, before any write.

        So the offsets that this process writes are never mistaken for offsets of an earlier
        process, whose write-ahead log may come back.
        """
        epochs = {stream.stream_id: stream.epoch + 1 for stream in streams}
        outcomes = await self.open_streams(epochs)
        for _, failure in sorted(outcomes.failed.items()):
            # Another process may have deleted a stream meanwhile.
            if not isinstance(failure, errors.StreamNotFoundError):
                raise failure
        return tuple(outcomes.done.values())

    async def heartbeat(
        self, *, wants_shutdown: bool = False, closes: bool = False, deadline_s: float | None = None
    ) -> model.HeartbeatAnswer:
        """Extend the node's session. The answer has its timeout.

        With `closes` the process announces its orderly end, so that its silence raises no alarm.
        """
        request = nodes_pb2.HeartbeatRequest(
            node=model.node_message(self.node),
            wants_shutdown=wants_shutdown,
            closes=closes,
            session_timeout_ms=round(self.timeout_s * 1000),
        )
        answer = await self.client.call(methods.HEARTBEAT, request, deadline_s)
        _check(answer.error, f"heartbeat of node {self.node.node_id}")
        return model.heartbeat_answer(answer)

    async def create_streams(self, tags: Sequence[Tags], *, shared: bool = False) -> list[int]:
        """Create an empty stream for each element of `tags`. Return their ids in order.

        The streams are owned and closed, or with `shared` accept appends of all brokers at once.
        Raises `RejectedError` for shared streams below feature level 5.
        """
        wanted = 'a sequence with the tags of each stream, such as [{"topic": "example"}]'
        streams = [
            arguments.check_tags(f"tags[{index}]", stream_tags)
            for index, stream_tags in enumerate(arguments.check_items("tags", tags, wanted))
        ]

        ids: list[int] = []
        for batch in _batches(streams):
            new = [streams_pb2.NewStream(tags=_tags(item), shared=shared) for item in batch]
            answer = await self._call(methods.CREATE_STREAMS, new)
            _check(answer.error, f"creation of {len(batch)} streams")
            _check_length("CreateStreams", len(batch), len(answer.stream_ids))
            ids.extend(answer.stream_ids)
            if shared:
                await require_shared(self.client, answer.stream_ids, self.delete_streams)
        return ids

    async def open_streams(self, epochs: Mapping[int, int]) -> Outcomes[OpenedStream]:
        """Open each stream of `epochs` (stream id to stream epoch) for this node.

        A stream that this node already has open begins another range under a larger epoch. Its
        earlier range ends with its committed records. Commits in flight for it fail.
        """
        outcomes: Outcomes[OpenedStream] = Outcomes()
        # `reopen` lets a restarted node continue its own streams under a larger epoch.
        wanted = _epochs_of(partial(streams_pb2.StreamToOpen, reopen=True), epochs)

        for batch in _batches(wanted):
            answer = await self._call(methods.OPEN_STREAMS, batch)
            _check_length("OpenStreams", len(batch), len(answer.streams))
            for stream, result in zip(batch, answer.streams, strict=True):
                stream_id, epoch = stream.stream_id, stream.stream_epoch
                if result.error != common_pb2.ERROR_CODE_NONE:
                    outcomes.failed[stream_id] = errors.rejection(
                        result.error, f"opening stream {stream_id} at epoch {epoch}"
                    )
                    continue
                outcomes.done[stream_id] = OpenedStream(
                    stream_id, epoch, result.start_offset, result.next_offset
                )
        return outcomes

    async def close_streams(
        self, epochs: Mapping[int, int], *, of: model.NodeIdentity | None = None
    ) -> Outcomes[None]:
        """Close streams whose acknowledged records are all committed, at their `epochs`.

        They are streams of this node, or `of` a node that this one is to recover.
        """
        streams = _epochs_of(streams_pb2.StreamToClose, epochs)
        return await self._change(methods.CLOSE_STREAMS, "closing", streams, of)

    async def list_streams_of(self, node: model.NodeIdentity) -> list[OpenedStream]:
        """Fence a node that this one is to recover. Return its open streams.

        Streams with a pending upload are left out: only a process that reads the node's
        write-ahead log may close them. Raises `NodeFencedError` if another node is to recover it,
        and `NodeEpochExpiredError` if a newer process of the node has registered.
        """
        return await _list_opening_streams(self.client, node, self.node)

    async def trim_streams(
        self,
        epochs: Mapping[int, int],
        new_starts: Mapping[int, int],
        appended_ends: Mapping[int, int] | None = None,
    ) -> Outcomes[int]:
        """Move the first visible offset of each stream of `new_starts` forward.

        A trim stops at the stream's committed end, or at its offset in `appended_ends` if that is
        larger: the end of its writer's appends. So no writer continues below a start. `done` has
        the resulting start offset of each stream.
        """
        starts = arguments.check_int_mapping("new_starts", new_starts, "new start offsets")
        known = arguments.check_int_mapping("epochs", epochs, _EPOCHS)
        # Trimming at an unknown epoch would bypass the fence.
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
            answer = await self._call(methods.TRIM_STREAMS, batch)
            _note_trims(outcomes, batch, answer)
        return outcomes

    async def delete_streams(self, epochs: Mapping[int, int | None]) -> Outcomes[None]:
        """Delete closed streams permanently, with all their data.

        The epoch of a stream that was never opened is None. A stream that does not exist counts as
        deleted.
        """
        # The contract writes -1 for no epoch.
        opened = {stream_id: epoch for stream_id, epoch in epochs.items() if epoch is not None}
        streams = _epochs_of(streams_pb2.StreamToDelete, opened) + [
            streams_pb2.StreamToDelete(stream_id=stream_id, stream_epoch=-1)
            for stream_id in sorted(epochs.keys() - opened.keys())
        ]
        return await self._change(methods.DELETE_STREAMS, "deleting", streams)

    async def issue_producer_ids(self, count: int) -> range:
        """Issue ids for idempotent producers of shared streams, at most 10,000.

        Nobody else gets them. Raises `RejectedError` below feature level 5.
        """
        request = streams_pb2.IssueProducerIdsRequest(
            node=model.node_message(self.node),
            count=arguments.check_int("count", count, 1, 10_000),
        )
        answer = await self.client.call(methods.ISSUE_PRODUCER_IDS, request)
        _check(answer.error, f"issue of {count} producer ids")
        return range(answer.first_producer_id, answer.first_producer_id + count)

    async def _change(
        self,
        method: methods.Method[Any, Any],
        doing: str,
        streams: Sequence[Any],
        recovered: model.NodeIdentity | None = None,
    ) -> Outcomes[None]:
        """Call `method`, whose answer has an error code for each stream, batch by batch."""
        outcomes: Outcomes[None] = Outcomes()
        for batch in _batches(streams):
            answer = await self._call(method, batch, recovered)
            _check_length(method.name, len(batch), len(answer.errors))
            for stream, code in zip(batch, answer.errors, strict=True):
                if code == common_pb2.ERROR_CODE_NONE:
                    outcomes.done[stream.stream_id] = None
                else:
                    outcomes.failed[stream.stream_id] = errors.rejection(
                        code, f"{doing} stream {stream.stream_id}"
                    )
        return outcomes

    async def _call(
        self,
        method: methods.Method[Any, Any],
        streams: Sequence[Any],
        recovered: model.NodeIdentity | None = None,
    ) -> Any:
        request = method.request(node=model.node_message(recovered or self.node), streams=streams)
        # In the name of a fenced node only its recoverer may call.
        if recovered is not None:
            request.recoverer.CopyFrom(model.node_message(self.node))
        return await self.client.call(method, request)


async def _register(
    client: ControllerClient, node: model.NodeIdentity, wal_config: str, tags: Tags | None
) -> None:
    request = nodes_pb2.RegisterNodeRequest(
        node=model.node_message(node),
        wal_config=wal_config,
        # The id rejects a second process that was started with the same epoch.
        process_id=own_process_id(),
        tags=_tags(arguments.check_tags("tags", {} if tags is None else tags)),
    )
    answer = await client.call(methods.REGISTER_NODE, request)
    _check(answer.error, f"registration of node {node.node_id} at epoch {node.node_epoch}")


async def _list_opening_streams(
    client: ControllerClient, node: model.NodeIdentity, recoverer: model.NodeIdentity | None = None
) -> list[OpenedStream]:
    """List the open streams of an earlier process, or of a node that `recoverer` recovers.

    The first page registers the epoch, or fences the node.
    """
    streams: list[OpenedStream] = []
    request = streams_pb2.GetOpeningStreamsRequest(
        node=model.node_message(node),
        failover=recoverer is not None,
        recoverer=None if recoverer is None else model.node_message(recoverer),
    )
    async for answer in client.pages(methods.GET_OPENING_STREAMS, request):
        _check(answer.error, f"open streams of node {node.node_id} at epoch {node.node_epoch}")
        streams.extend(
            OpenedStream(stream.stream_id, stream.epoch, stream.start_offset, stream.end_offset)
            for stream in answer.streams
            # A stream with a pending upload was closed already; only the upload is missing.
            if not stream.HasField("upload_end_offset")
        )
    return streams


def _note_trims(
    outcomes: Outcomes[int],
    trims: Sequence[streams_pb2.StreamToTrim],
    answer: streams_pb2.TrimStreamsResponse,
) -> None:
    """Add the outcome of each trim."""
    _check_length("TrimStreams", len(trims), len(answer.errors))
    # A leader of an older version trims as far as requested, and does not return the offsets.
    starts = answer.start_offsets or [trim.new_start_offset for trim in trims]
    _check_length("TrimStreams", len(trims), len(starts))
    for trim, code, start in zip(trims, answer.errors, starts, strict=True):
        if code == common_pb2.ERROR_CODE_NONE:
            outcomes.done[trim.stream_id] = start
        else:
            outcomes.failed[trim.stream_id] = errors.rejection(
                code, f"trimming stream {trim.stream_id}"
            )


def _batches(items: Sequence[ItemT]) -> Iterator[Sequence[ItemT]]:
    """Split `items` so that one request stays well below the limits of the contract."""
    return (items[i : i + _BATCH] for i in range(0, len(items), _BATCH))


def _epochs_of(kind: Callable[..., ItemT], epochs: Mapping[int, int]) -> list[ItemT]:
    """Build a message for each stream, by id."""
    by_id = sorted(arguments.check_int_mapping("epochs", epochs, _EPOCHS).items())
    return [kind(stream_id=stream_id, stream_epoch=epoch) for stream_id, epoch in by_id]


def _tags(tags: Tags) -> list[common_pb2.Tag]:
    return [common_pb2.Tag(key=key, value=value) for key, value in sorted(tags.items())]


def _check(code: common_pb2.ErrorCode.ValueType, subject: str) -> None:
    if code != common_pb2.ERROR_CODE_NONE:
        raise errors.rejection(code, subject)


def _check_length(method: str, wanted: int, got: int) -> None:
    if wanted != got:
        raise errors.ProtocolViolationError(method, detail=f"{got} rows answer {wanted} items")


FIRST_INTERVAL_S = 2.0
"""Time between heartbeats until an answer has the session timeout, in seconds."""

LAST_BEAT_S = 0.5
"""Deadline of the heartbeat that announces the end of the process, in seconds."""

HEARTBEATS_PER_SESSION = 4
"""Heartbeats per session timeout: three may be lost."""

_log = logging.getLogger(__name__)


class Heartbeat(ClosedAtExit):
    """Sends a session's heartbeats from `start`, or entering its context, to `close`.

    `on_taken_over` is called with the error when this process no longer owns its node id. The last
    answer has the nodes whose data this node is to recover (`recoveries`), and the departed nodes
    whose objects it is to compact (`compactions`). Each answer with recoveries sets `assigned`.
    """

    def __init__(
        self,
        session: BrokerSession,
        on_taken_over: Callable[[errors.BrokerClientError], None],
        rng: random.Random | None = None,
    ) -> None:
        arguments.check_session(session)
        arguments.check_callable(
            "on_taken_over", on_taken_over, "a function of one argument, the error"
        )
        self._session = session
        self._on_taken_over = on_taken_over
        self._rng = rng or random.Random()
        self._interval_s = FIRST_INTERVAL_S
        self.recoveries: tuple[model.Recovery, ...] = ()
        self.compactions: tuple[model.NodeIdentity, ...] = ()
        self.assigned = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._may_beat = True

    def __del__(self) -> None:
        if getattr(self, "_task", None) is not None and not self._is_stopped:
            node = self._session.node
            warn_unclosed(
                self,
                f"the heartbeats of node {node.node_id}, which is fenced when they are missed",
                "`await heartbeat.close()` when its streams are closed",
            )

    def start(self) -> None:
        """Start with an immediate first heartbeat, unless already started."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def close(self, *, cleanly: bool = True) -> None:
        """Send no more heartbeats, except a last one that announces an orderly end.

        It is sent once, unless the process was taken over or does not end `cleanly`. Without it an
        alarm names the node when its session ends.
        """
        # Never for a process that was replaced: the goodbye would be sent in the name of another.
        is_last = self._task is not None and self._may_beat and not self._is_stopped
        self._is_stopped = True
        if self._task is not None:
            # A heartbeat in flight could otherwise arrive after the goodbye.
            self._task.cancel()
            await asyncio.wait([self._task])
        if is_last and cleanly:
            try:
                await self._session.heartbeat(closes=True, deadline_s=LAST_BEAT_S)
            except Exception as error:  # noqa: BLE001 - costs an alarm, not the closing
                _log.info("last heartbeat failed, an alarm may name this node: %s", error)

    async def _run(self) -> None:
        while self._may_beat:
            self._may_beat = await self._beat()
            # Jitter keeps the brokers of a restarted cluster from beating in step.
            await asyncio.sleep(self._interval_s * self._rng.uniform(0.9, 1.1))

    async def _beat(self) -> bool:
        """Send one heartbeat and return whether another one may succeed."""
        try:
            answer = await self._session.heartbeat()
        except errors.ControllerUnavailableError as error:
            _log.warning("heartbeat failed, the next one follows: %s", error)
        except (
            errors.NodeEpochExpiredError,
            errors.NodeFencedError,
            errors.NodeNotRegisteredError,
        ) as error:
            _log.warning("another process or node replaces this one: %s", error)
            self._on_taken_over(error)
            return False
        except (errors.ClientClosedError, errors.UnsupportedError):
            # There is no client to send with, or the controllers have no sessions.
            return False
        except errors.BrokerClientError as error:
            _log.warning("the controllers rejected a heartbeat, the next one follows: %s", error)
        except Exception:  # noqa: BLE001 - without heartbeats the node is fenced
            _log.exception("a heartbeat failed unexpectedly, the next one follows")
        else:
            if answer.session_timeout_s > 0:
                # The controllers may grant another timeout than requested.
                self._interval_s = answer.session_timeout_s / HEARTBEATS_PER_SESSION
            self.recoveries = answer.recoveries
            self.compactions = answer.compactions
            if answer.recoveries:
                self.assigned.set()

        return True
