"""Shapes of managed ledgers: prefixes, thresholds, deletion lags, and reads of either copy."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

from streammeta.brokers.pulsar import ledger_list
from streammeta.brokers.pulsar.blobs.blobs import MemoryBlobs
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo, OffloadContext
from streammeta.brokers.pulsar.ledger_reader import LedgerReader
from streammeta.brokers.pulsar.offloader import Offloader
from tests.conformance.pulsar_ledgers import NAMES, NOW_MS, Ledgers, LedgerWorld
from tests.conformance.shape_facts import AnyOf, Fact, Keyed, Refused, Words
from tests.conformance.shape_sentences import numbers_in
from tests.conformance.shape_vocabulary import Answer, Given, Shape
from tests.conformance.shape_worlds import Course, run_steps


def _world(given: Given) -> LedgerWorld:
    world = LedgerWorld(
        given.take("max_entries_per_ledger", 10),
        given.take("entries"),
        given.take("entry_size", 10),
    )
    for at, name in enumerate(NAMES):
        said = given.take(f"{name}_ledger", None)
        if said is not None:
            entries, size = (*numbers_in(str(said)), 0)[:2]
            world.managed.ledgers[at] = LedgerInfo(at + 1, entries, size, NOW_MS)
    if given.has("last_ledger") and str(given.take("last_ledger")).startswith(("empty", "0 ")):
        world.add_ledger()
    world.lag_ms = given.first("lag_ms", "deletion_lag_ms")
    world.retention_ms = int(given.take("retention_minutes", 0) * 60_000)
    world.has_slow_cursor = "start" in str(given.take("cursor", ""))
    world.copies.is_appendable = given.take("offloader", "appendable") == "appendable"
    world.store.conflicts = given.take("metadata_write", None) == "BadVersion"
    seconds = given.first("threshold_seconds", "offload_threshold_seconds")
    size = given.first("threshold_bytes", "offload_threshold_bytes")
    world.policy = ledger_list.OffloadPolicy(size, seconds, world.lag_ms)
    return world


def _steps(given: Given, world: LedgerWorld) -> list[Any]:
    """Return steps from the keys that say what is offloaded, and the steps that follow."""
    steps: list[Any] = []
    meanwhile = f", meanwhile {given.take('meanwhile')}" if given.has("meanwhile") else ""
    target = given.first("offload_to", "offload_upto")
    offload = given.take("offload", None)
    own = given.steps(LedgerWorld)
    if given.has("position"):
        said = given.take("position")
        world.position = world.place(said)
        target = target if any("offload" in str(step) for step in own) else said
    if target is not None:
        steps.append(f"offload to {_said(target)}{meanwhile}")
    if offload is not None:
        steps += _offloads(str(offload))
    return [*steps, *own] or ["offload to the last entry"]


def _offloads(said: str) -> list[str]:
    """Return what `offload` says as steps: "ok", "twice to the last entry", "fails after ..."."""
    often = re.match(r"(twice|once|(\w+) times)\b(.*)", said)
    if often is not None:
        count = {"twice": 2, "once": 1}.get(often[1]) or numbers_in(often[2])[0]
        return [f"offload{often[3]}"] * count
    if said in ("ok", "True"):
        return ["offload"]
    return [said if said.startswith("offload") else f"offload {said}"]


def _said(place: Any) -> str:
    return f"[{place[0]}, {place[1]}]" if isinstance(place, list) else str(place)


async def _prefix(given: Given) -> Any:
    if given.has("failing"):
        return await _one_fails(given)
    world = _world(given)
    if given.has("positions"):
        return await run_steps(
            world, [f"offload to {_said(position)}" for position in given.take("positions")]
        )
    course = await run_steps(world, _steps(given, world))
    _add_facts(course)
    offloads = [moment for moment in course.moments if moment.verb == "offload"]
    return Answer(course, offloads)


def _add_facts(course: Course) -> None:
    """Add facts of the errors, and of what was complete before ledgers were trimmed."""
    offloads = [moment for moment in course.moments if moment.verb == "offload"]
    errors = [moment.outcome for moment in course.moments if moment.failed]
    error = getattr(errors[0], "error", None) if errors else None
    course.extra["error_contains"] = Words(
        {r"(.+)": lambda found: error is not None and found[1] in str(error).lower()}
    )
    if errors:
        course.extra["error"] = AnyOf(errors[0], Words({"the first one met": True}))
    if offloads:
        course.extra["offload"] = offloads[-1]
        for name in ("complete", "with_uuid"):
            course.extra[name] = AnyOf(course.end[name], offloads[-1].facts[name])


async def _one_fails(given: Given) -> Any:
    """Let the offload of each named ledger fail, in a managed ledger of its own."""
    named = given.take("failing")
    errors, failing, complete, ledgers = list[bool](), list[int](), list[list[int]](), list[Fact]()
    for name in named if isinstance(named, list) else [named]:
        world = _world(given)
        number = NAMES.index(name) + 1
        world.copies.failing = {number}
        last = world.managed.ledgers[-1]
        try:
            await world.managed.offload_prefix(last.ledger_id, last.entries - 1)
        except RuntimeError as error:
            errors.append(str(error) == f"ledger {number} failed")
        failing.append(number)
        complete.append(world.complete())
        ledgers.append(Ledgers([ledger.ledger_id for ledger in world.managed.ledgers]))
    done = [number in found for number, found in zip(failing, complete, strict=True)]
    met = len(errors) == len(failing) and all(errors)
    every = _Every([Ledgers(ledger_id) for ledger_id in complete])
    return Keyed(
        {
            "complete": every,
            "offloaded": every,
            "failing_one_complete": any(done) if any(done) == all(done) else done,
            "ledgers": _Every(ledgers),
            "error": Words({"(?:the first one met|that of the failing one)": met, "error": met}),
        }
    )


class _Every(Fact):
    """What holds of every case, or of each in a list."""

    def __init__(self, facts: list[Fact]) -> None:
        self._facts = facts

    def holds(self, stated: object) -> bool:
        if isinstance(stated, list) and all(isinstance(item, list) for item in stated):
            pairs = zip(self._facts, stated, strict=True)
            return len(stated) == len(self._facts) and all(fact.holds(one) for fact, one in pairs)
        return all(fact.holds(stated) for fact in self._facts)

    def __repr__(self) -> str:
        return repr(self._facts)


# ---- thresholds ----


async def _thresholds(given: Given) -> Any:
    automatic, manual, after, counts = list[Any](), list[Fact](), list[Fact](), list[Fact]()
    says_manual = given.take("manual", None) is not None
    for limit, seconds in given.take("cases_bytes_seconds"):
        world = _world(given)
        world.clock.advance(2000)
        policy = ledger_list.OffloadPolicy(limit, seconds)
        if says_manual:
            manual.append(await _offload_twice(world, policy))
        else:
            await world.managed.offload_due(policy)
        closed = [ledger.ledger_id for ledger in world.managed.ledgers[:-1]]
        held = list(world.copies.stored.values())
        automatic.append(Ledgers(world.complete(), held, closed=closed))
        if says_manual:
            last = world.managed.ledgers[-1]
            await world.managed.offload_prefix(last.ledger_id, last.entries - 1)
            after.append(Ledgers(world.complete()))
        counts.append(Ledgers([*closed, 0]))
    facts: dict[str, Any] = dict.fromkeys(
        ("offloaded", "complete", "offloaded_automatic"), automatic
    )
    facts["ledgers"] = _Every(counts)
    if says_manual:
        facts |= {"manual_first": _Every(manual), "offloaded_after_manual": _Every(after)}
    return Answer(facts, automatic)


async def _offload_twice(world: LedgerWorld, policy: ledger_list.OffloadPolicy) -> Fact:
    """Run an offload by hand while the automatic one is under way; return how it went."""
    world.copies.waits = asyncio.Event()
    running = asyncio.create_task(world.managed.offload_due(policy))
    began = asyncio.create_task(world.copies.began.wait())
    await asyncio.wait([running, began], return_when=asyncio.FIRST_COMPLETED)
    began.cancel()
    last = world.managed.ledgers[-1]
    try:
        await world.managed.offload_prefix(last.ledger_id, last.entries - 1)
        outcome: Fact = Words({"ok": True})
    except ledger_list.OffloadInProgressError as error:
        outcome = Refused(error)
    finally:
        world.copies.waits.set()
        await running
    return outcome


# ---- deletion ----

_UNITS = {"trim_after_minutes": 60_000, "trim_after_seconds": 1000, "trim_after_ms": 1}


async def _lag(given: Given) -> Any:
    world = _world(given)
    last = world.managed.ledgers[-1]
    await world.managed.offload_prefix(last.ledger_id, last.entries - 1)
    sources, copies, ledgers = list[Any](), list[Any](), list[Any]()
    name = next(unit for unit in _UNITS if given.has(unit))
    for amount in given.take(name):
        world.clock.now_ms = NOW_MS + amount * _UNITS[name]
        await run_steps(world, ["trim"])
        sources.append(1 in world.sources.ledgers)
        copies.append(1 in world.copies.stored.values())
        ledgers.append(len(world.managed.ledgers))
    return {
        "in_bookkeeper": sources,
        "offloaded": copies,
        "complete": copies,
        "ledgers": ledgers,
        "ledgers_at_end": ledgers[-1],
    }


def _lag_decision(given: Given) -> Answer:
    age = given.first("age_ms", "age")
    complete = given.take("complete", True)
    deleted = given.first("bookkeeper_deleted", "source_deleted", default=False)
    context = OffloadContext("u", complete, deleted, NOW_MS - age)
    found = ledger_list.source_is_due(context, given.first("lag", "lag_ms"), NOW_MS)
    return Answer({"delete": found, "due": found}, found)


# ---- reads ----


def _is_source_first(given: Given) -> bool:
    said = str(given.first("read_priority", "priority", default="tiered-storage-first"))
    return said.lower().startswith("bookkeeper")


async def _reads(given: Given) -> Any:
    world = _world(given)
    names, source_first = given.take("offloaded", []), _is_source_first(given)
    gone = {NAMES.index(name) + 1 for name in given.take("bookkeeper_deleted", [])}
    offloader = Offloader(MemoryBlobs())
    world.managed.copies = offloader
    if names:
        await world.managed.offload_prefix(NAMES.index(names[-1]) + 2, 0)
    good = [NAMES[ledger_id - 1] for ledger_id in world.complete()] == names
    await _delete_sources(world, gone)

    opened, from_copy = list[int](), list[bool]()
    reader = LedgerReader(world.managed, offloader, source_first=source_first)
    for number, count in enumerate(given.take("reads"), start=1):
        wanted = list(world.sources.ledgers[number].entries)[:count]
        if number in gone or (not source_first and NAMES[number - 1] in names):
            await world.sources.delete(number)  # a read that went there would fail
        before = reader.open_handles
        good = good and await reader.read(number, 0, count - 1) == wanted
        opened.append(reader.open_handles)
        from_copy.append(reader.open_handles > before)
    reader.close()
    return {
        "opened_offloaded": opened,
        "read_from_tiered": from_copy,
        "from_tiered": from_copy,
        "from_bookkeeper": [not is_copy for is_copy in from_copy],
        "sources": ["tiered" if is_copy else "bookkeeper" for is_copy in from_copy],
        "data": AnyOf(Words({"right|equal|same|ok": good}), good),
        "open_handles_after_close": reader.open_handles,
    }


async def _delete_sources(world: LedgerWorld, gone: set[int]) -> None:
    """Note of ledgers that their source is deleted, as the lag does."""
    for number in sorted(gone):
        info = world.managed.info(number)
        assert info is not None
        assert info.context is not None
        changed = info.with_context(replace(info.context, source_deleted=True))
        at = world.managed.ledgers.index(info)
        world.managed.ledgers[at] = changed


def _read_choice(given: Given) -> Answer:
    """Return which copy a read goes to, by what the list knows and by the priority."""
    complete = given.take("complete")
    deleted = given.first("bookkeeper_deleted", "source_deleted")
    info = LedgerInfo(1, context=OffloadContext("u", complete, deleted))
    found = ledger_list.reads_copy(info, source_first=_is_source_first(given))
    place = AnyOf(found, *(["tiered", "tiered-storage"] if found else ["bookkeeper"]))
    return Answer({"tiered": found, "reads": place, "reads_copy": found}, place)


_COMMON = """max_entries_per_ledger entries entry_size lag_ms deletion_lag_ms retention_minutes
    cursor offloader metadata_write threshold_bytes threshold_seconds offload_threshold_bytes
    offload_threshold_seconds"""
_EMPTY = " ".join(f"{name}_ledger" for name in (*NAMES, "last"))

SHAPES = (
    Shape(
        "pulsar prefix",
        _prefix,
        "max_entries_per_ledger entries",
        "ledgers.*|complete|offload.*|error.*|state|first_unoffloaded.*|after_.*|before_.*|"
        "second|deleted.*|with_uuid|failing_.*|context_.*|stored|.*bookkeeper.*|sources|driver",
        "OffloadPrefixTest",
        keys=f"{_COMMON} {_EMPTY} offload_to offload_upto offload position positions meanwhile "
        "failing first_try then steps change",
        world=LedgerWorld,
        words="ledger|offload",
    ),
    Shape(
        "pulsar thresholds",
        _thresholds,
        "max_entries_per_ledger entries cases_bytes_seconds",
        "offloaded.*|complete|manual.*|ledgers",
        "OffloadPrefixTest",
        keys=f"{_COMMON} {_EMPTY} manual",
    ),
    Shape(
        "pulsar deletion lag",
        _lag,
        " | ".join(f"entries {name}" for name in _UNITS),
        "in_bookkeeper|offloaded|ledgers.*|complete",
        "OffloadLedgerDeleteTest",
        keys=_COMMON,
    ),
    Shape(
        "pulsar deletion",
        _lag_decision,
        "age_ms complete | age_ms lag | age_ms lag_ms",
        "delete|due",
        "OffloadLedgerDeleteTest",
        keys="age bookkeeper_deleted source_deleted",
    ),
    Shape(
        "pulsar reads",
        _reads,
        "entries reads offloaded | max_entries_per_ledger entries reads",
        "opened_.*|data|open_handles.*|.*tiered|.*bookkeeper|sources",
        "OffloadPrefixReadTest",
        keys=f"{_COMMON} read_priority priority bookkeeper_deleted",
    ),
    Shape(
        "pulsar read choice",
        _read_choice,
        "complete read_priority | complete priority",
        "tiered|reads.*",
        "OffloadPrefixReadTest",
        keys="bookkeeper_deleted source_deleted",
    ),
)
