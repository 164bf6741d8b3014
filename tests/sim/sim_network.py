"""The network between simulated nodes: loses, doubles, delays, cuts off, and brings back old mail.

Knows nodes by their ids. A message that is lost may or may not be reported to its sender.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from streammeta.controller.ids import ClusterId
from streammeta.controller.quorum.messages import FetchSnapshotResponse, Message, RequestHeader
from tests.sim.sim_profiles import Profile
from tests.sim.sim_time import Timeline

Link = tuple[int, int]
"""Sender and receiver."""

_MEMORY = 4000
"""Messages kept to be delivered again; when full, the oldest make room."""


def ends(message: Message) -> Link:
    header = message.header
    if isinstance(header, RequestHeader):
        return header.sender.node_id, header.receiver.node_id
    return header.sender, header.receiver


class Network:
    """Links of one cluster."""

    def __init__(
        self,
        timeline: Timeline,
        rng: random.Random,
        profile: Profile,
        counts: Counter[str],
        arrive: Callable[[Message], None],
        report_lost: Callable[[Message], None],
    ) -> None:
        self._timeline = timeline
        self._rng = rng
        self._profile = profile
        self._counts = counts
        self._arrive = arrive
        self._report_lost = report_lost
        self._cuts: list[frozenset[Link]] = []
        self._blocked: frozenset[Link] = frozenset()
        self._slow: set[Link] = set()
        self._held_up: dict[Link, int] = {}
        """Milliseconds that every message over a link takes longer."""
        self._sent: list[Message] = []
        self._oldest = 0

    # -- sending

    def send(self, message: Message) -> None:
        """Lose, double, delay or deliver a message."""
        rng, profile = self._rng, self._profile
        self._remember(message)
        delay = 1 + int(rng.random() * profile.latency_ms)
        if profile.is_noisy:
            if rng.random() < self._loss(message):
                self._lose(message)
                return
            if rng.random() < profile.duplicate:
                self._counts["messages doubled"] += 1
                self._deliver_after(1 + rng.randrange(profile.long_delay_ms), message)
            if rng.random() < profile.delay:
                self._counts["messages delayed"] += 1
                delay = 1 + rng.randrange(profile.long_delay_ms)
        if self._slow and ends(message) in self._slow:
            delay += self._drag(message)
        if self._held_up:
            delay += self._held_up.get(ends(message), 0)
        self._deliver_after(delay, message)

    def _loss(self, message: Message) -> float:
        is_request = isinstance(message.header, RequestHeader)
        return self._profile.drop if is_request else self._profile.lose_answer

    def _lose(self, message: Message) -> None:
        is_request = isinstance(message.header, RequestHeader)
        self._counts["requests lost" if is_request else "answers lost"] += 1
        if self._rng.random() < 0.5:
            self._report_lost(message)

    def _drag(self, message: Message) -> int:
        size = len(message.data) if isinstance(message, FetchSnapshotResponse) else 0
        return size // 3

    def _deliver_after(self, delay: int, message: Message) -> None:
        self._timeline.later(delay, lambda: self._deliver(message))

    def _deliver(self, message: Message) -> None:
        if self._blocked and ends(message) in self._blocked:
            self._counts["messages cut off"] += 1
            return
        self._arrive(message)

    # -- faults

    def cut(self, links: Iterable[Link], for_ms: int | None) -> None:
        """Block links in the named direction, for a time or for good."""
        cut = frozenset(links)
        self._cuts.append(cut)
        self._block()
        if for_ms is not None:
            self._timeline.later(for_ms, lambda: self._mend(cut))

    def _mend(self, cut: frozenset[Link]) -> None:
        if cut in self._cuts:
            self._cuts.remove(cut)
            self._block()

    def _block(self) -> None:
        self._blocked = frozenset().union(*self._cuts)

    def slow_down(self, links: Iterable[Link], for_ms: int) -> None:
        """Make links take the longer for a snapshot's bytes the more there are."""
        chosen = set(links)
        self._slow |= chosen
        self._timeline.later(for_ms, lambda: self._slow.difference_update(chosen))

    def hold_up(self, links: Iterable[Link], by_ms: int, for_ms: int) -> None:
        """Make every message that is sent over links in the next `for_ms` take longer."""
        chosen = dict.fromkeys(links, by_ms)
        self._held_up.update(chosen)

        def let_go() -> None:
            for link in chosen:
                self._held_up.pop(link, None)

        self._timeline.later(for_ms, let_go)

    def replay(self) -> None:
        """Deliver any message that was ever sent once more, at times as one of another cluster."""
        if not self._sent:
            return
        message = self._rng.choice(self._sent)
        if isinstance(message.header, RequestHeader) and self._rng.random() < 0.1:
            self._counts["messages of another cluster"] += 1
            header = replace(message.header, cluster_id=ClusterId("another"))
            self._arrive(replace(message, header=header))
        else:
            self._counts["messages replayed late"] += 1
            self._arrive(message)

    def calm_down(self, profile: Profile) -> None:
        """Heal everything; what is under way still arrives."""
        self._profile = profile
        self._cuts.clear()
        self._slow.clear()
        self._held_up.clear()
        self._block()

    def _remember(self, message: Message) -> None:
        if len(self._sent) < _MEMORY:
            self._sent.append(message)
        else:
            self._sent[self._oldest] = message
            self._oldest = (self._oldest + 1) % _MEMORY


# -- shapes of partitions


def two_way(pairs: Iterable[Link]) -> set[Link]:
    """Both directions of each pair."""
    return {link for a, b in pairs for link in ((a, b), (b, a))}


def split(nodes: list[int], rng: random.Random) -> set[Link]:
    """Two halves that don't hear one another."""
    side = {node for node in nodes if rng.random() < 0.5}
    return {(a, b) for a in nodes for b in nodes if (a in side) != (b in side)}


def isolate(nodes: list[int], rng: random.Random) -> set[Link]:
    """One node cut off from all others."""
    alone = rng.choice(nodes)
    return two_way((alone, other) for other in nodes if other != alone)


def bridge(nodes: list[int], rng: random.Random) -> set[Link]:
    """Two halves with one node between them that both hear."""
    middle = rng.choice(nodes)
    return {link for link in split(nodes, rng) if middle not in link}


def ring(nodes: list[int], rng: random.Random) -> set[Link]:
    """Each hears two neighbours only."""
    order = list(nodes)
    rng.shuffle(order)
    place = {node: index for index, node in enumerate(order)}
    apart = (1, len(order) - 1)
    return {
        (a, b) for a in nodes for b in nodes if a != b and abs(place[a] - place[b]) not in apart
    }


def chain_of_rivals(nodes: list[int], rng: random.Random) -> set[Link]:
    """KIP-996's example: links A-C, B-D, C-D, C-E and D-E only, where C and D could alternate."""
    order = list(nodes)
    rng.shuffle(order)
    if len(order) < 5:
        return bridge(nodes, rng)
    a, b, c, d, e = order[:5]
    linked = two_way([(a, c), (b, d), (c, d), (c, e), (d, e)])
    return {(x, y) for x in order for y in order if x != y and (x, y) not in linked}


def deaf(nodes: list[int], rng: random.Random) -> set[Link]:
    """One node that sends and does not receive."""
    chosen = rng.choice(nodes)
    return {(other, chosen) for other in nodes if other != chosen}


def mute(nodes: list[int], rng: random.Random) -> set[Link]:
    """One node that receives and does not send."""
    chosen = rng.choice(nodes)
    return {(chosen, other) for other in nodes if other != chosen}


def one_link(nodes: list[int], rng: random.Random) -> set[Link]:
    """One direction between two nodes."""
    return {(rng.choice(nodes), rng.choice(nodes))}


SHAPES = {
    "split": split,
    "isolated node": isolate,
    "bridge": bridge,
    "ring": ring,
    "chain of rivals": chain_of_rivals,
}
ONE_WAY_SHAPES = {"deaf node": deaf, "mute node": mute, "one link": one_link}
