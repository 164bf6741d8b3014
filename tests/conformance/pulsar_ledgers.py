"""Scenarios about the ledgers of a managed ledger: offload in two phases, trim, lag, reads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from streammeta.brokers.pulsar.blobs import MemoryBlobs
from streammeta.brokers.pulsar.ledger_list import (
    InvalidCursorPositionError,
    ManagedLedger,
    ManagedLedgerFencedError,
    OffloadInProgressError,
    OffloadPolicy,
    VersionConflictError,
    source_is_due,
)
from streammeta.brokers.pulsar.ledger_reader import LedgerReader
from streammeta.brokers.pulsar.ledger_values import LedgerInfo, OffloadContext
from streammeta.brokers.pulsar.list_store import MemoryListStore
from streammeta.brokers.pulsar.offloader import LedgerSource, NotAppendableError, Offloader
from tests.conformance.pulsar_offload import MemoryLedger
from tests.conformance.scenario_args import Args
from tests.conformance.shape_answers import Runner, Said
from tests.kit.clock import ManualClock

NAMES = ("first", "second", "third", "fourth", "fifth")
NOW_MS = 1_700_000_000_000


class ListStore(MemoryListStore):
    """A list that another owner may have changed."""

    conflicts = False

    async def save(self, ledgers: Sequence[LedgerInfo], version: int) -> int:
        if self.conflicts:
            raise VersionConflictError("list has another version")
        return await super().save(ledgers, version)


@dataclass
class Copies:
    """Copies of ledgers by uuid; offloads fail, or wait, on demand."""

    is_appendable: bool = True
    stored: dict[str, int] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    failing: set[int] = field(default_factory=set)
    fails_after: set[int] = field(default_factory=set)
    waits: asyncio.Event | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)
    offloads: int = 0

    async def offload(self, ledger: LedgerSource, uuid: str, extra: Mapping[str, str]) -> None:
        self.offloads += 1
        self.began.set()
        if self.waits is not None:
            await self.waits.wait()
        if ledger.ledger_id in self.failing:
            raise RuntimeError(f"ledger {ledger.ledger_id} failed")
        self.stored[uuid] = ledger.ledger_id
        if ledger.ledger_id in self.fails_after:
            raise RuntimeError(f"ledger {ledger.ledger_id} failed late")

    async def delete(self, ledger_id: int, uuid: str) -> None:
        self.deleted.append(uuid)
        self.stored.pop(uuid, None)

    async def held(self) -> list[tuple[int, str]]:
        return [(ledger_id, uuid) for uuid, ledger_id in self.stored.items()]

    async def is_of(self, managed_ledger: str, ledger_id: int, uuid: str) -> bool:
        return managed_ledger == "ml" and (ledger_id, uuid) in await self.held()


@dataclass
class Sources:
    """Ledgers as they were written."""

    ledgers: dict[int, MemoryLedger]

    async def open(self, ledger_id: int) -> MemoryLedger:
        return self.ledgers[ledger_id]

    async def delete(self, ledger_id: int) -> None:
        self.ledgers.pop(ledger_id, None)


@dataclass
class LedgerWorld:
    """A managed ledger whose ledgers have ids from 1; the last one is open."""

    managed: ManagedLedger
    store: ListStore
    copies: Copies
    sources: Sources
    clock: ManualClock

    def complete(self) -> list[int]:
        return [one.ledger_id for one in self.managed.ledgers if one.is_complete]

    def named(self, ids: Sequence[int]) -> list[str]:
        return [NAMES[one - 1] for one in ids]

    async def add_entry(self, limit: int) -> None:
        """Append an entry, in a new ledger if the last one is full."""
        *_, last = self.managed.ledgers
        if last.entries < limit:
            changed = replace(last, entries=last.entries + 1, size=last.size + 10)
            self.managed.ledgers[-1] = changed
        else:
            closed = replace(last, timestamp_ms=self.clock.now_ms)
            added = LedgerInfo(last.ledger_id + 1, 1, 10, 0)
            self.managed.ledgers[-1:] = [closed, added]
        self.fill()

    def fill(self) -> None:
        for one in self.managed.ledgers:
            bodies = [b"x" * 10] * one.entries
            self.sources.ledgers[one.ledger_id] = MemoryLedger(one.ledger_id, bodies)


async def world_of(given: Args, entry_size: int = 10) -> LedgerWorld:
    limit, entries = given.take("max_entries_per_ledger"), given.take("entries")
    clock = ManualClock(NOW_MS)
    store, copies, sources = ListStore(), Copies(), Sources({})
    ids = iter(range(1, 100))
    managed = ManagedLedger(
        "ml",
        store,
        sources,
        copies,
        lambda: clock.now_ms,
        new_uuid=lambda: f"00000000-0000-0000-0000-{next(ids):012d}",
    )
    counts = [min(limit, entries - at) for at in range(0, entries, limit)]
    managed.ledgers = [
        LedgerInfo(at, count, count * entry_size, NOW_MS if at < len(counts) else 0)
        for at, count in enumerate(counts, start=1)
    ]
    world = LedgerWorld(managed, store, copies, sources, clock)
    world.fill()
    return world


async def _offload_all(world: LedgerWorld) -> Exception | None:
    """Offload up to the last entry; return what was raised."""
    last = world.managed.ledgers[-1]
    try:
        await world.managed.offload_prefix(last.ledger_id, last.entries - 1)
    except Exception as error:  # noqa: BLE001 - any error is the fact
        return error
    return None


async def _prefix(given: Args) -> dict[str, Any]:
    given.take("offload_to")
    world = await world_of(given)
    await _offload_all(world)
    complete = world.complete()
    exact = complete == sorted(world.copies.stored.values()) == [1, 2]
    said = "exactly the ledgers that the offloader holds (the first two)"
    return {"expect": {"ledgers": len(world.managed.ledgers), "complete": Said.of({said: exact})}}


async def _fenced(given: Args) -> dict[str, Any]:
    world = await world_of(given)
    world.store.conflicts = given.take("metadata_write") == "BadVersion"
    error = await _offload_all(world)
    return {
        "expect": {
            "error": error.code if isinstance(error, ManagedLedgerFencedError) else error,
            "state": "Fenced" if world.managed.is_fenced else "Open",
            "complete": len(world.complete()),
        }
    }


async def _out_of_range(given: Args) -> dict[str, Any]:
    world, errors = await world_of(given), []
    places = {"earliest": (-1, -1), "latest": (2**63 - 1, 2**63 - 1)}
    for name in given.take("positions"):
        try:
            await world.managed.offload_prefix(*places[name])
        except InvalidCursorPositionError as error:
            errors.append(error.code)
    return {"expect": {"errors": errors, "complete": len(world.complete())}}


async def _edge(given: Args) -> dict[str, Any]:
    given.take("position"), given.take("then")
    limit = given.take("max_entries_per_ledger")
    world = await world_of(given)
    await world.add_entry(limit)
    first = await world.managed.offload_prefix(2, limit - 1)
    facts: list[dict[str, Any]] = [
        {
            "offloaded": world.named(world.complete()),
            "first_unoffloaded": [NAMES[first[0] - 1], first[1]],
        }
    ]
    last = world.managed.ledgers[-1]
    second = await world.managed.offload_prefix(last.ledger_id, last.entries - 1)
    facts.append(
        {
            "offloaded": world.named(world.complete()),
            "first_unoffloaded_ledger": NAMES[second[0] - 1],
        }
    )
    return {"expect": facts}


async def _trim_meanwhile(given: Args) -> dict[str, Any]:
    given.take("meanwhile")
    ledger, entry = given.take("position")
    world = await world_of(given)
    world.copies.waits = asyncio.Event()
    offload = asyncio.create_task(world.managed.offload_prefix(NAMES.index(ledger) + 1, entry))
    await world.copies.began.wait()
    await world.managed.trim(2)
    world.copies.waits.set()
    await offload
    no_orphan = sorted(world.copies.stored.values()) == [2]
    said = "succeeds: errors of a ledger that is gone do not count"
    return {
        "expect": {
            "ledgers": len(world.managed.ledgers),
            "complete": world.named(world.complete()),
            "offload": Said.of({said: no_orphan}),
        }
    }


async def _twice(given: Args) -> dict[str, Any]:
    given.take("offload")
    world = await world_of(given)
    await _offload_all(world)
    before = world.copies.offloads
    error = await _offload_all(world)
    again = error is None and before == world.copies.offloads
    return {"expect": {"second": Said.of({"ok, nothing offloaded again": again})}}


async def _one_fails(given: Args) -> dict[str, Any]:
    counts, completes, firsts = set(), set(), []
    for name in given.take("failing"):
        world = await world_of(given)
        failing = NAMES.index(name) + 1
        world.copies.failing = {failing}
        error = await _offload_all(world)
        firsts.append(str(error) == f"ledger {failing} failed")
        counts.add(len(world.complete()))
        completes.add(failing in world.complete())
    return {
        "expect": {
            "complete": counts.pop() if len(counts) == 1 else counts,
            "failing_one_complete": any(completes),
            "error": Said.of({"the first one met": all(firsts)}),
        }
    }


def _uuid(world: LedgerWorld) -> str | None:
    context = world.managed.ledgers[0].context
    return None if context is None else context.uuid


async def _retry(given: Args) -> dict[str, Any]:
    given.take("first_try"), given.take("then")
    world = await world_of(given)
    world.copies.failing = {1}
    await _offload_all(world)
    failed = _uuid(world)
    facts = {
        "after_first": {
            "deleted": len(world.copies.deleted),
            "complete": bool(world.complete()),
            "context_uuid": Said.of({"that of the failed try": failed is not None}),
        }
    }
    world.copies.failing = set()
    await _offload_all(world)
    exactly = world.copies.deleted == [failed]
    return {
        "expect": facts
        | {
            "after_second": {
                "deleted": Said.of({"exactly the failed uuid": exactly}),
                "complete": bool(world.complete()),
                "context_uuid": Said.of({"a new one": _uuid(world) not in (failed, None)}),
            }
        }
    }


async def _deleted_with_trim(given: list[dict[str, Any]]) -> dict[str, Any]:
    found = []
    for one in given:
        case = Args(one, "input")
        is_good = case.take("offload") == "ok"
        world = await world_of(case)
        world.copies.fails_after = set() if is_good else {1}
        await _offload_all(world)
        held = dict(world.copies.stored)
        facts: dict[str, Any] = {"complete": len(world.complete())}
        if not is_good:
            facts["with_uuid"] = sum(one.context is not None for one in world.managed.ledgers)
        await world.managed.trim(world.managed.ledgers[-1].ledger_id)
        gone = [held[uuid] for uuid in world.copies.deleted]
        facts["ledgers_left"] = world.named([one.ledger_id for one in world.managed.ledgers])
        facts["deleted_from_store"] = world.named(gone)
        found.append(facts)
    return {"expect": found}


async def _skips_empty(given: Args) -> dict[str, Any]:
    given.take("second_ledger")
    world = await world_of(given)
    world.managed.ledgers[1] = LedgerInfo(2, 0, 0, NOW_MS)
    last = world.managed.ledgers[-1]
    place = await world.managed.offload_prefix(last.ledger_id, last.entries - 1)
    return {
        "expect": {
            "offloaded": world.named(world.complete()),
            "first_unoffloaded": [NAMES[place[0] - 1], place[1]],
        }
    }


async def _thresholds(given: Args) -> dict[str, Any]:
    size, found = given.take("entry_size"), list[Any]()
    for limit, seconds in given.take("cases_bytes_seconds"):
        world = await world_of(given, size)
        world.clock.advance(2000)
        await world.managed.offload_due(OffloadPolicy(limit, seconds))
        is_open = (limit, seconds) == (-1, -1)  # what the scenarios leave open is never here
        never = Said.of({"not asserted": not world.complete()})
        found.append(never if is_open else len(world.complete()))
    return {"expect": {"offloaded": found}}


async def _one_at_a_time(given: Args) -> dict[str, Any]:
    given.take("manual")
    automatic, firsts, counts, after = list[int](), set(), set(), set()
    for limit, seconds in given.take("cases_bytes_seconds"):
        world = await world_of(given)
        world.clock.advance(2000)
        world.copies.waits = asyncio.Event()
        running = asyncio.create_task(world.managed.offload_due(OffloadPolicy(limit, seconds)))
        await world.copies.began.wait()
        error = await _offload_all(world)
        firsts.add(error.code if isinstance(error, OffloadInProgressError) else str(error))
        world.copies.waits.set()
        await running
        automatic.append(len(world.complete()))
        await _offload_all(world)
        after.add(len(world.complete()))
        counts.add(len(world.managed.ledgers))
    return {
        "expect": {
            "manual_first": firsts.pop() if len(firsts) == 1 else firsts,
            "ledgers": counts.pop() if len(counts) == 1 else counts,
            "offloaded_automatic": automatic,
            "offloaded_after_manual": after.pop() if len(after) == 1 else after,
        }
    }


async def _lag(given: Args) -> dict[str, Any]:
    world = await world_of(given)
    await _offload_all(world)
    retention = given.take("retention_minutes") * 60_000
    lag, has_slow = given.take("lag_ms"), given.take("cursor", "") == "at the start"
    sources, copies = [], []
    for minutes in given.take("trim_after_minutes"):
        world.clock.now_ms = NOW_MS + minutes * 60_000
        if not has_slow and world.clock.now_ms - NOW_MS > retention:
            await world.managed.trim(world.managed.ledgers[-1].ledger_id)
        await world.managed.delete_sources(lag)
        sources.append(1 in world.sources.ledgers)
        copies.append(1 in world.copies.stored.values())
    return {
        "expect": {
            "in_bookkeeper": sources,
            "offloaded": copies,
            "ledgers_at_end": len(world.managed.ledgers),
        }
    }


def _lag_decision(given: list[dict[str, Any]]) -> dict[str, Any]:
    found = []
    for one in given:
        context = OffloadContext(
            "u", one["complete"], one["bookkeeper_deleted"], NOW_MS - one["age_ms"]
        )
        found.append(source_is_due(context, one["lag"], NOW_MS))
    return {"expect": found}


async def _tiered_first(given: Args) -> dict[str, Any]:
    world = await world_of(given)
    names = given.take("offloaded")
    blobs = MemoryBlobs()
    offloader = Offloader(blobs)
    world.managed.copies = offloader
    await _offload_all(world)
    good = world.named(world.complete()) == names
    opened, reader = list[int](), LedgerReader(world.managed, offloader)
    for ledger_id, count in enumerate(given.take("reads"), start=1):
        wanted = list(world.sources.ledgers[ledger_id].entries)
        if world.named([ledger_id])[0] in names:
            await world.sources.delete(ledger_id)
        good = good and await reader.read(ledger_id, 0, count - 1) == wanted
        opened.append(reader.open_handles)
    reader.close()
    return {
        "expect": {
            "opened_offloaded": opened,
            "data": Said(right=good),
            "open_handles_after_close": reader.open_handles,
        }
    }


async def _read_only(given: Args) -> dict[str, Any]:
    world = await world_of(given)
    world.copies.is_appendable = given.take("offloader") != "not appendable"
    error = await _offload_all(world)
    said = "does not support offload"
    refused = isinstance(error, NotAppendableError) and said in str(error)
    return {
        "expect": {
            "error_contains": Said.of({said: refused}),
            "complete": len(world.complete()),
        }
    }


RUNNERS: dict[str, Runner] = {
    "prefix_offload": _prefix,
    "prefix_fenced_on_bad_version": _fenced,
    "prefix_position_out_of_range": _out_of_range,
    "prefix_edge_of_ledger": _edge,
    "prefix_trim_during_offload": _trim_meanwhile,
    "prefix_twice": _twice,
    "prefix_one_of_three_fails": _one_fails,
    "prefix_retry_replaces_uuid": _retry,
    "prefix_deleted_with_trim": _deleted_with_trim,
    "prefix_skips_empty": _skips_empty,
    "auto_offload_thresholds": _thresholds,
    "auto_offload_runs_one_at_a_time": _one_at_a_time,
    "delete_lag": _lag,
    "delete_lag_slow_consumer": _lag,
    "delete_lag_decision": _lag_decision,
    "read_tiered_first": _tiered_first,
    "read_only_offloader": _read_only,
}
