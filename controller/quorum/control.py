"""Payloads of control batches: what the quorum writes into its own log.

A payload is UTF-8 JSON with sorted keys, so that a log can be read without this code; `type` says
which, `version` which shape of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from controller.ids import NodeId
from controller.quorum.voters import VoterSet


def encode_leader_change(leader_id: NodeId, voters: VoterSet, granting: Iterable[NodeId]) -> bytes:
    """Return the first payload of every epoch: who leads, who may vote, who voted for it."""
    record = {
        "type": "leader_change",
        "version": 1,
        "leader_id": leader_id,
        "voters": [voter.key.node_id for voter in voters],
        "granting_voters": sorted(granting),
    }
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
