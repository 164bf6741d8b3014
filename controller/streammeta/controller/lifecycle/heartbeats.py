"""What a broker's heartbeat does on the leader, and what it is told in return.

Owns the node check of heartbeats and who is told what to do for others. Sessions are kept by
`sessions`; the one thing replicated is that a node sends heartbeats at all, so that the next
leader knows to miss them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from streammeta.controller.errors import ErrorCode
from streammeta.controller.lifecycle.recoveries import NOBODY, owes
from streammeta.controller.lifecycle.sessions import Sessions
from streammeta.controller.metadata.answers import GetNodesAnswer, NodeDescription
from streammeta.controller.metadata.requests import GetNodes, SuperviseNode
from streammeta.controller.metadata.values import NodeIdentity
from streammeta.controller.runtime.clock import Clock
from streammeta.controller.runtime.controller import MetadataController


@dataclass(frozen=True, slots=True)
class Recovery:
    """A process whose data is to be recovered, and where its write-ahead log is."""

    node_id: int
    node_epoch: int
    wal_config: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAnswer:
    """The node check, whether nothing would be lost if the caller ended, and what it is to do.

    `compactions` are gone nodes whose set objects it is to compact in their name.
    """

    error: ErrorCode
    may_shutdown: bool = False
    session_timeout_ms: int
    recoveries: tuple[Recovery, ...] = ()
    compactions: tuple[NodeIdentity, ...] = ()


class Heartbeats:
    """Answers heartbeats while this controller leads."""

    def __init__(self, controller: MetadataController, sessions: Sessions, clock: Clock) -> None:
        self._controller = controller
        self._sessions = sessions
        self._clock = clock
        self._recoveries: dict[int, tuple[Recovery, ...]] = {}
        self._compacted_by: dict[int, int] = {}
        self._compactions: dict[int, tuple[NodeIdentity, ...]] = {}

    async def heartbeat(self, node: NodeIdentity, *, wants_shutdown: bool) -> HeartbeatAnswer:
        """Renew a node's session.

        Raises:
            NotLeaderError: this controller does not lead.
            OutcomeUnknownError: it ceased to lead while the node's first heartbeat was replicated.
            LimitExceededError: too many requests wait already, or the disk is full.
        """
        if not self._controller.is_active:
            await self._controller.settled()  # says who leads
        known = self._describe(node.node_id)
        error = _check(node, known)
        if known is None or error is not ErrorCode.NONE:
            return HeartbeatAnswer(error=error, session_timeout_ms=self._sessions.timeout_ms)
        self._sessions.heartbeat(
            node.node_id, node.node_epoch, self._clock.monotonic_ms(), wants_shutdown=wants_shutdown
        )
        if not known.supervised:
            await self._controller.write(SuperviseNode(node=node))
        may_shutdown = wants_shutdown and not owes(known)
        if may_shutdown:
            # What it gave up last must stay given up, whoever leads next.
            await self._controller.settled()
        return HeartbeatAnswer(
            error=error,
            may_shutdown=may_shutdown,
            session_timeout_ms=self._sessions.timeout_ms,
            recoveries=self._recoveries.get(node.node_id, ()),
            compactions=self._compactions.get(node.node_id, ()),
        )

    def compacted_by(self, node_id: int) -> int:
        """Return which node is told to compact the set objects of a gone one, or `NOBODY`."""
        return self._compacted_by.get(node_id, NOBODY)

    def set_recoveries(self, nodes: Iterable[NodeDescription]) -> None:
        """Tell the targets among `nodes`, all of the map, from now on whose data to recover."""
        found: dict[int, list[Recovery]] = {}
        for node in nodes:
            if node.recovered_by >= 0:
                recovery = Recovery(node.node_id, node.node_epoch, node.wal_config)
                found.setdefault(node.recovered_by, []).append(recovery)
        self._recoveries = {target: tuple(owed) for target, owed in found.items()}

    def set_compactions(self, nodes: Iterable[NodeDescription], plan: Mapping[int, int]) -> None:
        """Tell the targets of `plan`, gone -> target, for whom of `nodes` to compact."""
        found: dict[int, list[NodeIdentity]] = {}
        for node in nodes:
            if node.node_id in plan:
                gone = NodeIdentity(node.node_id, node.node_epoch)
                found.setdefault(plan[node.node_id], []).append(gone)
        self._compacted_by = dict(plan)
        self._compactions = {target: tuple(gone) for target, gone in found.items()}

    def _describe(self, node_id: int) -> NodeDescription | None:
        nodes = read_nodes(self._controller, (node_id,))
        return nodes[0] if nodes else None


def read_nodes(
    controller: MetadataController, node_ids: tuple[int, ...] = ()
) -> Sequence[NodeDescription]:
    """Read nodes, or all, as the leader's map has them now, uncommitted changes included."""
    answer = controller.cluster_map.query(GetNodes(node_ids=node_ids))
    assert isinstance(answer, GetNodesAnswer)
    return answer.nodes


def _check(caller: NodeIdentity, known: NodeDescription | None) -> ErrorCode:
    if known is None:
        return ErrorCode.NODE_EPOCH_NOT_EXIST
    if known.node_epoch > caller.node_epoch:
        return ErrorCode.NODE_EPOCH_EXPIRED
    if known.failover or known.departed:
        return ErrorCode.NODE_FENCED
    return ErrorCode.NONE
