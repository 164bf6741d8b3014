"""Automatic offload: carries out the policies of the topics that a broker owns.

Copies are made by any clock, because an early copy does no harm. Sources are never deleted by a
wall clock alone: this process's timer must also have watched the copy for the lag. A new process
watches its copies from its start on. It never deletes ledgers. The broker, which knows the reads of
its consumers, calls `ManagedLedger.trim`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from streammeta.brokers.pulsar.ledger_list import ManagedLedger, ManagedLedgerFencedError
from streammeta.brokers.pulsar.policies import AllPolicies, PolicyError, TopicPolicies

INTERVAL_S = 60.0
TOPICS_AT_ONCE = 4
"""Topics that are offloaded at the same time. The others wait."""

_log = logging.getLogger(__name__)


class PolicySource(Protocol):
    """Source of policies, such as `PolicyStore`."""

    async def load(self) -> AllPolicies:
        """Return all policies."""
        ...


@dataclass(slots=True)
class _Topic:
    """Managed ledger, and the times since which its whole copies are watched, in timer ms."""

    namespace: str
    name: str
    managed: ManagedLedger
    watched: dict[tuple[int, str], int] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None

    def watched_for(self, lag_ms: int, now_ms: int) -> set[int]:
        """Return the ledgers whose copies have been watched for a time."""
        contexts = ((info.ledger_id, info.context) for info in self.managed.ledgers)
        whole = [
            (ledger_id, context.uuid)
            for ledger_id, context in contexts
            if context is not None and context.complete and not context.source_deleted
        ]
        # Copies that are no longer whole, or no longer listed, are not watched.
        self.watched = {copy: self.watched.get(copy, now_ms) for copy in whole}
        return {copy[0] for copy, since_ms in self.watched.items() if now_ms - since_ms >= lag_ms}


def _timer_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class AutomaticOffload:
    """Carries out policies on the topics of a broker, from `async with` to its end."""

    def __init__(
        self,
        policies: PolicySource,
        *,
        interval_s: float = INTERVAL_S,
        timer_ms: Callable[[], int] = _timer_ms,
    ) -> None:
        self._policies = policies
        self._interval_s = interval_s
        self._timer_ms = timer_ms
        self._topics: dict[tuple[str, str], _Topic] = {}
        self._offloads: set[asyncio.Task[None]] = set()
        """Tasks in flight, including tasks of removed topics."""
        self._places = asyncio.Semaphore(TOPICS_AT_ONCE)
        self._woken = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start rounds."""
        self._running = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop. Offloads in flight are cancelled, and the next one deletes their remains."""
        await _cancel(*self._offloads, self._running)

    @property
    def topics(self) -> list[tuple[str, str]]:
        """Namespaces and names of the served topics."""
        return list(self._topics)

    def add(self, namespace: str, name: str, managed: ManagedLedger) -> None:
        """Serve a topic from the next round on, which starts at once. `managed` is open.

        Replaces an earlier managed ledger of the topic, whose offload is cancelled.
        """
        former = self._topics.get((namespace, name))
        # Two offloads of one topic would fence each other.
        if former is not None and former.task is not None:
            former.task.cancel()
        self._topics[namespace, name] = _Topic(namespace, name, managed)
        self.wake()

    async def remove(self, namespace: str, name: str) -> None:
        """Stop serving a topic, and cancel its offload in flight."""
        topic = self._topics.pop((namespace, name), None)
        if topic is not None:
            await _cancel(topic.task)

    def wake(self) -> None:
        """Start a round now, for example after a ledger was closed."""
        self._woken.set()

    async def run_once(self) -> None:
        """Carry out one round. Raise errors of the policies' source.

        A topic is skipped while its earlier round is in flight.
        """
        await asyncio.gather(*await self._begin_round())

    async def _run(self) -> None:
        while True:
            # Cleared before the round: a wake during it starts another one.
            self._woken.clear()
            try:
                await self._begin_round()
            except Exception as error:  # noqa: BLE001 - the next round must come
                _log.warning(
                    "policies can't be read, retrying in %g s: %s", self._interval_s, error
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._woken.wait()

    async def _begin_round(self) -> list[asyncio.Task[None]]:
        found = await self._policies.load()
        begun = []
        for topic in self._topics.values():
            # A slow topic does not delay the next round of the others.
            if topic.task is None or topic.task.done():
                topic.task = asyncio.create_task(self._serve(topic, found))
                # The set holds a reference, because the loop only has a weak one.
                self._offloads.add(topic.task)
                topic.task.add_done_callback(self._offloads.discard)
                begun.append(topic.task)
        return begun

    async def _serve(self, topic: _Topic, found: AllPolicies) -> None:
        where = f"{topic.namespace}/{topic.name}"
        # Offloads compete with the broker's own traffic, so only a few run at once.
        async with self._places:
            try:
                policies = found.effective(topic.namespace, topic.name)
                try:
                    await topic.managed.offload_due(policies.offload)
                finally:
                    # Also after a failed offload: earlier copies are whole and may be due.
                    await self._delete_sources(topic, policies)
            except PolicyError as error:
                _log.warning("topic %s is not offloaded: %s", where, error)
            except ManagedLedgerFencedError as error:
                # The topic may have been opened again meanwhile. That one stays.
                if self._topics.get((topic.namespace, topic.name)) is topic:
                    del self._topics[topic.namespace, topic.name]
                _log.warning(
                    "topic %s is not served any longer, because another owner has it: %s."
                    " Open it again to take it back",
                    where,
                    error,
                )
            except Exception as error:  # noqa: BLE001 - the other topics must be served
                _log.warning(
                    "offload of topic %s failed, retrying in %g s: %s",
                    where,
                    self._interval_s,
                    error,
                )

    async def _delete_sources(self, topic: _Topic, policies: TopicPolicies) -> None:
        lag_ms = policies.offload.deletion_lag_ms
        if lag_ms is None:
            return
        # Wall clocks may jump, so the timer must agree that the lag has passed.
        watched = topic.watched_for(lag_ms, self._timer_ms())
        await topic.managed.delete_sources(lag_ms, among=watched)


async def _cancel(*tasks: asyncio.Task[None] | None) -> None:
    """Cancel tasks, and wait until they have ended."""
    running = [task for task in tasks if task is not None and not task.done()]
    for task in running:
        task.cancel()
    if running:
        # Not `gather`: an error of a cancelled task must not end the wait for the others.
        await asyncio.wait(running)
