"""State of a broker for its probes and metrics. Pure."""

from __future__ import annotations

from dataclasses import dataclass

VIEW_AGE_MAX_S = 10.0
"""Age of the broker's cluster view at which it stops being ready, in seconds."""

LEADER_SILENT_MAX_S = 10.0
"""Time without an answer from the leading controller at which a broker stops being ready, in s."""


@dataclass(frozen=True, slots=True)
class BrokerState:
    """Current state of a broker. While the process rejoins the cluster it serves nothing.

    `partitions` counts the partitions it leads, `groups` the groups it coordinates, `recoveries`
    the dead brokers assigned to it, `unavailable` the partitions without a leader plus its own that
    are not open. `certificate_ends_s` is the end of the server certificate's validity in seconds
    since 1970, None without a certificate or without the package cryptography. `leader_silent_s` is
    how long calls to the leading controller have failed without an answer.
    """

    is_serving: bool = False
    view_age_s: float = 0.0
    leader_silent_s: float = 0.0
    connections: int = 0
    partitions: int = 0
    groups: int = 0
    recoveries: int = 0
    unavailable: int = 0
    certificate_ends_s: float | None = None

    @property
    def unready(self) -> str:
        """Reason why clients should use another broker, empty if there is none."""
        if not self.is_serving:
            return "the broker is joining the cluster"
        if self.view_age_s > VIEW_AGE_MAX_S:
            return f"no controller has answered for {self.view_age_s:.0f} s"
        if self.leader_silent_s > LEADER_SILENT_MAX_S:
            return f"the leading controller has not answered for {self.leader_silent_s:.0f} s"
        return ""
