"""Status document of a cluster, as one controller knows it, for `/api/status.json`.

Combines this controller's state, the answers of the other controllers and the local metadata.
Fields that only a leader knows are empty elsewhere. Does not wait for a leader, so that the status
is available without one.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from streammeta.controller.features import SUPPORTED
from streammeta.controller.ids import NONE_ID
from streammeta.controller.metadata.api.answers import NodeDescription, StreamDescription
from streammeta.controller.monitoring.history.history import highest, last_hour, mean
from streammeta.controller.monitoring.history.sampling import Sampler
from streammeta.controller.monitoring.metrics.metrics import Sources
from streammeta.controller.monitoring.parts import Parts
from streammeta.controller.monitoring.status.alarms import alarms
from streammeta.controller.monitoring.status.largest import Sizes
from streammeta.controller.monitoring.status.peer_status import Answer
from streammeta.controller.rpc.services.routes import LeaderView
from streammeta.controller.runtime.replication import operations
from streammeta.v1 import quorum_pb2 as pb

NODES_MAX = 10
"""Maximum number of brokers in the document: those with the most stream set objects."""

RECENT_S = 60
"""Time span of rates and quantiles, in seconds."""

Fields: TypeAlias = dict[str, Any]

_PROGRESS = ("leader_id", "epoch", "end_offset", "high_watermark")


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """Inputs of a document, in addition to the answers of other controllers."""

    parts: Parts
    sources: Sources
    sampler: Sampler
    nodes: Sequence[NodeDescription]
    versions: Mapping[int, str]
    """Versions of the connected controllers, by id."""
    top_streams: Sequence[tuple[int, int]]
    """Streams with the most ranges, and their numbers of ranges."""
    top_sizes: Sizes


def status(known: Knowledge, others: Mapping[int, Answer], now_s: float) -> Fields:
    """Return the document as of `now_s`, seconds since 1970 (docs/operations/monitor.md)."""
    sources = known.sources
    seen = sources.quorum()
    document: Fields = {
        "at_s": now_s,
        "cluster_id": known.parts.cluster_id,
        "cluster_uuid": known.parts.bucket.cluster_uuid,
        "node_id": seen.node_id,
        "feature_level": sources.feature_level(),
        "build": _build(sources.version),
        "quorum": _quorum(seen, others),
        "controllers": _controllers(seen, others, known),
        "commits": _commits(known, now_s),
        "map": asdict(sources.metadata_size()),
        "bucket": {
            "problem": known.parts.bucket.problem,
            "lease_s": sources.lease_left_ms() / 1000 if seen.role == "leader" else None,
        },
        "deletions": _deletions(known),
        "compaction": _compaction(known),
        "brokers": _brokers(known, now_s, leads=seen.role == "leader"),
        "top_streams": [{"stream_id": a, "ranges": b} for a, b in known.top_streams],
        "reconcile": _reconcile(sources),
        "largest_streams": [
            {"stream_id": stream, "bytes": size} for stream, size in known.top_sizes.streams
        ],
        "largest_brokers": [
            {"node_id": node, "bytes": size, "objects": count}
            for node, size, count in known.top_sizes.nodes
        ],
        "backup": _backup(sources),
        "certificates": [
            {"plane": certificate.plane, "not_after_s": certificate.not_after.timestamp()}
            for certificate in sources.certificates()
        ],
        "process": _process(known),
    }
    # Last, because alarms are derived from the finished document.
    document["alarms"] = [alarm._asdict() for alarm in alarms(document)]

    return document


def _build(version: str) -> Fields:
    return {
        "version": version,
        "feature_levels": str(SUPPORTED),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
    }


def _quorum(seen: operations.QuorumDescription, others: Mapping[int, Answer]) -> Fields:
    """Return this controller's view of the quorum, with the leader's lags if it answers."""
    leaders = _leaders_replicas(seen, others)

    def described(
        replicas: Iterable[operations.ReplicaDescription], *, votes: bool
    ) -> list[Fields]:
        return [
            {
                **(leaders.get(replica.key.node_id) or _replica(replica, seen.end_offset, getattr)),
                "votes": votes,
            }
            for replica in replicas
        ]

    return {
        "role": seen.role,
        "leader_id": seen.leader_id,
        "has_leader": seen.has_leader,
        "epoch": seen.epoch,
        "high_watermark": seen.high_watermark,
        "end_offset": seen.end_offset,
        "voters": described(seen.voters, votes=True),
        "observers": described(seen.observers, votes=False),
    }


def _replica(replica: Any, end_offset: int, read: Callable[[Any, str], int | None]) -> Fields:
    """Describe a replica. `read` returns one of its numbers, None if it is unknown."""
    end = read(replica, "end_offset")
    return {
        "node_id": replica.key.node_id,
        "endpoint": replica.endpoint,
        "end_offset": end,
        "lag": None if end is None else max(0, end_offset - end),
        "last_fetch_age_ms": read(replica, "last_fetch_age_ms"),
        "last_caught_up_age_ms": read(replica, "last_caught_up_age_ms"),
    }


def _read_field(message: Any, name: str) -> Any:
    # 0 is a valid offset and age, so presence decides.
    return getattr(message, name) if message.HasField(name) else None


def _leaders_replicas(
    seen: operations.QuorumDescription, others: Mapping[int, Answer]
) -> Mapping[int, Fields]:
    """Return voters by id as described by another controller that leads this epoch."""
    if seen.role == "leader":
        return {}
    views = [other.view for other in others.values() if other.view is not None]
    for view in views:
        # A deposed leader that does not know it yet would show outdated lags.
        if view.role == "leader" and view.epoch >= seen.epoch:
            return {
                voter.key.node_id: _replica(voter, view.end_offset, _read_field)
                for voter in view.voters
            }
    return {}


def _controllers(
    seen: operations.QuorumDescription, others: Mapping[int, Answer], known: Knowledge
) -> list[Fields]:
    """Return the description of each controller, or its failure to answer, in order of ids."""
    votes = {voter.key.node_id for voter in seen.voters}

    def described(node_id: int, reason: str, version: str, **view: Any) -> Fields:
        return {
            "node_id": node_id,
            "votes": node_id in votes,
            "answers": bool(view),
            "reason": reason,
            "role": view.get("role", ""),
            **{name: view.get(name) for name in _PROGRESS},
            "repairing": view.get("repairing", False),
            "disk_full": view.get("disk_full", False),
            "version": version,
        }

    own = {name: getattr(seen, name) for name in ("role", *_PROGRESS)}
    own |= {"repairing": seen.is_repairing, "disk_full": seen.is_disk_full}
    controllers = [described(seen.node_id, "", known.sources.version, **own)]
    for node_id, answer in others.items():
        view = {} if answer.view is None else _answered(answer.view)
        version = known.versions.get(node_id, "")
        controllers.append(described(node_id, answer.reason, version, **view))
    return sorted(controllers, key=lambda fields: fields["node_id"])


def _answered(view: pb.DescribeQuorumResponse) -> Fields:
    names = ("role", *_PROGRESS, "repairing", "disk_full")
    return {
        **{name: getattr(view, name) for name in names},
        "leader_id": _read_field(view, "leader_id"),
    }


def _commits(known: Knowledge, now_s: float) -> Fields:
    names = ("commits_accepted", "commits_refused", "commit_p50", "commit_p99")
    recent = known.sampler.history.since(now_s - RECENT_S, names).columns
    tally = known.sources.commits
    return {
        "accepted": tally.accepted,
        "refused": tally.refused,
        "accepted_per_s": mean(recent["commits_accepted"]),
        "refused_per_s": mean(recent["commits_refused"]),
        "p50_ms": mean(recent["commit_p50"]),
        "p99_ms": highest(recent["commit_p99"]),
        "hour": last_hour(known.sampler.history, now_s),
    }


def _deletions(known: Knowledge) -> Fields:
    deletion = known.sources.deletion()
    return {
        "owed": known.sources.metadata_size().destroyed_objects,
        "in_flight": deletion.in_flight,
        "refused": deletion.refused,
        "stuck": deletion.stuck,
        "stuck_keys": [{"key": key, "reason": why} for key, why in deletion.sample],
        "ahead": deletion.ahead,
        "ahead_keys": [{"key": key, "reason": why} for key, why in deletion.ahead_sample],
        "unproven": deletion.unproven,
        "rate_per_s": deletion.rate,
        "unbacked": deletion.unbacked,
        "unbacked_s": deletion.unbacked_ms / 1000,
    }


def _compaction(known: Knowledge) -> Fields:
    departed = [node for node in known.nodes if node.departed]
    return {
        "set_objects": known.sources.metadata_size().stream_set_objects,
        "departed_nodes": len(departed),
        "departed_set_objects": sum(node.stream_set_object_count for node in departed),
        "assigned": [
            {"node_id": node.node_id, "compacted_by": by}
            for node in known.nodes
            if (by := known.parts.view.compacted_by(node.node_id)) != NONE_ID
        ][:NODES_MAX],
    }


def _brokers(known: Knowledge, now_s: float, *, leads: bool) -> Fields:
    view = known.parts.view
    # A follower hears no heartbeats, and its count would show all brokers as unknown.
    states = Counter(session_of(node, view) for node in known.nodes) if leads else Counter()
    # A document must stay small, however many brokers there are.
    top = sorted(known.nodes, key=lambda node: -node.stream_set_object_count)[:NODES_MAX]
    return {
        "count": len(known.nodes),
        "sessions": dict(states),
        "silent": list(_silent(known, now_s)) if leads else [],
        "locked": sum(node.locked for node in known.nodes),
        "recovering": sum(node.recovered_by != NONE_ID for node in known.nodes),
        "owing": sum(node.pending_upload_count > 0 for node in known.nodes),
        "top": [node_fields(broker, view) for broker in top],
    }


def _silent(known: Knowledge, now_s: float) -> Iterator[Fields]:
    """Yield fenced brokers that did not close and block the data or streams of others."""
    view = known.parts.view
    for node in known.nodes:
        heard = view.heard(node.node_id)
        if session_of(node, view) != "fenced" or heard is None or heard.has_closed:
            continue
        owes = _owes(node)
        if owes:
            since_s = now_s - heard.age_ms / 1000
            is_exact = heard.is_exact
            yield {"node_id": node.node_id, "since_s": since_s, "is_exact": is_exact, "owes": owes}


def _owes(node: NodeDescription) -> str:
    """Describe the work that a broker blocks, empty if there is none."""
    if node.recovered_by != NONE_ID:
        return f"broker {node.recovered_by} recovers its data"
    if node.pending_upload_count:
        return f"{node.pending_upload_count} of its uploads are missing"
    return "it has streams open" if node.has_opening_streams else ""


def session_of(node: NodeDescription, view: LeaderView) -> str:
    """Return the state of a broker's session in lower case, unknown unless this node leads."""
    return "departed" if node.departed else view.state_of(node.node_id).name.lower()


def node_fields(node: NodeDescription, view: LeaderView) -> Fields:
    """Return a broker as pages show it, without its write-ahead log, which may have secrets."""
    heard = view.heard(node.node_id)
    return {
        "node_id": node.node_id,
        "epoch": node.node_epoch,
        "session": session_of(node, view),
        # An inexact age is only a lower bound.
        "last_heartbeat_ms": heard.age_ms if heard is not None and heard.is_exact else None,
        "locked": node.locked,
        "set_objects": node.stream_set_object_count,
        "has_open_streams": node.has_opening_streams,
        "uploads_owed": node.pending_upload_count,
        "recovered_by": None if node.recovered_by == NONE_ID else node.recovered_by,
        "tags": dict(node.tags),
    }


def stream_fields(stream: StreamDescription) -> Fields:
    """Return a stream as JSON shows it."""
    return {
        "stream_id": stream.stream_id,
        "state": stream.state.name.lower(),
        "node_id": None if stream.node_id < 0 else stream.node_id,
        "epoch": None if stream.epoch < 0 else stream.epoch,
        "start_offset": stream.start_offset,
        "end_offset": stream.end_offset,
        "tags": dict(stream.tags),
    }


def _reconcile(sources: Sources) -> Fields:
    told = sources.reconcile_runs()
    return {"problem": told.problem, **asdict(told.runs)}


def _backup(sources: Sources) -> Fields | None:
    backup = sources.backup()
    if backup is None:
        return None
    return {
        "end_offset": backup.end_offset,
        "behind_entries": backup.behind_entries,
        "behind_s": backup.behind_ms / 1000,
        "problem": backup.problem,
    }


def _process(known: Knowledge) -> Fields:
    sources = known.sources
    return {
        "memory_bytes": known.parts.memory.rss_bytes,
        "memory_limit_bytes": sources.memory_limit,
        "request_memory_bytes": sources.request_bytes(),
        "connections": dict(sources.connections()),
        "audit_failing": sources.audit is not None and bool(sources.audit.failure),
    }
