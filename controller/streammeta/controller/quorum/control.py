"""Payloads of control batches: what the quorum writes into its own log.

A payload is UTF-8 JSON with sorted keys, so that a log can be read without this code; `type` says
which, `version` which shape of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import DirectoryId, NodeId
from streammeta.controller.quorum.messages import Batch
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet

_VOTERS = "voters"
_VERSION = 1


def encode_leader_change(leader_id: NodeId, voters: VoterSet, granting: Iterable[NodeId]) -> bytes:
    """Return the first payload of every epoch: who leads, who may vote, who voted for it."""
    return _encode(
        {
            "type": "leader_change",
            "version": _VERSION,
            "leader_id": leader_id,
            "voters": [voter.key.node_id for voter in voters],
            "granting_voters": sorted(granting),
        }
    )


def encode_voters(voters: VoterSet) -> bytes:
    """Return the payload that puts these voters in force."""
    return _encode(
        {
            "type": _VOTERS,
            "version": _VERSION,
            "voters": [
                {
                    "node_id": voter.key.node_id,
                    "directory_id": voter.key.directory_id,
                    "endpoint": voter.endpoint,
                }
                for voter in voters
            ],
        }
    )


def voters_named_by(batch: Batch) -> VoterSet | None:
    """Return the voters that a control batch puts in force, None if it names none.

    Raises:
        InvariantError: a payload is of a shape that this release can't read; a replica that
            ignored it would count other voters than its peers.
    """
    named: VoterSet | None = None
    for payload in batch.payloads:
        try:
            record = json.loads(payload)
            if record["type"] != _VOTERS:
                continue
            if record["version"] != _VERSION:
                raise ValueError(f"version {record['version']}, this release reads {_VERSION}")
            named = VoterSet(tuple(_voter(item) for item in record["voters"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InvariantError(
                f"the control batch at offset {batch.base_offset} can't be read: {error!r}"
            ) from error
    return named


def _voter(item: dict[str, object]) -> Voter:
    directory = item["directory_id"]
    key = ReplicaKey(
        NodeId(int(str(item["node_id"]))),
        None if directory is None else DirectoryId(str(directory)),
    )
    return Voter(key, str(item["endpoint"]))


def _encode(record: dict[str, object]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
