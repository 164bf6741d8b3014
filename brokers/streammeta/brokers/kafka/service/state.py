"""State of a broker as its probes and metrics tell it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

VIEW_AGE_MAX_S = 10.0
"""Age of the view of the cluster at which a broker is not ready any more, in seconds."""

LEADER_SILENT_MAX_S = 10.0
"""Time without an answer of the leader after which a broker is not ready any more, in seconds."""


@dataclass(frozen=True, slots=True)
class BrokerState:
    """State of a broker now; between two lives of the process it serves nothing.

    `partitions` and `groups` are those that it leads and coordinates, `recoveries` the brokers that
    died and are assigned to it, `unavailable` the partitions without a leader, and those of its own
    that are not open. `certificate_ends_s` is when the certificate that clients are shown ends, in
    seconds since 1970; None without one, or if it can't be read for want of cryptography.
    `leader_silent_s` is how long calls to the leading controller have failed without an answer.
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
        """Reason for which clients should go elsewhere; empty if there is none."""
        if not self.is_serving:
            return "it joins the cluster"
        if self.view_age_s > VIEW_AGE_MAX_S:
            return f"no controller has answered for {self.view_age_s:.0f} s"
        if self.leader_silent_s > LEADER_SILENT_MAX_S:
            return f"the leading controller has not answered for {self.leader_silent_s:.0f} s"
        return ""
