"""Offload that runs by itself: the policies of the topics that a broker owns, carried out for ever.

Copies are made by any clock: one made early harms nobody. Sources are deleted by no wall clock
alone: a copy has also been watched for the lag by this process's timer. A process that starts
watches its copies from then on. Ledgers are deleted by nobody here: `ManagedLedger.trim` is the
broker's call, which knows what its consumers have read.
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
from streammeta.brokers.pulsar.policies import PolicyError, TopicPolicies
from streammeta.brokers.pulsar.policy_store import AllPolicies

INTERVAL_S = 60.0
TOPICS_AT_ONCE = 4
"""Topics that are offloaded at the same time; the others wait."""

_log = logging.getLogger(__name__)


class PolicySource(Protocol):
    """Where policies are read; `PolicyStore` is."""

    async def load(self) -> AllPolicies:
        """Return all policies."""
        ...


@dataclass(slots=True)
class _Topic:
    """A managed ledger, and since when its whole copies have been watched, in ms of the timer."""

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
        """Work of topics that is under way, also of those that are served no more."""
        self._places = asyncio.Semaphore(TOPICS_AT_ONCE)
        self._woken = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin rounds."""
        self._running = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop: offloads under way end, and leave nothing but what the next one deletes."""
        await _cancel(*self._offloads, self._running)

    @property
    def topics(self) -> list[tuple[str, str]]:
        """Namespaces and names of the topics that are served."""
        return list(self._topics)

    def add(self, namespace: str, name: str, managed: ManagedLedger) -> None:
        """Serve a topic from the next round on, which comes at once; `managed` is open.

        It takes the place of one that was opened before, whose offload ends.
        """
        former = self._topics.get((namespace, name))
        if former is not None and former.task is not None:
            former.task.cancel()
        self._topics[namespace, name] = _Topic(namespace, name, managed)
        self.wake()

    async def remove(self, namespace: str, name: str) -> None:
        """Serve a topic no more; an offload of it under way ends."""
        topic = self._topics.pop((namespace, name), None)
        if topic is not None:
            await _cancel(topic.task)

    def wake(self) -> None:
        """Begin a round now, as after a ledger was closed."""
        self._woken.set()

    async def run_once(self) -> None:
        """Carry out one round; raise errors of the policies' source.

        A topic whose former round is under way is left to that.
        """
        await asyncio.gather(*await self._begin_round())

    async def _run(self) -> None:
        while True:
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
            if topic.task is None or topic.task.done():
                topic.task = asyncio.create_task(self._serve(topic, found))
                self._offloads.add(topic.task)
                topic.task.add_done_callback(self._offloads.discard)
                begun.append(topic.task)
        return begun

    async def _serve(self, topic: _Topic, found: AllPolicies) -> None:
        where = f"{topic.namespace}/{topic.name}"
        async with self._places:
            try:
                policies = found.effective(topic.namespace, topic.name)
                try:
                    await topic.managed.offload_due(policies.offload)
                finally:
                    await self._delete_sources(topic, policies)
            except PolicyError as error:
                _log.warning("topic %s is not offloaded: %s", where, error)
            except ManagedLedgerFencedError as error:
                if self._topics.get((topic.namespace, topic.name)) is topic:
                    del self._topics[topic.namespace, topic.name]
                _log.warning(
                    "topic %s is served no more, as another owner has it: %s; open it again to"
                    " take it back",
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
        watched = topic.watched_for(lag_ms, self._timer_ms())
        await topic.managed.delete_sources(lag_ms, among=watched)


async def _cancel(*tasks: asyncio.Task[None] | None) -> None:
    """Cancel tasks, and wait until they have ended."""
    running = [task for task in tasks if task is not None and not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
