"""A whole quorum in one thread, one event at a time, replayed exactly by its seed.

Puts together nodes, network, clients, operator and weather, and carries one run through: a storm,
then perhaps a time in which only a core of the quorum is well, then calm, in which all must
catch up and everything acknowledged must be there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from streammeta.controller.errors import LogOfBeforeError, NewerLogError
from streammeta.controller.features import BASE_LEVEL, SUPPORTED, Levels
from streammeta.controller.ids import NodeId
from streammeta.controller.journal import errors
from streammeta.controller.quorum.config import QuorumLimits, QuorumTimings
from streammeta.controller.quorum.events import PeerConnectionLost, Received, RequestFailed
from streammeta.controller.quorum.messages import Message, RequestHeader
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.storage.durable_files import DiskFullError
from tests.linearizability.history import Recorder
from tests.sim.sim_appender import Appender
from tests.sim.sim_backup import Backups
from tests.sim.sim_clients import Client, Compactor, Janitor, MapClient, Repeater, Upgrader
from tests.sim.sim_controller import Outcome, Refused
from tests.sim.sim_disk import StoppedError
from tests.sim.sim_fence import Restoration
from tests.sim.sim_followers import Auditor, Follower
from tests.sim.sim_ghost import Ghost
from tests.sim.sim_network import Network, ends
from tests.sim.sim_node import SimNode
from tests.sim.sim_profiles import Profile, profile_for
from tests.sim.sim_store import READS, Request, Store
from tests.sim.sim_time import Timeline, Trace, violated
from tests.sim.sim_weather import Operator, Weather

POOL_MAX = 7
"""Nodes at most."""
_SHARE_WITH_A_MAP = 1 / 14
"""Share of the runs in which the real map is replicated too, which takes time."""
_SHARE_WITH_A_MAP_AND_BACKUPS = 1 / 4
_SHARE_WITH_TWO_VERSIONS = 0.4
"""Share of those in which some nodes lack the level that is in force later."""
OLDER_LEVELS = Levels(BASE_LEVEL, BASE_LEVEL)
_MAP_CLIENTS = 2
_SHARE_WITH_REPEATS = 0.4
"""Share of the runs with a map in which a client repeats commits that left rows out."""
_SHARE_WITH_APPENDS = 0.5
"""Share of the runs with a map in which producers append to shared streams."""
_UNCOMMITTED_MAX = 6_000
_GIVEN_UP_MS = 200
_RESTART_DELAYS = (1, 20, 100, 400, 900)


@dataclass(frozen=True, slots=True)
class Streams:
    """Random numbers, apart by concern, so that one more of one kind changes no other."""

    time: random.Random
    network: random.Random
    disk: random.Random
    faults: random.Random
    clients: random.Random
    nodes: random.Random
    loops: random.Random
    followers: random.Random
    room: random.Random
    losses: random.Random
    backup: random.Random
    fence: random.Random

    @classmethod
    def of(cls, seed: int, profile: str) -> Streams:
        return cls(*(random.Random(f"{seed}/{profile}/{name}") for name in cls.__slots__))


class World:
    def __init__(
        self, seed: int, profile_name: str = "swarm", *, trace: Trace | None = None
    ) -> None:
        shape = random.Random(f"{seed}/{profile_name}")
        self.rngs = Streams.of(seed, profile_name)
        self.seed = seed
        self.profile: Profile = profile_for(profile_name, shape)
        self.timeline = Timeline()
        self.counts: Counter[str] = Counter()
        self.trace = trace
        self.tracing = trace is not None
        self.ring_bytes = random.Random(f"{seed}/{profile_name}/ring").choice([1_000, 64 << 20])
        """Bytes of changes that a node keeps for its followers."""
        self.recorder = Recorder()
        self.clients_may_go_on = True
        self._next_number = 0
        self.timings = _some_timings(shape)
        self.limits = _some_limits(shape)
        self.segment_bytes = shape.choice([300, 700, 2000])
        self.snapshot_padding = shape.choice([60, 60, 2000])
        voters = shape.choice([1, 2, 3, 3, 3, 3, 4, 5, 5])
        pool = min(POOL_MAX, voters + shape.randint(0, self.profile.spare_nodes))
        bootstrap = VoterSet(
            tuple(Voter(ReplicaKey(NodeId(node)), f"node{node}:1") for node in range(voters))
        )
        self.seeds = tuple(NodeId(node) for node in range(pool))
        self.network = Network(
            self.timeline, self.rngs.network, self.profile, self.counts, self._arrive, self._lost
        )
        self.ghost = Ghost(bootstrap)
        self.operator = Operator(self)
        self.nodes = [
            SimNode(self, node, bootstrap if node < voters else VoterSet()) for node in range(pool)
        ]
        self.backups = Backups(self) if self.profile.backups else None
        self.restoration = Restoration(self) if self.profile.restores else None
        self.weather = Weather(self)
        self.counts["clocks that drift"] += sum(node.clock.rate != 1000 for node in self.nodes)
        self.clients: list[Client | MapClient] = [
            Client(self, number) for number in range(self.profile.clients)
        ]
        share = _SHARE_WITH_A_MAP_AND_BACKUPS if self.backups else _SHARE_WITH_A_MAP
        if random.Random(f"{seed}/{profile_name}/map").random() < share:
            Store.maps.clear()
            self.counts["runs with a map"] += 1
            self.clients += [*(MapClient(self) for _ in range(_MAP_CLIENTS)), Compactor(self)]
            repeats = random.Random(f"{seed}/{profile_name}/repeats")
            if repeats.random() < _SHARE_WITH_REPEATS:
                self.clients.append(Repeater(self, repeats))
            appends = random.Random(f"{seed}/{profile_name}/appends")
            if self.restoration is None and appends.random() < _SHARE_WITH_APPENDS:
                self.clients += [Appender(self, appends, number) for number in range(2)]
            Janitor(self).begin()
            self._make_some_older(random.Random(f"{seed}/{profile_name}/levels"))

    def begin(self) -> None:
        """Let all clients of the nodes begin."""
        for client in self.clients:
            client.think()
        Follower(self).begin()
        Auditor(self).begin()
        if self.backups is not None:
            self.backups.begin()
        if self.restoration is not None:
            self.restoration.begin()

    def _make_some_older(self, rng: random.Random) -> None:
        """Let some nodes run a version that lacks the level which clients of the map ask for."""
        if rng.random() < _SHARE_WITH_TWO_VERSIONS:
            for node in rng.sample(self.nodes, rng.randint(1, len(self.nodes))):
                node.levels = OLDER_LEVELS
            self.clients.append(Upgrader(self))

    def close(self) -> None:
        """Drop what still waits for something in any node: nothing happens any more."""
        for node in self.nodes:
            if node.core is not None:
                node.loop.close()
        if self.backups is not None:
            self.backups.close()
        if self.restoration is not None:
            self.restoration.close()

    def next_number(self) -> int:
        """A number never given before, for values and objects."""
        self._next_number += 1
        return self._next_number

    def count(self, kind: str) -> None:
        self.counts[kind] += 1

    def note(self, text: str) -> None:
        """Add a line to the trace; only while tracing."""
        assert self.trace is not None
        self.trace.add(f"{self.timeline.now:6d} {text}")

    def disk_delay(self) -> int:
        """Draw how long a disk operation takes."""
        rng = self.rngs.disk
        if self.profile.slow_disk and rng.random() < self.profile.slow_disk:
            return rng.randrange(300)
        return 1 + int(rng.random() * self.profile.disk_ms)

    # -- doing things to nodes

    def later_for(self, node: SimNode, delay: int, action: Callable[[], None]) -> None:
        """Run `action` unless the node has crashed by then; a paused node does it later."""
        life, timeline = node.life, self.timeline

        def guarded() -> None:
            if node.core is None or node.life != life:
                return
            if timeline.now < node.paused_until:
                node.asleep.append(guarded)
            else:
                self.act(node, action)

        timeline.later(delay, guarded)

    def act(self, node: SimNode, action: Callable[[], None]) -> None:
        """Run `action`; an error of the disk ends the process, as it does in production."""
        loop = node.loop
        before = loop.enter()
        try:
            action()
        except StoppedError:
            self.counts["stops inside a disk call or between effects"] += 1
            self.crash(node, power=node.disk.loses_power)
        except DiskFullError as error:
            violated("a full disk ends no process", f"{node.key}: {error!r}")
        except (errors.BadSnapshotError, errors.JournalDamagedError) as error:
            if not node.disk.is_rotten():
                violated("no false alarm", f"{node.key}: {error!r}")
            self.counts["damage found while running"] += 1
            self.crash(node, power=False)
        except (NewerLogError, errors.NewerVersionError) as error:
            if node.levels == SUPPORTED:
                raise
            self.counts["older versions stopped by a level"] += 1
            if isinstance(error, errors.NewerVersionError):
                node.levels = SUPPORTED
            self.crash(node, power=False)
        except LogOfBeforeError:
            self.counts["disks of before refused"] += 1
            self.crash(node, power=False)
            node.renew(VoterSet())
        except OSError:
            self.counts["sync errors"] += 1
            self.crash(node, power=self.rngs.faults.random() < 0.3)
        finally:
            loop.leave(before)

    def pause(self, node: SimNode, for_ms: int) -> None:
        """Stop a process for a while, or for good: what comes meanwhile waits."""
        node.paused_until = self.timeline.now + for_ms
        self.timeline.later(for_ms, lambda: self.wake(node))

    def wake(self, node: SimNode) -> None:
        """Let a process go on whose pause is over."""
        if self.timeline.now >= node.paused_until:
            asleep, node.asleep = node.asleep, []
            for action in asleep:
                self.timeline.later(0, action)

    def crash(self, node: SimNode, *, power: bool) -> None:
        """Stop a node, tell its peers' transports, and start it again later."""
        if node.core is None:
            return
        self.counts["power failures" if power else "processes killed"] += 1
        if self.tracing:
            self.note(f"node {node.node_id} stops, power={power}")
        node.crash(power=power)
        rng = self.rngs.faults
        for other in self.nodes:
            if other.core is not None and rng.random() < 0.7:
                self._feed_later(other, PeerConnectionLost(NodeId(node.node_id)))
        self.timeline.later(rng.choice(_RESTART_DELAYS), lambda: self.restart(node))

    def _feed_later(self, node: SimNode, event: PeerConnectionLost | RequestFailed) -> None:
        self.later_for(node, 1, lambda: node.step(event))

    def restart(self, node: SimNode) -> None:
        """Start a node that is down, unless it is to stay so."""
        if node.core is not None or node.is_off_for_good:
            return
        self._spoil_start(node)
        if self.tracing:
            self.note(f"node {node.node_id} starts at {node.endpoint}")
        try:
            node.start()
        except StoppedError:
            self._failed_to_start(node, "starts cut short", power=node.disk.loses_power)
        except DiskFullError:
            self._failed_to_start(node, "starts refused by a full disk", power=False)
        except errors.NewerVersionError:
            self._failed_to_start(node, "starts refused to an older version", power=False)
            node.levels = SUPPORTED
        except errors.JournalDamagedError as error:
            if not node.disk.is_rotten():
                violated("no false alarm", f"{node.key}: {error}")
            self._failed_to_start(node, "starts refused by damage, disk replaced", power=False)
            node.renew(VoterSet())
        except OSError:
            self._failed_to_start(node, "starts failed by a sync error", power=True)

    def _spoil_start(self, node: SimNode) -> None:
        """Let a node come back at another address, or not quite."""
        rng, profile = self.rngs.faults, self.profile
        if profile.moves and rng.random() < profile.moves:
            self.count("nodes that moved")
            node.endpoint = f"node{node.node_id}:{self.next_number()}"
        if profile.bad_starts and rng.random() < profile.bad_starts:
            self.count("stops ordered at a start")
            node.disk.crash_after = 1 + rng.randrange(8)
            node.disk.loses_power = rng.random() < 0.5

    def _failed_to_start(self, node: SimNode, kind: str, *, power: bool) -> None:
        self.counts[kind] += 1
        node.crash(power=power)
        self.timeline.later(self.rngs.faults.choice(_RESTART_DELAYS), lambda: self.restart(node))

    # -- nodes that are well

    def is_healthy(self, voter: Voter) -> bool:
        """Whether a voter's disk is there and undamaged."""
        replica = self.ghost.replica_of(voter)
        return (
            replica is not None
            and replica.key == self.nodes[voter.key.node_id].key
            and not replica.is_rotten
            and replica.lost is None
        )

    def has_healthy_majority(self, voters: VoterSet, without: int | None = None) -> bool:
        """Whether a majority is well, not counting the node `without`."""
        well = sum(voter.key.node_id != without and self.is_healthy(voter) for voter in voters)
        return 2 * well > len(voters)

    def possible_voters(self) -> list[VoterSet]:
        """Voter sets that may be in force now or after any truncation."""
        known = [self.ghost.replicas[node.key].log.voters for node in self.nodes]
        return [self.ghost.ledger.voters, *(voters for voters in known if len(voters))]

    def is_voter(self, node: SimNode) -> bool:
        """Whether a node votes, whichever voter set is in force."""
        return all(
            any(voter.key.node_id == node.node_id for voter in voters)
            for voters in self.possible_voters()
        )

    def may_be_harmed(self, node: SimNode) -> bool:
        """Whether the others remain a majority if this node's disk is lost."""
        return node.core is not None and all(
            self.has_healthy_majority(voters, node.node_id) for voters in self.possible_voters()
        )

    # -- network

    def _arrive(self, message: Message) -> None:
        node = self.nodes[ends(message)[1]]
        if node.core is None:
            self._refuse(message)
            return
        if self.timeline.now < node.paused_until:
            self.later_for(node, 0, lambda: node.step(Received(message)))
        else:
            self.act(node, lambda: node.step(Received(message)))

    def _refuse(self, message: Message) -> None:
        """A request to a dead process: its sender usually hears of it."""
        header = message.header
        if not isinstance(header, RequestHeader):
            return
        sender, peer = self.nodes[header.sender.node_id], header.receiver.node_id
        if sender.core is not None and self.rngs.network.random() < 0.8:
            self._feed_later(sender, RequestFailed(peer, header.request_id))
            self._feed_later(sender, PeerConnectionLost(peer))

    def _lost(self, message: Message) -> None:
        """The asker's transport gives a request up."""
        header = message.header
        if isinstance(header, RequestHeader):
            asker, peer = header.sender.node_id, header.receiver.node_id
        else:
            asker, peer = header.receiver, header.sender
        if self.nodes[asker].core is not None:
            self._feed_later(self.nodes[asker], RequestFailed(peer, header.request_id))

    # -- clients

    def call(
        self,
        target: int,
        key: str,
        request: Request,
        at_least: int | None,
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        """Ask a node on a client's behalf; the request or the answer may get lost."""
        rng, profile, timeline = self.rngs.clients, self.profile, self.timeline
        if rng.random() < profile.drop:
            return
        node = self.nodes[target]
        latency = 1 + int(rng.random() * profile.latency_ms)

        def reply(outcome: Outcome) -> None:
            if rng.random() >= profile.lose_answer:
                back = 1 + int(rng.random() * profile.latency_ms)
                timeline.later(back, lambda: on_outcome(outcome))

        if node.core is None:
            timeline.later(latency, lambda: on_outcome(Refused(None)))
            return

        def ask() -> None:
            service = node.service
            if at_least is not None:
                give_up = service.read_after(key, request, at_least, reply)
            elif isinstance(request, READS):
                give_up = service.read(key, request, reply)
            else:
                give_up = service.write(key, request, reply)
            if rng.random() < profile.lose_answer:  # its connection goes, and the node hears of it
                self.later_for(node, rng.randrange(_GIVEN_UP_MS), give_up)

        self.later_for(node, latency, ask)


def _some_timings(rng: random.Random) -> QuorumTimings:
    election = rng.choice([80, 120, 200])
    return QuorumTimings(
        election_timeout_ms=election,
        fetch_timeout_ms=election * 5 // 2,
        fetch_max_wait_ms=election // 2,
        request_timeout_ms=election * 2,
        retry_backoff_ms=max(5, election // 8),
        failover_stagger_ms=max(5, election // 8),
        catch_up_rounds=rng.choice([2, 5, 10]),
    )


def _some_limits(rng: random.Random) -> QuorumLimits:
    return QuorumLimits(
        max_fetch_bytes=rng.choice([60, 300, 8 << 20]),
        tail_bytes=rng.choice([500, 3_000, 32 << 20]),
        snapshot_chunk_bytes=rng.choice([64, 200, 1 << 20]),
        snapshots_kept=rng.choice([1, 2, 3]),
        max_uncommitted_bytes=_UNCOMMITTED_MAX,
    )
