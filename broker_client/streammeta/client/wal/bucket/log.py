"""Write-ahead log of a broker in the bucket: slots created one by one, acknowledged in order.

Owns the timer that closes a slot, the uploads under way, and what becomes of the logs of earlier
processes of the node: they are sealed and read when this one is opened, discarded when all they
held is settled, and swept by a later process. Another process that seals this log ends it. Which
slot goes when is the queue's.

A record that is acknowledged is in a slot that every later recovery reads: its slot was created
when no seal was, or had been, in its place or before it. `ack_lease` says when that needs a look.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping

from streammeta.client.arguments import check_kind, check_store
from streammeta.client.resources.resources import ClosedAtExit, ignore_failure, warn_unclosed
from streammeta.client.wal.bucket import reading, sweeping
from streammeta.client.wal.bucket.ack_lease import AckLease, elapsed_s
from streammeta.client.wal.bucket.bucket_slots import BucketSlots, SlotStore
from streammeta.client.wal.bucket.config import ObjectLogConfig
from streammeta.client.wal.bucket.errors import (
    LogSealedError,
    LogSweptError,
    ObjectLogFailedError,
    UnfitStoreError,
)
from streammeta.client.wal.bucket.reading import (
    FoundLog,
    SealedLog,
    delete_leftovers,
    delete_slots,
    discard_log,
    list_logs,
    read_log,
    seal_log,
)
from streammeta.client.wal.bucket.setting_aside import write_aside
from streammeta.client.wal.bucket.slot_queue import SlotGroup, SlotQueue, SlotUpload
from streammeta.client.wal.disk.config import LogIdentity
from streammeta.client.wal.disk.errors import (
    WriteAheadLogClosedError,
    WriteAheadLogError,
    WrongLogError,
)
from streammeta.storage.backoff import Backoff
from streammeta.storage.errors import CorruptObjectError, StorageError, StoreUnavailableError
from streammeta.storage.object_format.record import RECORD_HEADER_SIZE, RecordBatch
from streammeta.storage.object_log.slot import (
    LOG_ID_SIZE,
    SLOT_HEADER_SIZE,
    Sealer,
    Slot,
    SlotKind,
    decode_slot,
    sealer_body,
)
from streammeta.storage.object_log.slot_keys import LogName
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.storage.object_store.protocol.patience import Patience

_DELETED_AT_ONCE = 64
"""Slots that are past are deleted when there are so many; the last ones when the log is closed."""

_MAX_SLOT = 2**30
"""Bytes of the largest slot."""

_PATIENCE = Patience(Backoff(0.05, 5.0, jitter=0))

_log = logging.getLogger(__name__)

_Ack = asyncio.Future[None]


class ObjectLog(ClosedAtExit):
    """An open log. Make it with `open`; use it from that event loop, and `close` it.

    Positions count records: those of earlier processes' logs come first, up to `recovered_end`,
    then those appended here, up to `end`; the records below `trimmed` are settled. `slots` counts
    those that this process has filled with records and stored, of `slot_bytes` together.
    """

    def __init__(
        self,
        slots: SlotStore,
        queue: SlotQueue[_Ack],
        config: ObjectLogConfig,
        former: list[SealedLog],
        recovered: list[RecordBatch],
        lease: AckLease,
        clock: Callable[[], float],
    ) -> None:
        self._slots = slots
        self._queue = queue
        self._config = config
        self._former = former
        self._recovered = recovered
        self._lease = lease
        self._clock = clock
        self._recovered_bytes = sum(one.encoded_size for one in recovered)
        self._loop = asyncio.get_running_loop()
        self._me = Sealer(queue.log.node_id, queue.log.node_epoch)
        self.recovered_end = len(recovered)
        self._timer: asyncio.TimerHandle | None = None
        self._uploads: set[asyncio.Task[None]] = set()
        self._cleaning: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._deleted_below = 1  # slot 0 is the claim
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended: WriteAheadLogError | None = None
        self._is_closed = False
        self.slots = 0
        self.slot_bytes = 0

    @classmethod
    async def open(
        cls, store: ObjectStore, identity: LogIdentity, config: ObjectLogConfig | None = None
    ) -> ObjectLog:
        """Begin the log of one process, and seal and read those of the node's earlier ones.

        The records that these hold are held in memory until they are trimmed.

        Raises:
            WrongLogError: a newer process of the node has a log, or one of this very epoch.
            UnfitStoreError: the store does not keep two from creating the same object.
            DamagedSlotError: a slot of an earlier process is missing or has changed.
            StorageError: the store failed.
        """
        check_store(store)
        check_kind("identity", identity, LogIdentity, "a LogIdentity")
        bounds = ObjectLogConfig() if config is None else config
        check_kind("config", bounds, ObjectLogConfig, "an ObjectLogConfig, or None for defaults")
        slots = BucketSlots(store, bounds.parallel_uploads + 1)
        try:
            return await cls.open_in(slots, identity, bounds, secrets.token_bytes(LOG_ID_SIZE))
        except BaseException:
            slots.close()
            raise

    @classmethod
    async def open_in(
        cls,
        slots: SlotStore,
        identity: LogIdentity,
        config: ObjectLogConfig,
        log_id: bytes,
        clock: Callable[[], float] = elapsed_s,
    ) -> ObjectLog:
        """Open the log on a store of slots; `log_id` is random, 16 bytes. Raises as `open`.

        `clock` gives seconds, and never steps.
        """
        name = LogName(identity.namespace, identity.node_id, identity.node_epoch)
        lease = AckLease(clock())
        await _claim(slots, name, log_id)
        # The claim is first: of two processes that begin at once the older one finds the newer.
        found = await _list_with_claim(slots, name)
        await _check_own_place(slots, name, found)
        me = Sealer(name.node_id, name.node_epoch)
        former: list[SealedLog] = []
        records: list[RecordBatch] = []
        for epoch, log in found.items():
            if epoch == name.node_epoch or log.is_recovered:
                continue
            sealed = await seal_log(slots, log.name, me)
            if sealed is not None:
                former.append(sealed)
                async for some in read_log(slots, sealed):
                    records.extend(some)
        await delete_leftovers(slots, (log for epoch, log in found.items() if epoch < max(found)))
        queue: SlotQueue[_Ack] = SlotQueue(name, log_id, config, len(records))
        queue.trimmed = 0
        log_opened = cls(slots, queue, config, former, records, lease, clock)
        log_opened._sweeping = asyncio.create_task(log_opened._sweep_later(found))
        if not records:
            log_opened._clean()
        return log_opened

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            warn_unclosed(
                self,
                f"{self._queue.unflushed_bytes} bytes of the log {self._queue.log.prefix} were not"
                " in the bucket",
                "`await log.close()` after its writer was closed",
            )

    @property
    def end(self) -> int:
        """The position behind the last record appended."""
        return self._queue.end

    @property
    def trimmed(self) -> int:
        """The position below which all records are settled."""
        return self._queue.trimmed

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are not trimmed, and of the records on their way into slots."""
        return self._queue.kept_bytes + self._recovered_bytes

    @property
    def max_bytes(self) -> int:
        """The size up to which it takes records, as configured."""
        return self._config.max_bytes

    @property
    def max_record_bytes(self) -> int:
        """The size of the largest encoded record that can ever have room."""
        return min(self._config.max_bytes, _MAX_SLOT) - SLOT_HEADER_SIZE

    def has_room(self, size: int) -> bool:
        """Tell whether records of `size` encoded bytes, all of them, may be appended now.

        It changes from false to true only in `trim` and when a slot is in the bucket; nothing, 0
        bytes, has always room. Raises the error that ended the log.
        """
        self._check_usable()
        if size == 0:
            return True
        queue, cost = self._queue, size + SLOT_HEADER_SIZE
        unflushed = queue.unflushed_bytes
        if unflushed and unflushed + cost > self._config.max_unflushed_bytes:
            return False
        return self.used_bytes + cost <= self._config.max_bytes

    def append(self, header: bytes, payload: bytes) -> _Ack:
        """Take one encoded record, `header` and `payload`, into the slot that is gathered.

        The result is shared by the records of the slot, and done when it and all slots before it
        are in the bucket. Wait for it through `asyncio.shield`. It fails with the error that ended
        the log: that the record is in the bucket is unknown then. Ask `has_room` first.
        """
        self._check_usable()
        if len(header) != RECORD_HEADER_SIZE or int.from_bytes(header[29:]) != len(payload):
            raise ValueError(
                f"header of {len(header)} bytes for a payload of {len(payload)}: wanted"
                f" {RECORD_HEADER_SIZE} bytes that end with the payload's length"
            )
        group = self._queue.append((header, payload), self._loop.create_future())
        if group.count == 1:
            group.ack.add_done_callback(ignore_failure)
        self._idle.clear()
        if group.is_due:
            self._pump()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._config.linger_s, self._cut)
        return group.ack

    def trim(self, position: int) -> None:
        """Settle all records before `position`: they are not recovered. Slots go later.

        Raises `ValueError` for a position that no record has yet.
        """
        self._queue.trim(position)
        if self._recovered_bytes and position >= self.recovered_end:
            self._recovered, self._recovered_bytes = [], 0
        self._clean()

    def recover(self) -> Iterator[RecordBatch]:
        """Give the records of the node's earlier processes, in append order, until trimmed."""
        return iter(self._recovered)

    async def set_aside(self, records: Iterable[RecordBatch], reason: str) -> str | None:
        """Keep records that can't be committed in an object of their own; return its key.

        None without records. Raises `StorageError`; the log itself goes on.
        """
        self._check_usable()
        return await write_aside(self._slots, self._queue.log, records, reason)

    async def flush(self) -> None:
        """Wait until everything appended is in the bucket, or the log has ended."""
        self._cut()
        await self._idle.wait()

    async def close(self) -> None:
        """Wait for the slots under way; if all is settled leave nothing but a seal.

        What is not in the bucket by `close_deadline_s` is given up: it was not acknowledged.
        """
        if self._is_closed:
            return
        try:
            async with asyncio.timeout(self._config.close_deadline_s):
                await self.flush()
                if self._cleaning is not None:
                    await asyncio.wait([self._cleaning])
                if self._ended is None and self.trimmed == self.end:
                    await self._leave()
        except TimeoutError:
            _log.warning("what the log %s was given last is not stored", self._queue.log.prefix)
        except StorageError as error:
            _log.warning(
                "the log %s is left to its next process: %s", self._queue.log.prefix, error
            )
        finally:
            self._is_closed = True
            self._end(WriteAheadLogClosedError("the write-ahead log is closed"))
            others = (self._cleaning, self._sweeping)
            tasks = [*self._uploads, *(task for task in others if task is not None)]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            self._slots.close()

    async def _leave(self) -> None:
        """Seal the own log, which holds nothing that is needed, and delete the rest of it."""
        queue = self._queue
        seal = queue.seal(SlotKind.SEAL, sealer_body(self._me))
        if await self._slots.create(queue.log.slot_key(seal.sequence), [seal.encode()]):
            await delete_slots(self._slots, queue.log, range(self._deleted_below, seal.sequence))

    # -- uploading

    def _check_usable(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _cut(self) -> None:
        """Let the slot that is gathered go."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._queue.cut()
        self._pump()

    def _pump(self) -> None:
        """Begin the uploads that have a turn."""
        if self._ended is not None:
            return
        for upload in self._queue.take_uploads():
            task = self._loop.create_task(self._upload(upload))
            self._uploads.add(task)
            task.add_done_callback(self._uploads.discard)

    async def _upload(self, upload: SlotUpload) -> None:
        """Create one slot, however long it takes."""
        attempt = 0
        self._lease.start(upload.sequence, self._clock())
        while self._ended is None:
            try:
                if await self._slots.create(upload.key, upload.pieces):
                    if self._lease.covers(self._clock()) or await self._has_claim():
                        self._stored(upload)
                    else:
                        self._end(LogSweptError(self._queue.log.slot_key(0)))
                else:
                    self._end(LogSealedError(upload.key, await self._sealer_of(upload.key)))
                return
            except StorageError as error:
                wait = _PATIENCE.wait_s(error, attempt)
                if wait is None:
                    self._end(ObjectLogFailedError(upload.key, str(error)))
                    return
                _log.warning("slot %s failed, retrying in %g s: %s", upload.key, wait, error)
            await asyncio.sleep(wait)
            attempt += 1

    async def _has_claim(self) -> bool:
        """Tell whether no seal of this log was removed: a sweep removes the claim first."""
        key = self._queue.log.slot_key(0)
        data = await self._slots.get(key)
        try:
            return data is not None and (
                decode_slot(data, key, self._queue.log.namespace).log_id == self._queue.log_id
            )
        except CorruptObjectError as error:
            raise StoreUnavailableError(f"the claim of this log can't be read: {error}") from error

    async def _sealer_of(self, key: str) -> str:
        """Name who has taken a slot, as far as it can be read."""
        try:
            data = await self._slots.get(key)
            if data is not None:
                slot = decode_slot(data, key, self._queue.log.namespace)
                if slot.kind is SlotKind.SEAL:
                    sealer = slot.sealer()
                    return f"process {sealer.node_epoch} of node {sealer.node_id}"
        except (StorageError, CorruptObjectError) as error:
            _log.warning("the owner of slot %s can't be read: %s", key, error)
        return "another process"

    def _stored(self, upload: SlotUpload) -> None:
        groups = self._queue.stored(upload.sequence)
        self._lease.renew(self._queue.durable_below)
        for group in groups:
            self.slots += 1
            self.slot_bytes += group.size
            if not group.ack.done():
                group.ack.set_result(None)
        if self._queue.is_idle:
            self._idle.set()
        self._pump()
        self._clean()

    def _end(self, error: WriteAheadLogError) -> None:
        """Take no more records, and fail all that are not acknowledged."""
        if self._ended is not None:
            return
        if not self._is_closed:
            _log.error("the write-ahead log has ended: %s", error)
        self._ended = error
        if self._timer is not None:
            self._timer.cancel()
        groups: list[SlotGroup[_Ack]] = self._queue.drop()
        for group in groups:
            if not group.ack.done():
                group.ack.set_exception(error)
        self._idle.set()

    # -- deleting

    def _clean(self) -> None:
        """Delete what is past, if it is much; one such work at a time."""
        if self._ended is not None or (self._cleaning is not None and not self._cleaning.done()):
            return
        is_discarding = bool(self._former) and not self._recovered
        if is_discarding or self._queue.past_below - self._deleted_below >= _DELETED_AT_ONCE:
            self._cleaning = self._loop.create_task(self._delete_past())

    async def _delete_past(self) -> None:
        """Discard former logs and delete past slots; what fails is left for the next time."""
        try:
            while self._former and not self._recovered:
                await discard_log(self._slots, self._former[0].name, self._me)
                self._former.pop(0)
            below = self._queue.past_below
            await delete_slots(self._slots, self._queue.log, range(self._deleted_below, below))
            self._deleted_below = max(self._deleted_below, below)
        except StorageError as error:
            _log.warning("slots that are past stay for now: %s", error)

    async def _sweep_later(self, found: Mapping[int, FoundLog]) -> None:
        """Sweep logs of earlier processes, once they were watched for long enough."""
        await asyncio.sleep(sweeping.WATCH_S)
        retention_ms = round(self._config.retention_s * 1000)
        try:
            await sweeping.sweep_logs(self._slots, self._queue.log, found, retention_ms)
        except StorageError as error:
            _log.warning("seals of earlier processes are left to the next process: %s", error)


async def _claim(slots: SlotStore, name: LogName, log_id: bytes) -> None:
    """Create the first slot, and try the store's promise on it: it must not do so twice.

    The claim stays until the log has the mark of a recovered one, which refuses its epoch too. It
    has the id of its process, so a repeat after a lost answer succeeds.
    """
    key = name.slot_key(0)
    first = Slot(name, log_id, 0, 0, 0, SlotKind.RECORDS)
    if not await _create_again(slots, key, first.encode()):
        raise _used_epoch(name)
    other = Slot(name, bytes(byte ^ 0xFF for byte in log_id), 0, 0, 0, SlotKind.RECORDS)
    if await slots.create(key, [other.encode()]):
        raise UnfitStoreError(key)


async def _create_again(slots: SlotStore, key: str, data: bytes) -> bool:
    """Create a slot, for some attempts; only this process can repeat what it may have created."""
    for attempt in range(reading.DOUBTS):
        try:
            return await slots.create(key, [data])
        except StoreUnavailableError as error:
            wait = reading.PAUSES.wait(attempt)
            _log.warning("creation of claim %s failed, retrying in %g s: %s", key, wait, error)
            await asyncio.sleep(wait)
    return await slots.create(key, [data])


async def _list_with_claim(slots: SlotStore, name: LogName) -> dict[int, FoundLog]:
    """List the logs of the node; a listing without the own claim, which exists, is an old one."""
    for doubts in range(reading.DOUBTS + 1):
        found = await list_logs(slots, name.namespace, name.node_id)
        if name.node_epoch in found and 0 in found[name.node_epoch].sequences:
            return found
        await asyncio.sleep(reading.PAUSES.wait(doubts))
    raise StoreUnavailableError(
        f"listings do not show the claim {name.slot_key(0)}, which this process has created; check"
        " the store, and start this process again"
    )


async def _check_own_place(slots: SlotStore, name: LogName, found: Mapping[int, FoundLog]) -> None:
    """Raise `WrongLogError` unless the log is the node's newest, and has nothing but its claim."""
    if max(found) > name.node_epoch:
        raise WrongLogError(
            f"node {name.node_id} has a write-ahead log of the newer process {max(found)}, this"
            f" one is {name.node_epoch}: stop it, or start it with a larger node epoch"
        )
    own = found[name.node_epoch]
    is_fresh = own.sequences == [0] and not own.is_recovered
    if not is_fresh or await slots.get(name.recovered_key) is not None:
        raise _used_epoch(name)


def _used_epoch(name: LogName) -> WrongLogError:
    return WrongLogError(
        f"the write-ahead log {name.prefix} is there already: a process of this epoch had it, or"
        f" another broker has recovered it; start this process with a larger node epoch than"
        f" {name.node_epoch}"
    )
