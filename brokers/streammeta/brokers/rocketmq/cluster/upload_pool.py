"""Upload pool of a broker: what the segments of all queues commit, in objects that they share.

Owns admission by bytes, the group that gathers, and one commit of each group. A commit moves the
ends of streams and puts the metadata that tells of them, all or nothing. A write that is refused
leaves its group; the others are committed without it. Knows no messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from streammeta.client import (
    CommitPipeline,
    ObjectExpiredError,
    OpenedStream,
    PutResult,
    StreamClient,
    Upload,
    UploadWithEffects,
    ValueToPut,
)
from streammeta.client.commits.effects import EffectsVerdict
from streammeta.client.controllers.bucket_check import BucketCheck
from streammeta.client.errors import refusal
from streammeta.client.resources.daemon_threads import run_blocking
from streammeta.client.writing.object_ids import ObjectIds
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.object_writer import ObjectWriter
from streammeta.storage.object_format.record import RecordBatch
from streammeta.v1.common_pb2 import ERROR_CODE_NONE, ErrorCode

_IDS_TTL_S = 600.0
_EXPIRED_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Bounds of the pool; a group is sent when it has `group_bytes` or `linger_s` has passed.

    Writes wait while the pool holds `max_bytes`; one that is larger waits until it is empty.
    """

    linger_s: float = 0.25
    group_bytes: int = 8 << 20
    max_bytes: int = 64 << 20
    record_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        """Refuse bounds that let nothing pass."""
        for name in ("group_bytes", "max_bytes", "record_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted at least 1")
        if self.linger_s < 0:
            raise ValueError(f"linger_s is {self.linger_s}, wanted 0 or more")


@dataclass(frozen=True, slots=True)
class PoolWrite:
    """Bytes of one segment from `position` on, and the value that tells of them."""

    stream: OpenedStream
    position: int
    data: bytes
    put: ValueToPut
    times: tuple[int, int]

    @property
    def end(self) -> int:
        """Position behind the last byte."""
        return self.position + len(self.data)

    def records(self, record_bytes: int) -> list[RecordBatch]:
        """Return the bytes as records of as many offsets as bytes."""
        stream = self.stream
        pieces = range(0, len(self.data), record_bytes)
        return [
            RecordBatch(stream.stream_id, stream.epoch, self.position + at, len(piece), piece)
            for at in pieces
            if (piece := self.data[at : at + record_bytes])
        ]


@dataclass(slots=True, eq=False)
class _Waiting:
    write: PoolWrite
    done: asyncio.Future[PutResult] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class UploadPool:
    """Commits of one broker process; use it as an async context manager, or `close` it."""

    def __init__(self, client: StreamClient, config: PoolConfig | None = None) -> None:
        self._config = config or PoolConfig()
        session = client.session
        self._namespace = session.namespace
        self._store = client.store
        self._bucket = BucketCheck(client.controllers, client.store, session.namespace)
        self._ids = ObjectIds(session, _IDS_TTL_S)
        self._pipeline = CommitPipeline(client.controllers, session.node)
        self._waiting: list[_Waiting] = []
        self._held = 0
        self._room = asyncio.Condition()
        self._arrived = asyncio.Event()
        self._full = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.groups = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that are not committed yet; at most `max_bytes`, or one larger write."""
        return self._held

    async def write(self, write: PoolWrite) -> PutResult:
        """Commit bytes with others; return what became of the value.

        A stream has one write at a time. Raises `BrokerClientError` and `StorageError`: whether the
        bytes are committed is not known then, unless it is a `RefusedError`.
        """
        size = len(write.data)
        async with self._room:
            await self._room.wait_for(
                lambda: not self._held or self._held + size <= self._config.max_bytes
            )
            self._held += size
        one = _Waiting(write)
        try:
            self._waiting.append(one)
            self._arrived.set()
            if sum(len(each.write.data) for each in self._waiting) >= self._config.group_bytes:
                self._full.set()
            if self._task is None:
                self._task = asyncio.create_task(self._run())
            return await one.done
        finally:
            async with self._room:
                self._held -= size
                self._room.notify_all()

    async def close(self) -> None:
        """Stop; what was not committed fails as cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for one in self._waiting:
            one.done.cancel()
        await self._pipeline.close(0)

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.linger_s):
                    await self._full.wait()
            group = self._take_group()
            try:
                await self._commit_group(group)
            except asyncio.CancelledError:
                for one in group:
                    one.done.cancel()
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
                _fail(group, error)

    def _take_group(self) -> list[_Waiting]:
        """Take the oldest writes, up to the size of a group, one at least."""
        taken, size = 0, 0
        for one in self._waiting:
            if taken and size + len(one.write.data) > self._config.group_bytes:
                break
            size += len(one.write.data)
            taken += 1
        group, self._waiting = self._waiting[:taken], self._waiting[taken:]
        self._full.clear()
        if not self._waiting:
            self._arrived.clear()
        elif sum(len(one.write.data) for one in self._waiting) >= self._config.group_bytes:
            self._full.set()
        return sorted(group, key=lambda one: one.write.stream.stream_id)

    async def _commit_group(self, group: list[_Waiting]) -> None:
        """Commit a group; a write that is refused fails by itself, and the rest goes again."""
        attempts = 0
        while group:
            self.groups += 1
            verdict = await self._commit([one.write for one in group])
            if verdict.error == ERROR_CODE_NONE:
                for one, result in zip(group, verdict.put_results, strict=True):
                    _answer(one, result)
                return
            refused = _refused(verdict, len(group))
            if not any(refused):
                error = refusal(verdict.error, f"commit of {len(group)} segments")
                if not isinstance(error, ObjectExpiredError) or attempts >= _EXPIRED_ATTEMPTS:
                    raise error
                attempts += 1
                self._ids.discard()
                continue
            for one, code in zip(group, refused, strict=True):
                if code:
                    _fail([one], refusal(code, f"write to stream {one.write.stream.stream_id}"))
            group = [one for one, code in zip(group, refused, strict=True) if not code]

    async def _commit(self, writes: Sequence[PoolWrite]) -> EffectsVerdict:
        """Upload one object of all writes, and commit it with their values."""
        await self._bucket.require()
        (object_id,) = (await self._ids.take(1)).ids
        writer = ObjectWriter(checksum=True)
        for one in writes:
            writer.write(one.records(self._config.record_bytes))
        writer.finish()
        data = b"".join(writer.parts())
        await run_blocking(self._store.put, key_for(object_id, self._namespace), data)
        crc32c = writer.summary.crc32c
        assert crc32c is not None
        upload = Upload(
            object_id=object_id,
            object_size=len(data),
            stream_ids=[one.stream.stream_id for one in writes],
            stream_epochs=[one.stream.epoch for one in writes],
            start_offsets=[one.position for one in writes],
            end_offsets=[one.end for one in writes],
            min_timestamp_ms=min(one.times[0] for one in writes),
            max_timestamp_ms=max(one.times[1] for one in writes),
            crc32c=crc32c,
        )
        asked = UploadWithEffects(upload, puts=[one.put for one in writes])
        return await (await self._pipeline.upload_with_effects(asked))


def _refused(verdict: EffectsVerdict, count: int) -> list[ErrorCode.ValueType]:
    """Return the error of each write, of its range or else of its value; 0: not its fault."""
    ranges = list(verdict.range_errors) or [ERROR_CODE_NONE] * count
    puts = [one.error for one in verdict.put_results] or [ERROR_CODE_NONE] * count
    return [ranged or put for ranged, put in zip(ranges, puts, strict=True)]


def _answer(one: _Waiting, result: PutResult) -> None:
    if not one.done.done():
        one.done.set_result(result)


def _fail(group: Sequence[_Waiting], error: Exception) -> None:
    for one in group:
        if not one.done.done():
            one.done.set_exception(error)
