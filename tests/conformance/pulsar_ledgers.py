"""A managed ledger that scenarios act on: ledgers, copies that fail on demand, a clock."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from streammeta.brokers.pulsar import ledger_list
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo
from streammeta.brokers.pulsar.offloader import LedgerSource, NotAppendableError
from tests.conformance.pulsar_offload import MemoryLedger
from tests.conformance.shape_facts import AnyOf, Done, Fact, Number, Words, is_word, normal
from tests.conformance.shape_sentences import Clause, number_of, ordinal_of
from tests.conformance.shape_worlds import World, verb
from tests.kit.memory_stores import MemoryListStore
from tests.kit.waiting import ManualClock

NOW_MS = 1_700_000_000_000
NAMES = re.findall(r"\w+", "first second third fourth fifth sixth seventh eighth ninth tenth")
LATEST = (2**63 - 1, 2**63 - 1)


_WRITTEN = r"(?:the )?(?:data|copy|offload)[a-z ]*?(?:written|done|occurred)\b"
_LEDGERS = (
    r"(?: (?:of|for|at) (?:the )?(?P<{}>(?:first|second|third|fourth|fifth|, | and )+)"
    r"(?: ledgers?)?)?"
)


class ListStore(MemoryListStore):
    """A list that another owner may have changed."""

    conflicts = False

    async def save(self, ledgers: Sequence[LedgerInfo], version: int) -> int:
        if self.conflicts:
            raise ledger_list.VersionConflictError("list has another version")
        return await super().save(ledgers, version)


@dataclass
class Copies:
    """Copies of ledgers by uuid; offloads fail, or wait, on demand."""

    is_appendable: bool = True
    stored: dict[str, int] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    failing: set[int] = field(default_factory=set)
    fails_after: set[int] = field(default_factory=set)
    waits: asyncio.Event | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)
    offloads: int = 0

    async def offload(self, ledger: LedgerSource, uuid: str, extra: Mapping[str, str]) -> None:
        self.offloads += 1
        self.tried[uuid] = ledger.ledger_id
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

    async def list_copies(self) -> list[tuple[int, str]]:
        return [(ledger_id, uuid) for uuid, ledger_id in self.stored.items()]

    async def is_of(self, managed_ledger: str, ledger_id: int, uuid: str) -> bool:
        return managed_ledger == "ml" and (ledger_id, uuid) in await self.list_copies()


@dataclass
class Sources:
    """Ledgers as they were written."""

    ledgers: dict[int, MemoryLedger]

    async def open(self, ledger_id: int) -> MemoryLedger:
        return self.ledgers[ledger_id]

    async def delete(self, ledger_id: int) -> None:
        self.ledgers.pop(ledger_id, None)


class Ledgers(Fact):
    """A set of ledgers: stated as their number, their names, whether there are any, or in words."""

    def __init__(
        self, ids: Sequence[int], held: Sequence[int] = (), *, closed: Sequence[int] = ()
    ) -> None:
        self.ids = list(ids)
        self._held = sorted(held)
        self._closed = list(closed)

    def numbers(self) -> Iterable[int]:
        return [len(self.ids)]

    def holds(self, stated: object) -> bool:
        names = [NAMES[ledger_id - 1] for ledger_id in self.ids]
        if isinstance(stated, bool):
            return stated is bool(self.ids)
        if isinstance(stated, list):
            return stated in (names, self.ids)
        if isinstance(stated, int):
            return stated == len(self.ids)
        if is_word(stated, "none", "nothing", "no ledger"):
            return not self.ids
        if not isinstance(stated, str):
            return False
        exactly = re.fullmatch(
            r"exactly the ledgers that the offloader holds(?: \(the first (\w+)\))?", normal(stated)
        )
        if exactly is not None:
            count = number_of(exactly[1]) if exactly[1] else len(self.ids)
            return self.ids == self._held == list(range(1, count + 1))
        if re.fullmatch(
            r"all (?:closed )?(?:ledgers )?(?:but|except) the (?:last|open)(?: one| ledger)?|"
            r"all closed(?: ledgers| ones)?",
            normal(stated),
        ):
            return self.ids == self._closed
        first = re.fullmatch(r"(?:the )?first (\w+)", normal(stated))
        if first is not None:
            return self.ids == list(range(1, number_of(first[1]) + 1))
        return Number(len(self.ids), "ledgers?").holds(stated) or names == re.split(
            r",? and |, ", normal(stated).removeprefix("the ")
        )

    def __repr__(self) -> str:
        return repr([NAMES[ledger_id - 1] for ledger_id in self.ids])


class LedgerWorld(World):
    """A managed ledger whose ledgers have ids from 1; the last one is open."""

    errors = (
        RuntimeError,
        ledger_list.ManagedLedgerFencedError,
        ledger_list.InvalidCursorPositionError,
        ledger_list.OffloadInProgressError,
        NotAppendableError,
        ledger_list.VersionConflictError,
        KeyError,
    )

    def __init__(self, limit: int, entries: int, entry_size: int = 10) -> None:
        self.limit, self.entry_size = limit, entry_size
        self.clock = ManualClock(NOW_MS)
        self.store, self.copies, self.sources = ListStore(), Copies(), Sources({})
        self.position: tuple[int, int] | None = None
        self.retention_ms = 0
        self.lag_ms: int | None = None
        self.policy = ledger_list.OffloadPolicy()
        self.has_slow_cursor = False
        self.first: tuple[int, int] | None = None
        self.failed_uuid: str | None = None
        self._meanwhile = ""
        ids = iter(range(1, 1000))
        self.managed = ledger_list.ManagedLedger(
            "ml", self.store, self.sources, self.copies, lambda: self.clock.now_ms,
            new_uuid=lambda: f"00000000-0000-0000-0000-{next(ids):012d}",
        )  # fmt: skip
        counts = [min(limit, entries - at) for at in range(0, entries, limit)] or [0]
        self.managed.ledgers = [
            LedgerInfo(at, count, count * entry_size, NOW_MS if at < len(counts) else 0)
            for at, count in enumerate(counts, start=1)
        ]
        self.fill()

    def fill(self) -> None:
        for ledger in self.managed.ledgers:
            bodies = [b"x" * self.entry_size] * ledger.entries
            self.sources.ledgers[ledger.ledger_id] = MemoryLedger(ledger.ledger_id, bodies)

    def add_ledger(self) -> None:
        """Close the last ledger and begin one without entries."""
        last = self.managed.ledgers[-1]
        self.managed.ledgers[-1] = replace(last, timestamp_ms=NOW_MS)
        self.managed.ledgers.append(LedgerInfo(last.ledger_id + 1, 0, 0, 0))
        self.fill()

    def complete(self) -> list[int]:
        return [ledger.ledger_id for ledger in self.managed.ledgers if ledger.is_complete]

    def _uuid(self) -> str | None:
        context = self.managed.ledgers[0].context
        return None if context is None else context.uuid

    async def facts(self) -> Mapping[str, Any]:
        ids = [ledger.ledger_id for ledger in self.managed.ledgers]
        uuid, deleted = self._uuid(), list(self.copies.deleted)
        gone = [self.copies.tried[ledger_id] for ledger_id in deleted]
        failed = self.failed_uuid
        complete = Ledgers(self.complete(), list(self.copies.stored.values()), closed=ids[:-1])
        at = self.first
        return {
            "ledgers": Ledgers(ids),
            "ledgers_left": Ledgers(ids),
            "complete": complete,
            "offloaded": complete,
            "stored": Ledgers(sorted(self.copies.stored.values())),
            "state": "Fenced" if self.managed.is_fenced else "Open",
            "with_uuid": Ledgers(
                [ledger.ledger_id for ledger in self.managed.ledgers if ledger.context is not None]
            ),
            "deleted": AnyOf(
                len(deleted),
                Ledgers(gone),
                Words({"exactly the failed uuid": failed is not None and deleted == [failed]}),
            ),
            "deleted_from_store": Ledgers(gone),
            "context_uuid": Words(
                {
                    "that of the failed try": uuid is not None and uuid == failed,
                    "a new one": uuid not in (failed, None),
                    "none": uuid is None,
                }
            ),
            "in_bookkeeper": Ledgers([ledger for ledger in ids if ledger in self.sources.ledgers]),
            "sources": Ledgers(sorted(self.sources.ledgers)),
            "bookkeeper_deleted": Ledgers(
                [
                    ledger.ledger_id
                    for ledger in self.managed.ledgers
                    if ledger.context and ledger.context.source_deleted
                ]
            ),
            "first_unoffloaded": None
            if at is None
            else AnyOf([NAMES[at[0] - 1], at[1]], list(at), NAMES[at[0] - 1]),
            "first_unoffloaded_ledger": None if at is None else NAMES[at[0] - 1],
            "offloads": self.copies.offloads,
            "driver": [ledger.context.driver for ledger in self.managed.ledgers if ledger.context],
        }

    def conditions(self, sentence: str) -> str:
        meanwhile = re.search(
            r",?\s*\(?(?:meanwhile|while)[,:]? ((?:the )?(?:\w+ )*(?:is|are) trimmed)\)?",
            sentence,
            re.I,
        )
        self._meanwhile = meanwhile[1] if meanwhile else ""
        sentence = sentence.replace(meanwhile[0], "") if meanwhile else sentence
        sentence = self._failures(sentence)
        return re.sub(
            r"(?:the )?metadata (?:write|store|update) (?:meets|answers|fails with|:)? ?BadVersion",
            self._conflict,
            sentence,
        )

    def _failures(self, sentence: str) -> str:
        """Let offloads fail as a sentence says: at once or late, of the ledgers that it names."""
        self.copies.failing, self.copies.fails_after = set(), set()
        late = rf"(?P<late> late| after {_WRITTEN})?"
        before, after = (_LEDGERS.format(name) for name in ("before", "after"))
        pattern = rf"(?:offload)?{before} ?(?:fails|failing|failed)\b{late}{after}"
        found = re.search(pattern, sentence, re.I)
        if found is None:
            return sentence
        named = re.findall(r"[a-z]+", found["before"] or found["after"] or "first")
        numbers = {at for word in named if (at := ordinal_of(word)) is not None}
        (self.copies.fails_after if found["late"] else self.copies.failing).update(numbers)
        left = sentence.replace(found[0], " ").strip(" ,;:")
        return left if "offload" in left else f"offload {left}"

    def _conflict(self, _: re.Match[str]) -> str:
        self.store.conflicts = True
        return ""

    def place(self, said: Any) -> tuple[int, int]:
        """Return a position: "last entry", "last entry of the second ledger", [third, 0]."""
        if isinstance(said, list | tuple):
            ledger, entry = said
            return (ledger if isinstance(ledger, int) else NAMES.index(ledger) + 1), int(entry)
        text = normal(str(said))
        if text in ("earliest", "latest"):
            return (-1, -1) if text == "earliest" else LATEST
        pair = re.search(r"[(\[]?(\w+)[,:] ?(-?\d+)[)\]]?", text)
        if pair is not None:
            return (int(pair[1]) if pair[1].isdigit() else NAMES.index(pair[1]) + 1), int(pair[2])
        ledger_word = re.search(r"(?:of|in) (?:the )?(\w+)(?: ledger)?", text)
        ordinal = ordinal_of(ledger_word[1]) if ledger_word else -1
        infos = self.managed.ledgers
        info = (
            infos[-1]
            if ordinal in (-1, None)
            else next(info for info in infos if info.ledger_id == ordinal)
        )
        return info.ledger_id, 0 if text.startswith(("first", "the first")) else info.entries - 1

    # ---- verbs ----

    @verb(r"offload(?:s|ing)?|offloaded", "offload to the last entry")
    async def offload(self, clause: Clause) -> Any:
        found = clause.take(
            r"(?:up )?to (?P<place>that position|(?:the )?(?:last|first) entry(?: (?:of|in) "
            r"the \w+(?: ledger)?)?|[(\[][^)\]]*[)\]]|earliest|latest|(?:the )?end)"
        )
        clause.skip(
            r"(?:the )?(?:first|second|third|\w+)? ?ledgers?|all|prefix|ok|succeeds|manual(?:ly)?"
        )
        named = found["place"] if found else "last entry"
        if clause.take(
            r"(?:two|both|twice)? ?(?:at once|at the same time|concurrently|in parallel)"
        ):
            clause.skip(r"two|both|twice")
            return await self._offload_at_once(self.place(named))
        count = clause.times()
        result: Any = None
        for _ in range(count):
            place = (
                self.position
                if named == "that position" and self.position
                else self.place("last entry" if named.endswith("end") else named)
            )
            before = self.copies.offloads
            result = await self._offload(place)
            again = self.copies.offloads - before
        nothing = Words({"ok, nothing offloaded again": again == 0, "nothing": again == 0})
        lost = sorted(self.copies.stored.values()) != self.complete()
        gone = Words(
            {
                "succeeds: errors of a ledger that is gone do not count": not lost,
                "succeeds": not lost,
            }
        )
        return Done(AnyOf(nothing, gone, [NAMES[result[0] - 1], result[1]], list(result)))

    async def _offload_at_once(self, place: tuple[int, int]) -> Any:
        """Begin two offloads of which the first one waits until the second was refused."""
        self.copies.waits = asyncio.Event()
        running = asyncio.create_task(self.managed.offload_prefix(*place))
        await self.copies.began.wait()
        try:
            await self.managed.offload_prefix(*place)
        finally:
            self.copies.waits.set()
            self.first = await running
            self.copies.waits = None
        return self.first

    async def _offload(self, place: tuple[int, int]) -> tuple[int, int]:
        if self._meanwhile:
            self.copies.waits = asyncio.Event()
            running = asyncio.create_task(self.managed.offload_prefix(*place))
            began = asyncio.create_task(self.copies.began.wait())
            await asyncio.wait([running, began], return_when=asyncio.FIRST_COMPLETED)
            began.cancel()
            word = next(
                (one for one in re.findall(r"[a-z]+", self._meanwhile) if ordinal_of(one)), "first"
            )
            await self.managed.trim((ordinal_of(word) or 1) + 1)
            self.copies.waits.set()
            self.first = await running
            self.copies.waits = None
            return self.first
        try:
            self.first = await self.managed.offload_prefix(*place)
        except RuntimeError:
            self.failed_uuid = self._uuid()
            raise
        return self.first

    @verb(r"(?:run |the )?automatic(?:ally)?(?: offload)?|trigger(?:s|ed)?", "automatic offload")
    async def offload_due(self, clause: Clause) -> None:
        clause.skip(r"offloads?|run|once|policy|threshold")
        await self.managed.offload_due(self.policy)

    @verb(r"consumes?|acknowledges?|marks? (?:all )?deleted?", "consume all")
    async def consume(self, clause: Clause) -> None:
        clause.skip(r"all|everything|entries|up to the last entry")
        self.has_slow_cursor = False
        if self.clock.now_ms - NOW_MS >= self.retention_ms:
            await self.managed.trim(self.managed.ledgers[-1].ledger_id)

    @verb(r"trims?|trimmed|retention", "trim after 2 minutes")
    async def trim(self, clause: Clause) -> Any:
        self._advance(clause)
        word = clause.take(r"(?:the )?(first|second|third|fourth)(?: (\w+))?(?: ledgers?)?")
        if word is not None:
            count = number_of(word[2]) if word[2] and word[2] != "ledger" else ordinal_of(word[1])
            return await self.managed.trim((count or 1) + 1)
        clause.skip(r"ledgers?|consumed|runs?")
        age = self.clock.now_ms - NOW_MS
        if not self.has_slow_cursor and age > self.retention_ms:
            await self.managed.trim(self.managed.ledgers[-1].ledger_id)
        await self.managed.delete_sources(self.lag_ms)
        return None

    def _advance(self, clause: Clause) -> None:
        found = clause.take(
            r"(?:after |for )?(\d+) ?(minutes?|min|ms|milliseconds|seconds?|s|hours?|h|days?)\b"
        )
        if found is not None:
            unit = {
                "mi": 60_000,
                "ms": 1,
                "s": 1000,
                "se": 1000,
                "h": 3_600_000,
                "ho": 3_600_000,
                "d": 86_400_000,
                "da": 86_400_000,
            }
            after = int(found[1]) * (1 if found[2].startswith("mill") else unit[found[2][:2]])
            self.clock.now_ms = NOW_MS + after if "after" in found[0] else self.clock.now_ms + after

    @verb(r"waits?|passes?|advances?", "wait 2 minutes")
    def wait(self, clause: Clause) -> None:
        self._advance(clause)

    @verb(
        r"deletes? (?:the )?(?:managed ledger|topic)|(?:managed ledger|topic) (?:is )?deleted",
        "delete the managed ledger",
    )
    async def delete_all(self, clause: Clause) -> None:
        await self.managed.trim(self.managed.ledgers[-1].ledger_id)
        last = self.managed.ledgers[-1]
        if last.context is not None:
            await self.copies.delete(last.ledger_id, last.context.uuid)
        await self.sources.delete(last.ledger_id)

    @verb(r"deletes? (?:the )?sources?|lag passes", "delete sources")
    async def delete_sources(self, clause: Clause) -> Any:
        self._advance(clause)
        return len(await self.managed.delete_sources(self.lag_ms))

    @verb(r"reopens?|opens?|restarts?", "reopen")
    async def reopen(self, clause: Clause) -> None:
        clause.skip(r"managed|ledgers?")
        self.store.conflicts = False
        version = self.managed._version
        self.managed._version = await self.store.save(self.managed.ledgers, version)
        await self.managed.open()

    @verb(r"adds?|appends?|writes?|(?=(?:one|two|\d+) (?:more )?entr)", "one more entry")
    def add(self, clause: Clause) -> None:
        counted = clause.take(r"(\d+|one|two|three|ten|an?)\b(?: more)? (?:entry|entries)")
        for _ in range(number_of(counted[1]) if counted else 1):
            self._add_entry()

    def _add_entry(self) -> None:
        """Append an entry, in a new ledger if the last one is full."""
        last = self.managed.ledgers[-1]
        if last.entries < self.limit:
            self.managed.ledgers[-1] = replace(
                last, entries=last.entries + 1, size=last.size + self.entry_size
            )
        else:
            closed = replace(last, timestamp_ms=self.clock.now_ms)
            self.managed.ledgers[-1:] = [
                closed,
                LedgerInfo(last.ledger_id + 1, 1, self.entry_size, 0),
            ]
        self.fill()
