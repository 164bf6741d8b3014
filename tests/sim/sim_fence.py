"""An old and a restored cluster side by side, with the bucket out of the old one's reach.

The old cluster is the simulated quorum. Brokers upload objects and commit them there, each the only
writer of its list. At some moment another cluster is restored over it: its marker goes into the
bucket, it waits, then takes the lists of an earlier point of the log, adopts what the bucket holds
beyond, and acknowledges commits of its own. Both use the product's looks and leases, with times
that are a hundredth of the real ones. Checked at each answer: nothing is acknowledged by the old
cluster once the restored one has begun, and everything that was acknowledged before is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar, cast
from unittest.mock import patch

from streammeta.controller.lifecycle import marker_watch
from streammeta.controller.lifecycle.marker_watch import MarkerWatch
from streammeta.controller.metadata.decisions.maintenance import Claim
from streammeta.controller.runtime.writer import bucket_permits
from streammeta.controller.runtime.writer.bucket_permits import MarkerLease
from streammeta.controller.runtime.writer.controller import Answered as ControllerAnswered
from streammeta.storage.cluster_files import bucket_marker
from streammeta.storage.errors import StoreUnavailableError
from tests.kit.memory_store import MemoryObjectStore
from tests.linearizability.models import CommitRange, Committed, NotAtEnd
from tests.sim.sim_controller import Answered, Outcome, Refused
from tests.sim.sim_store import Request
from tests.sim.sim_time import NodeClock, SimLoop, check

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode
    from tests.sim.sim_world import World

T = TypeVar("T")

LEASE_MS, FENCE_WAIT_MS, RECHECK_MS = 300, 350, 100
"""A hundredth of the product's times: a storm lasts for one or two seconds."""

_NAMESPACE = "_streammeta_sim"
_OLD, _NEW = "old", "new"
_INTERVAL_MS = 10
_BEGINS_MS = (200, 900)
"""Time of the restore, from and below."""
_FAILS = 0.05
_SLOW, _SLOW_TO_RESTORED = 0.5, 0.05
"""Shares of looks whose way to the bucket, or back, takes up to `_SLOW_MS`."""
_SLOW_MS = 250
_BROKERS = 4
_THINK_MS = 8
_ASK_AGAIN_MS = 60
_RESTARTS = 0.4
"""Share of the restored clusters whose process starts again while it waits."""
_ACKNOWLEDGED = 10
"""Commits that the restored cluster acknowledges before the last look."""
_WITHIN_MS = 5_000


class SimMarkerWatch(MarkerWatch):
    """Looks of one process, which take simulated time.

    `reaches` says whether one arrives, `slow` is the share of those that take long.
    """

    def __init__(
        self,
        world: World,
        lease: MarkerLease,
        uuid: str,
        reaches: Callable[[], bool],
        slow: float,
    ) -> None:
        restoration = world.restoration
        assert restoration is not None
        super().__init__(
            restoration.bucket,
            lease,
            lambda: Claim(uuid, 1),
            lambda: 0,
            cluster_id="sim",
            namespace=_NAMESPACE,
            interval_ms=_INTERVAL_MS,
            on_refusal=lambda: world.count("looks that found another owner"),
        )
        self._world, self._reaches, self._slow = world, reaches, slow
        self._rng = world.rngs.fence

    async def _call(self, call: Callable[[Any], T]) -> T:
        await asyncio.sleep(self._some_delay())
        if not self._reaches() or self._rng.random() < _FAILS:
            self._world.count("looks that failed")
            raise StoreUnavailableError("the bucket is out of reach")
        result = call(self._store)
        await asyncio.sleep(self._some_delay())
        return result

    def _some_delay(self) -> float:
        return self._rng.randrange(_SLOW_MS if self._rng.random() < self._slow else 5) / 1000


class Restoration:
    """The bucket, the brokers of the old cluster, and the cluster that is restored over it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rngs.fence
        self.bucket = MemoryObjectStore()
        marker = bucket_marker.BucketMarker(
            cluster_id="sim", cluster_uuid=_OLD, namespace=_NAMESPACE, created_ms=0
        )
        bucket_marker.create_marker(self.bucket, marker)
        self._restores_at = self._rng.randrange(*_BEGINS_MS)
        self._blind_from = self._restores_at + self._rng.randrange(-LEASE_MS, RECHECK_MS)
        self._sees_now_and_then = self._rng.random() < 0.3
        self.uploaded: dict[str, list[int]] = {f"f{number}": [] for number in range(_BROKERS)}
        """Objects in the bucket by the list that they are to continue, in order."""
        self._acknowledged: dict[tuple[str, int], int] = {}
        """Objects acknowledged by the old cluster, by list and place."""
        self._lists: dict[str, list[int]] | None = None
        """Lists of the restored cluster; None before it has begun."""
        self._count = 0
        self._patches = ExitStack()
        for module, name, value in (
            (bucket_permits, "LEASE_MS", LEASE_MS),
            (bucket_marker, "FENCE_WAIT_MS", FENCE_WAIT_MS),
            (marker_watch, "RECHECK_MS", RECHECK_MS),
        ):
            self._patches.enter_context(patch.object(module, name, value))

    def close(self) -> None:
        """Leave the product as it was."""
        self._patches.close()

    def begin(self) -> None:
        """Let brokers write, and restore another cluster at some moment."""
        for key in self.uploaded:
            Broker(self._world, self, key).begin()
        self._world.timeline.later(self._restores_at, self._restore)

    def go(self) -> None:
        """Let both clusters live until the restored one has acknowledged some commits."""
        done = self._world.timeline.run_until(lambda: self._count >= _ACKNOWLEDGED, _WITHIN_MS)
        check(done, "the restored cluster begins in time", f"{self._count} commits acknowledged")

    # -- the old cluster

    def lease_of(self, node: SimNode) -> MarkerLease:
        """Return the lease of one life of a node."""
        return MarkerLease(node.now)

    def watch_of(self, node: SimNode) -> Coroutine[Any, Any, None]:
        """Return the looks of one life of a node."""
        lease = node.service.controller.lease
        return SimMarkerWatch(self._world, lease, _OLD, self._is_reached, _SLOW).run()

    def _is_reached(self) -> bool:
        if self._world.timeline.now < self._blind_from:
            return True
        return self._sees_now_and_then and self._rng.random() < 0.2

    def check_answer(self, key: str, request: Request, answered: ControllerAnswered) -> None:
        """Look at an answer of the old cluster to a change, as it is released."""
        check(
            self._lists is None,
            "the old cluster acknowledges nothing once the restored one has begun",
            f"{key}: {request}",
        )
        if isinstance(cast(Any, answered.answer), Committed) and key in self.uploaded:
            assert isinstance(request, CommitRange)
            self._acknowledged[key, request.start] = request.object_id

    # -- the restored cluster

    def _restore(self) -> None:
        """Put the marker of the new cluster, from a point that was committed before."""
        self._world.count("clusters restored")
        self._point = self._rng.randint(0, self._world.ghost.ledger.end)
        generation = bucket_marker.Generation(
            cluster_id="sim",
            cluster_uuid=_NEW,
            namespace=_NAMESPACE,
            number=2,
            undecided_from=0,
            undecided_below=1,
            created_ms=0,
        )
        bucket_marker.create_generation(self.bucket, generation)
        Restored(self._world, self).start()
        if self._rng.random() < _RESTARTS:
            delay = self._rng.randrange(FENCE_WAIT_MS)
            self._world.timeline.later(delay, Restored(self._world, self).start)

    def acknowledge(self) -> None:
        """Continue a list in the restored cluster, whose lease is held."""
        if self._lists is None:
            self._lists = {key: self._adopt(key) for key in self.uploaded}
            for (key, start), object_id in self._acknowledged.items():
                self._check_kept(key, start, object_id)
        key = self._rng.choice(tuple(self.uploaded))
        place = len(self._lists[key])
        twice = (key, place) in self._acknowledged
        check(not twice, "no offset is acknowledged by both clusters", f"{key} at {place}")
        self._lists[key].append(-self._world.next_number())
        self._count += 1
        self._world.count("commits of the restored cluster")

    def _adopt(self, key: str) -> list[int]:
        """Return a list at the restored point, continued by the objects in the bucket."""
        held = cast("tuple[int, ...] | None", self._world.ghost.ledger.held_at(key, self._point))
        kept = list(held or ())
        adopted = self.uploaded[key][len(kept) :]
        self._world.counts["objects adopted"] += len(adopted)
        return kept + adopted

    def _check_kept(self, key: str, start: int, object_id: int) -> None:
        assert self._lists is not None
        held = self._lists[key]
        check(
            start < len(held) and held[start] == object_id,
            "what the old cluster acknowledged is kept",
            f"{key} at {start}: object {object_id}, the restored cluster has {held}",
        )


class Broker:
    """The only writer of a list: uploads an object, and commits it until that is answered."""

    def __init__(self, world: World, restoration: Restoration, key: str) -> None:
        self._world, self._restoration, self._key = world, restoration, key
        self._rng = world.rngs.fence
        self._call = 0

    def begin(self) -> None:
        """Begin with an empty list."""
        self._world.timeline.later(1 + self._rng.randrange(_THINK_MS), self._upload)

    def _upload(self) -> None:
        object_id = self._world.next_number()
        objects = self._restoration.uploaded[self._key]
        start = len(objects)
        objects.append(object_id)
        self._ask(CommitRange(object_id, start, start + 1), None)

    def _ask(self, request: CommitRange, leader: int | None) -> None:
        self._call += 1
        call = self._call

        def once(outcome: Outcome | None) -> None:
            if call == self._call:
                self._call += 1
                self._take(request, outcome)

        count = len(self._world.nodes)
        target = self._rng.randrange(count) if leader is None else leader
        self._world.call(target, self._key, request, None, once)
        self._world.timeline.later(_ASK_AGAIN_MS, lambda: once(None))

    def _take(self, request: CommitRange, outcome: Outcome | None) -> None:
        if isinstance(outcome, Answered):
            is_refused = isinstance(outcome.answer, NotAtEnd)
            check(not is_refused, "the only writer of a list is never refused", f"{request}")
            self.begin()
            return
        leader = outcome.leader if isinstance(outcome, Refused) else None
        self._world.timeline.later(1 + self._rng.randrange(10), lambda: self._ask(request, leader))


class Restored:
    """A process of the restored cluster: it looks, waits, and then acknowledges commits."""

    def __init__(self, world: World, restoration: Restoration) -> None:
        self.world, self._restoration = world, restoration
        drift = world.profile.drift
        self.clock = NodeClock(
            world.rngs.fence.randrange(100_000), 1000 + world.rngs.fence.randint(-drift, drift)
        )
        self.loop = SimLoop(self)  # type: ignore[abstract, arg-type]
        self._lease = MarkerLease(self.now)

    def start(self) -> None:
        """Look from now on, and acknowledge commits as soon as the lease is held."""
        watch = SimMarkerWatch(self.world, self._lease, _NEW, lambda: True, _SLOW_TO_RESTORED)
        before = self.loop.enter()
        try:
            self.loop.create_task(watch.run())
        finally:
            self.loop.leave(before)
        self._go_on()

    def now(self) -> int:
        return self.clock.show(self.world.timeline.now)

    def later(self, delay: int, action: Callable[[], None]) -> None:
        """Do something later, with this process's event loop running."""

        def entered() -> None:
            before = self.loop.enter()
            try:
                action()
            finally:
                self.loop.leave(before)

        self.world.timeline.later(delay, entered)

    def _go_on(self) -> None:
        if self._lease.is_held:
            self._restoration.acknowledge()
        self.world.timeline.later(5, self._go_on)
