"""Counters of one broker process, across rejoins. Pure, without a metrics library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.brokers.kafka.protocol.wire import SERVED, Tree

API_NAMES: Mapping[int, str] = {
    0: "Produce",
    1: "Fetch",
    2: "ListOffsets",
    3: "Metadata",
    8: "OffsetCommit",
    9: "OffsetFetch",
    10: "FindCoordinator",
    11: "JoinGroup",
    12: "Heartbeat",
    13: "LeaveGroup",
    14: "SyncGroup",
    15: "DescribeGroups",
    16: "ListGroups",
    17: "SaslHandshake",
    18: "ApiVersions",
    19: "CreateTopics",
    20: "DeleteTopics",
    21: "DeleteRecords",
    22: "InitProducerId",
    23: "OffsetForLeaderEpoch",
    29: "DescribeAcls",
    32: "DescribeConfigs",
    33: "AlterConfigs",
    35: "DescribeLogDirs",
    36: "SaslAuthenticate",
    37: "CreatePartitions",
    42: "DeleteGroups",
    44: "IncrementalAlterConfigs",
    47: "OffsetDelete",
    60: "DescribeCluster",
}
"""Names of the supported APIs."""


def _errors() -> dict[int, int]:
    return {code: 0 for code in Code if code is not Code.NONE}


@dataclass(slots=True)
class BrokerTally:
    """Counters of a broker, used on its event loop.

    `requests` is by API key. `errors` is by code and counts each item of an answer with an error.
    `recovered_streams` were open on a dead broker and closed by this one. `lives` counts how often
    the process joined the cluster.
    """

    requests: dict[int, int] = field(default_factory=lambda: dict.fromkeys(SERVED, 0))
    errors: dict[int, int] = field(default_factory=_errors)
    produced_bytes: int = 0
    fetched_bytes: int = 0
    connections_opened: int = 0
    connections_refused: int = 0
    recovered_streams: int = 0
    lives: int = 0

    def count_errors(self, tree: Tree) -> None:
        """Count the errors of an answer."""
        for code in _codes(tree):
            # NONE is 0 and not counted.
            if code:
                self.errors[code] += 1


def _codes(tree: Tree) -> Iterator[Any]:
    """Yield the error codes in a tree."""
    for name, value in tree.items():
        if name == "error_code":
            yield value
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, Mapping):
                    yield from _codes(item)
