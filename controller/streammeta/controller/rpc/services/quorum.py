"""QuorumService: passes requests of operators to the quorum driver and returns its answers.

The number in flight is bounded. The other controllers speak to the quorum elsewhere.
"""

# ruff: noqa: N802 (methods are named as in the contract)

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from streammeta.controller.config import check_reachable
from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.ids import ClusterId, DirectoryId, EndOffset, Epoch, NodeId
from streammeta.controller.quorum.voters import ReplicaKey, Voter
from streammeta.controller.rpc.calls.caller_addresses import described
from streammeta.controller.rpc.calls.error_mapping import UnaryHandler, abort
from streammeta.controller.rpc.codec.conversion import Conversion, checked, not_negative
from streammeta.controller.runtime.replication.operations import QuorumDescription
from streammeta.controller.runtime.replication.quorum_driver import QuorumDriver
from streammeta.controller.runtime.writer.feature_updates import FeatureUpdates
from streammeta.controller.trust.audit.lines import Chain
from streammeta.controller.trust.policy_file import PolicyFile
from streammeta.controller.trust.rates import Places
from streammeta.v1 import quorum_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]

CHANGE_TIMEOUT_MS_DEFAULT = 30_000
"""Default time limit of a voter change, in milliseconds."""

CHANGE_TIMEOUT_MS_MAX = 600_000
"""Maximum time limit of a voter change, in milliseconds: a new voter catches up first."""


REQUESTS_MAX = 32
"""Maximum number of voter changes in flight."""

_RETRY_MS = 1_000

DIRECTORY_ID_CHARS_MAX = 64
"""Maximum length of a directory id, longer than any UUID.

Ids are compared and shown, never parsed.
"""


@dataclass(eq=False)
class QuorumServicer:
    """Serves the quorum to operators: its description, and changes of its voters."""

    _driver: QuorumDriver
    _cluster_id: ClusterId
    _features: FeatureUpdates
    _policy: PolicyFile | None = None
    _audit_head: Callable[[], Chain | None] = lambda: None

    def __post_init__(self) -> None:
        self._operators = Places("voter changes", _RETRY_MS)

    def unary(self) -> Mapping[str, UnaryHandler]:
        """Return the handlers by method name."""
        return {
            "AddVoter": self.AddVoter,
            "RemoveVoter": self.RemoveVoter,
            "DescribeQuorum": self.DescribeQuorum,
        }

    async def AddVoter(self, request: pb.AddVoterRequest, context: Context) -> pb.AddVoterResponse:
        """Make an observer a voter, and wait until that is committed."""
        try:
            with self._operators.taken(None, per_holder=REQUESTS_MAX, in_all=REQUESTS_MAX):
                # First: a command meant for another cluster must change nothing here.
                self._require_cluster(request.cluster_id)
                voter = _read_voter(request.voter, "voter")
                # Without it a replaced disk of the same node would count as the same voter.
                if voter.key.directory_id is None:
                    raise InvalidRequestError(
                        "voter.key.directory_id",
                        "empty, must be the observer's directory id as in DescribeQuorum",
                    )
                # A voter with an older version could not apply entries of the current level.
                self._features.check_voter(voter.key.node_id)
                timeout_ms = _change_timeout_ms(request.timeout_ms, context)
                end_offset = await self._driver.add_voter(voter, timeout_ms)
        except Exception as error:  # noqa: BLE001 (every failure of a call is a status)
            await abort(context, error)

        return pb.AddVoterResponse(end_offset=end_offset)

    async def RemoveVoter(
        self, request: pb.RemoveVoterRequest, context: Context
    ) -> pb.RemoveVoterResponse:
        """Make a voter an observer, and wait until that is committed."""
        try:
            with self._operators.taken(None, per_holder=REQUESTS_MAX, in_all=REQUESTS_MAX):
                self._require_cluster(request.cluster_id)
                key = _read_key(request.key, "key")
                timeout_ms = _change_timeout_ms(request.timeout_ms, context)
                end_offset = await self._driver.remove_voter(key, timeout_ms)
        except Exception as error:  # noqa: BLE001 (every failure of a call is a status)
            await abort(context, error)
        return pb.RemoveVoterResponse(end_offset=end_offset)

    async def DescribeQuorum(
        self, request: pb.DescribeQuorumRequest, context: Context
    ) -> pb.DescribeQuorumResponse:
        """Return the quorum as this node knows it."""
        # A follower only knows its own progress, not the lag of the others.
        if request.leader_only and not self._driver.is_leader:
            await abort(context, self._driver.leader_hint())

        seen = described(self._driver)
        audited = self._audit_head()
        description: pb.DescribeQuorumResponse = _write_description(
            seen,
            cluster_id=self._cluster_id,
            repairing=seen.is_repairing,
            disk_full=seen.is_disk_full,
            policy_sha256="" if self._policy is None else self._policy.current.digest,
            policy_loaded_ms=None if self._policy is None else self._policy.loaded_ms,
            audit_seq=None if audited is None else audited.seq,
            audit_hash="" if audited is None else audited.head,
        )
        return description

    def _require_cluster(self, cluster_id: str) -> None:
        if cluster_id != self._cluster_id:
            raise InvalidRequestError(
                "cluster_id",
                f"{cluster_id!r}, must be {self._cluster_id!r}",
            )


def _change_timeout_ms(asked: int, context: Context) -> int:
    """Return the time limit of a change, at most the caller's deadline, in milliseconds."""
    if not 0 <= asked <= CHANGE_TIMEOUT_MS_MAX:
        raise InvalidRequestError("timeout_ms", f"{asked}, must be 0 to {CHANGE_TIMEOUT_MS_MAX}")
    timeout_ms = asked or CHANGE_TIMEOUT_MS_DEFAULT
    remaining_s = context.time_remaining()
    # A change that outlives its caller would surprise the operator who gave up.
    return timeout_ms if remaining_s is None else min(timeout_ms, int(remaining_s * 1000))


def _directory_id(text: str, path: str) -> DirectoryId | None:
    if len(text) > DIRECTORY_ID_CHARS_MAX:
        raise InvalidRequestError(path, f"{len(text)} characters; at most {DIRECTORY_ID_CHARS_MAX}")
    return DirectoryId(text) if text else None


def _check_voter(voter: Voter) -> None:
    """Require endpoints as `host:port`, for others will connect to them."""
    checked(check_reachable, voter.endpoint, "voter.endpoint")
    if voter.client_endpoint is not None:
        checked(check_reachable, voter.client_endpoint, "voter.client_endpoint")


_PARTS = Conversion(
    {
        NodeId: not_negative,
        Epoch: not_negative,
        EndOffset: not_negative,
        DirectoryId: _directory_id,
    },
    {},
    {Voter: _check_voter},
)
_read_voter = _PARTS.reader(Voter, pb.Voter)
_read_key = _PARTS.reader(ReplicaKey, pb.ReplicaKey)
_write_description = _PARTS.writer(
    QuorumDescription,
    pb.DescribeQuorumResponse,
    *("cluster_id", "repairing", "disk_full", "policy_sha256", "policy_loaded_ms"),
    *("audit_seq", "audit_hash"),
)
