"""What a simulated node does for its clients, as the controller's loop does it.

A leader decides requests against its latest state, committed or not, replays them at once and
answers when they are committed; losing leadership undoes the rest. Committed batches are applied on
every node, and snapshots of the committed state are written, slowly, every few batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from controller.journal.errors import BadSnapshotError
from controller.journal.snapshot_writer import SnapshotWriter
from controller.loop.delivery import Delivery, HandOn, LoadSnapshot, ReadForDelivery
from controller.loop.quorum_disk import DiskRead, FinishSnapshot
from controller.quorum.events import Append, ReadIndexRequested
from controller.quorum.messages import Batch, BatchKind, SnapshotId
from storage.durable_files import DiskFullError
from tests.linearizability.models import Get
from tests.sim.sim_map import MapSettled
from tests.sim.sim_store import Answer, Request, Store, decode_image, encode_image

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode

_UNCOMMITTED_MAX = 4000
_DELIVERY_BYTES = 400
_RETRY_SNAPSHOT_MS = 120


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer holds as of `offset`."""

    answer: Answer
    offset: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was done; `leader` is whom to ask instead, if known."""

    leader: int | None


@dataclass(frozen=True, slots=True)
class Unknown:
    """Leadership was lost before it was committed."""


Outcome = Answered | Refused | Unknown
Reply = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class _Waiting:
    key: str
    request: Request
    reply: Reply
    at_least: int = 0
    committed_before: int = 0
    decided: Answer | None = None
    """The answer to a mutation that changes nothing; it only waits for a proof of leadership."""


@dataclass(frozen=True, slots=True)
class _Parked:
    """An answer that waits until the log below `end_offset` is committed."""

    end_offset: int
    reply: Reply
    answer: Answer
    query: tuple[str, Request] | None = None
    """Of a read, which need not wait while disks are full."""


class SimService:
    """The state machine of one life of a node."""

    def __init__(self, node: SimNode, newest: SnapshotId | None) -> None:
        self._node = node
        self.store = Store()
        self.delivery = Delivery(newest)
        self.claimed_epoch: int | None = None
        self._elected: int | None = None
        self._parked: deque[_Parked] = deque()
        self._uncommitted: deque[tuple[int, bytes]] = deque()
        self._forming: list[bytes] = []
        """Records whose offsets are promised, and which the core has not been given yet."""
        self._reads: dict[int, _Waiting] = {}
        self._sessions: list[_Waiting] = []
        self._next_read = 0
        self._snapshot_end = 0
        self._is_writing_snapshot = False

    # -- requests

    def write(self, key: str, request: Request, reply: Reply) -> None:
        """Decide a mutation against the latest state, replay it, and append it soon."""
        if self._refuses():
            reply(self._refusal())
            return
        offset = self.next_offset
        answer, record = self.store.decide(key, request, offset, self.map_now)
        if record is not None:
            self.store.apply(offset, record, undoable=True)
            if not self._forming:
                node = self._node
                node.later(node.world.rngs.clients.randrange(2), node.stepper.flush)
            self._forming.append(record)
            self._uncommitted.append((offset, record))
            self._park(reply, answer)
        else:
            self._prove_leadership(_Waiting(key, request, reply, decided=answer))

    @property
    def map_now(self) -> int:
        """What the node's wall clock shows; leaders' clocks differ."""
        return 1_000_000 + self._node.clock.show(self._node.world.timeline.now)

    @property
    def next_offset(self) -> int:
        """The offset that the next record takes."""
        assert self._node.core is not None
        return self._node.core.log.end_offset + len(self._forming)

    def take_appends(self) -> list[Append]:
        """Hand over what is to be appended, as one batch."""
        if not self._forming:
            return []
        self._node.world.count("batches appended")
        payloads, self._forming = tuple(self._forming), []
        return [Append(payloads)]

    def read(
        self, key: str, request: Request, reply: Reply, *, even_unclaimed: bool = False
    ) -> None:
        """Take a linearizable read."""
        if self.claimed_epoch is None and not even_unclaimed:
            reply(self._refusal())
            return
        committed = self._node.world.ghost.ledger.end
        self._prove_leadership(_Waiting(key, request, reply, committed_before=committed))

    def _prove_leadership(self, waiting: _Waiting) -> None:
        self._next_read += 1
        self._reads[self._next_read] = waiting
        self._node.step(ReadIndexRequested(self._next_read))

    def probe(self) -> None:
        """Ask the core how far a read must have applied, whether this node may answer or not."""
        self.read("", Get(), _ignore_outcome, even_unclaimed=True)

    def read_after(self, key: str, request: Request, at_least: int, reply: Reply) -> None:
        """Take a session's read, which must not be older than what the session has seen."""
        self._sessions.append(_Waiting(key, request, reply, at_least))
        self._serve_sessions()

    def _refuses(self) -> bool:
        node = self._node
        assert node.core is not None
        return (
            self.claimed_epoch is None
            or self._is_short_of_room
            or node.core.is_transferring
            or node.core.uncommitted_bytes > _UNCOMMITTED_MAX
        )

    @property
    def _is_short_of_room(self) -> bool:
        core = self._node.core
        return core is not None and (self._node.storage.is_full or bool(core.full_majority))

    def _refusal(self) -> Refused:
        assert self._node.core is not None
        leader = self._node.core.leader_id
        return Refused(leader if leader != self._node.node_id else None)

    def on_read_index(self, read_id: int, index: int | None) -> None:
        """The core has proved, or could not prove, that this node leads."""
        waiting = self._reads.pop(read_id)
        if index is not None:
            node = self._node
            node.world.ghost.on_read_index(node.key, index, waiting.committed_before)
        if index is None or self.claimed_epoch is None:
            waiting.reply(self._refusal())
            return
        if waiting.decided is not None:
            self._park(waiting.reply, waiting.decided)
        elif isinstance(waiting.request, MapSettled):  # asks for nothing but the wait
            self._park(waiting.reply, self.store.query(waiting.key, waiting.request))
        else:
            self._answer_read(waiting.reply, waiting.key, waiting.request)

    def _answer_read(self, reply: Reply, key: str, request: Request) -> None:
        """Answer a read of a leader, which waits for nothing that waits for room on disks."""
        if self._is_short_of_room:
            reply(Answered(self._query_committed(key, request), self.delivery.end_offset))
        else:
            self._park(reply, self.store.query(key, request), (key, request))

    def _query_committed(self, key: str, request: Request) -> Answer:
        self.store.undo_to(self.delivery.end_offset)
        answer = self.store.query(key, request)
        for offset, record in self._uncommitted:
            if offset >= self.delivery.end_offset:
                self.store.apply(offset, record, undoable=True)
        return answer

    def _park(self, reply: Reply, answer: Answer, query: tuple[str, Request] | None = None) -> None:
        """Answer when everything that the answer may go by is committed."""
        self._parked.append(_Parked(self.next_offset, reply, answer, query))
        self._release()

    def _release(self) -> None:
        end = self.delivery.end_offset
        while self._uncommitted and self._uncommitted[0][0] < end:
            self._uncommitted.popleft()
        while self._parked and self._parked[0].end_offset <= end:
            item = self._parked.popleft()
            item.reply(Answered(item.answer, item.end_offset))

    def on_room_changed(self) -> None:
        """Let no read wait for what waits for room on disks."""
        if self._is_short_of_room and self.claimed_epoch is not None:
            parked, self._parked = self._parked, deque()
            for item in parked:
                if item.query is None:
                    self._parked.append(item)
                else:
                    self._answer_read(item.reply, *item.query)

    def _serve_sessions(self) -> None:
        if not self._sessions or self.delivery.is_loading:
            return
        waiting, self._sessions = self._sessions, []
        for item in waiting:
            if self.delivery.end_offset < item.at_least:
                self._sessions.append(item)
                continue
            if self.claimed_epoch is None:
                answer = self.store.query(item.key, item.request)
                item.reply(Answered(answer, self.delivery.end_offset))
            else:  # what it shows may not be committed yet
                self._answer_read(item.reply, item.key, item.request)

    # -- leadership

    def on_elected(self, epoch: int) -> None:
        """The node won an election; it serves when it has applied everything before."""
        self._elected = epoch

    def _claim_if_ready(self) -> None:
        core = self._node.core
        assert core is not None
        if self._elected is None or self.claimed_epoch is not None:
            return
        if self.delivery.is_caught_up(core.high_watermark) and core.is_established:
            self.claimed_epoch = self._elected

    def on_leadership_ended(self) -> None:
        """Undo what is not committed; its outcome is with the next leader."""
        self._elected = None
        self._forming.clear()
        self._uncommitted.clear()
        if self.claimed_epoch is not None:
            self.claimed_epoch = None
            self.store.undo_to(self.delivery.end_offset)
            self._check_state()
        parked, self._parked = self._parked, deque()
        for item in parked:
            item.reply(Unknown())

    # -- delivery

    def deliver(self) -> None:
        """Apply what is committed, from memory, from disk, or by loading a snapshot."""
        node = self._node
        while (core := node.core) is not None:
            match self.delivery.next(core.log, core.high_watermark):
                case LoadSnapshot(snapshot_id=snapshot_id):
                    node.later(3 * node.world.disk_delay(), lambda: self._load(snapshot_id))
                    return
                case ReadForDelivery(start_offset=start_offset):
                    node.world.count("log reads for delivery")
                    node.storage.submit(DiskRead(start_offset, _DELIVERY_BYTES, _ignore))
                    return
                case HandOn(batches=batches):
                    self._apply(batches)
                case None:
                    break
        if node.core is not None:
            self._claim_if_ready()

    def on_read_for_delivery(self, batches: tuple[Batch, ...]) -> None:
        """Apply what was read from disk."""
        core = self._node.core
        assert core is not None
        handed_on = self.delivery.was_read(batches, core.high_watermark)
        if handed_on is not None:
            self._apply(handed_on.batches)
        self.deliver()

    def _load(self, snapshot_id: SnapshotId) -> None:
        node = self._node
        with node.journal.open_snapshot(snapshot_id) as file:
            try:
                image = decode_image(file.read())
            except BadSnapshotError as error:
                node.world.on_bad_snapshot(node, error)
                return
        node.world.counts["snapshots loaded"] += 1
        self.store.load(image)
        self.delivery.loaded(snapshot_id)
        if image.map_image:
            self._check_map(snapshot_id.end_offset, self.store.replica.map.state_hash())
        self._snapshot_end = snapshot_id.end_offset
        self._check_state()
        node.world.ghost.check_snapshot(node.key, image.snapshot_id, image.voters)
        self._serve_sessions()
        self.deliver()

    def _apply(self, batches: Sequence[Batch]) -> None:
        store = self.store
        for batch in batches:
            if batch.kind is BatchKind.DATA:
                for index, payload in enumerate(batch.payloads):
                    if batch.base_offset + index >= store.end_offset:
                        store.apply(batch.base_offset + index, payload)
            store.end_offset = max(store.end_offset, batch.end_offset)
        store.forget_undo(self.delivery.end_offset)
        self._check_state()
        self._release()
        self._serve_sessions()
        self._take_snapshot_if_due()

    def _check_state(self) -> None:
        end = self.delivery.end_offset
        if self.store.end_offset == end:
            self._node.world.ghost.ledger.check_state(self._node.key, end, self.store.hash)

    def _check_map(self, end_offset: int, map_hash: bytes) -> None:
        node = self._node
        node.world.ghost.ledger.map_watch.check_replica(node.key, end_offset, map_hash)

    # -- snapshots

    def _take_snapshot_if_due(self) -> None:
        """Snapshots fall due at the same offsets everywhere, so that equal ids are common."""
        every = self._node.world.profile.offsets_between_snapshots
        is_due = every and self.delivery.end_offset // every > self._snapshot_end // every
        if is_due and not self._is_writing_snapshot:
            self._snapshot_end = self.delivery.end_offset
            self._is_writing_snapshot = True
            self._freeze()

    def _freeze(self) -> None:
        node = self._node
        assert node.core is not None
        end = self.delivery.end_offset
        snapshot_id = SnapshotId(end, self.delivery.epoch)
        image = self.store.image(snapshot_id, node.core.voters_at(end))
        node.world.ghost.check_snapshot(node.key, snapshot_id, image.voters)
        node.world.ghost.ledger.check_state(node.key, end, image.hash)
        if image.map_image:
            self._check_map(end, image.map_hash)
        data = encode_image(image, node.world.rngs.nodes, node.world.snapshot_padding)
        pieces = [data[at : at + 150] for at in range(0, len(data), 150)]
        node.later(1, lambda: self._begin_writing(snapshot_id, pieces))

    def _begin_writing(self, snapshot_id: SnapshotId, pieces: list[bytes]) -> None:
        try:
            writer = self._node.journal.begin_snapshot(snapshot_id)
        except DiskFullError:
            self._give_up()
            return
        self._write_piece(writer, pieces)

    def _write_piece(self, writer: SnapshotWriter, pieces: list[bytes]) -> None:
        node = self._node
        try:
            if pieces:
                writer.write(pieces[0])
            else:
                writer.seal()
        except DiskFullError:
            writer.abandon()
            self._give_up()
            return
        if pieces:
            node.later(node.world.disk_delay(), lambda: self._write_piece(writer, pieces[1:]))
        else:
            node.storage.submit(FinishSnapshot(writer))

    def _give_up(self) -> None:
        self._node.world.counts["snapshots given up"] += 1

        def retry() -> None:
            self._is_writing_snapshot = False

        self._node.later(_RETRY_SNAPSHOT_MS, retry)

    def on_snapshot_ended(self) -> None:
        """A snapshot of this node's own is durable, or was dropped for a newer one."""
        self._is_writing_snapshot = False


def _ignore(batches: tuple[Batch, ...]) -> None:
    """Do nothing with what was read: reports are taken in order from the worker."""


def _ignore_outcome(outcome: Outcome) -> None:
    """Nobody waits for it."""
