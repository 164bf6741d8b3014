"""Table of all RPCs: the only place where the facts of a method are stated.

Authorization, audit log, admission control, memory limits, the client and
docs/reference/methods.md derive from it by `streammeta.rpc.methods`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streammeta.rpc.method_facts import (
    DESCRIPTION_LOOKUPS,
    Access,
    AnswerList,
    AuditRule,
    MemoryClass,
    MethodFacts,
    Recorded,
    RequestClass,
    RequestList,
    Retry,
    Unnamed,
    Work,
)
from streammeta.tls.identity import Role

NAMED_OBJECTS_MAX = 1_000
"""Maximum number of named objects in one request."""

TAGS_MAX = 16
"""Maximum number of tags of a stream, a node or a named object."""

WATCHED_PREFIXES_MAX = 64
"""Maximum number of prefixes of keys in one watch."""

_PEER, _BROKER, _COMPACTOR, _READER, _RECONCILER, _BACKUP, _ADMIN_ROLE = (
    Role.CONTROLLER,
    Role.BROKER,
    Role.COMPACTOR,
    Role.READER,
    Role.RECONCILER,
    Role.BACKUP,
    Role.ADMIN,
)


# -- access


def _may(*roles: Role, **restrictions: Any) -> Access:
    return Access(roles=frozenset(roles), **restrictions)


EVERYONE = _may(*Role, new_brokers=True)
"""Access of every authenticated caller."""

_ADMIN = _may(_ADMIN_ROLE)
_OWNER = _may(_BROKER, binds_brokers=True)
_OWNER_OR_ADMIN = _may(_BROKER, _ADMIN_ROLE, binds_brokers=True)
_WRITER = _may(_BROKER, _COMPACTOR, binds_brokers=True)
_LOOK = _may(_BROKER, _COMPACTOR, _READER, _RECONCILER, _ADMIN_ROLE)
_DESCRIBE = _may(
    *(_PEER, _BROKER, _COMPACTOR, _READER, _RECONCILER, _BACKUP, _ADMIN_ROLE), new_brokers=True
)
_PUT = _may(_BROKER, _RECONCILER, _ADMIN_ROLE)
# A commit with effects is a PutKVs or TrimStreams as well, so it needs the roles of those.
_EFFECT_ROLES = {"kv_puts": _PUT.roles, "trims": _OWNER.roles}
_COMMITTER = _may(_BROKER, _COMPACTOR, binds_brokers=True, roles_of_fields=_EFFECT_ROLES)
# Compaction appends nothing.
_UPLOADER = _may(
    *(_BROKER, _COMPACTOR),
    binds_brokers=True,
    roles_of_fields={**_EFFECT_ROLES, "shared_rows": _OWNER.roles},
)
# A hold stops all deletions, for up to a week.
_SNAPSHOT_READER = _may(
    *(_READER, _RECONCILER, _BACKUP, _ADMIN_ROLE),
    roles_of_fields={"hold_ms": frozenset((_RECONCILER, _BACKUP, _ADMIN_ROLE))},
)


# -- audit


def _guarded(made: Mapping[str, str] | None = None, /, **asked: str) -> AuditRule:
    return AuditRule(Recorded.EACH, is_guarded=True, asked=asked, made=made or {})


def _each(**asked: str) -> AuditRule:
    return AuditRule(Recorded.EACH, asked=asked)


def _change(made: Mapping[str, str] | None = None, /, **asked: str) -> AuditRule:
    return AuditRule(Recorded.CHANGE, asked=asked, made=made or {})


SUMMED = AuditRule(Recorded.SUMMED)

SUMMED_ALWAYS = AuditRule(Recorded.SUMMED, is_always_answered=True)
"""Rule of calls that keep brokers from being fenced, or show an operator the problem."""

COMMIT_WITH_EFFECTS = _each(
    node="node.node_id", object="object_id", keys="kv_puts.namespace/key", trims="trims.stream_id"
)
"""Rule of a commit that puts values or trims streams."""

_COMMIT_AUDIT = AuditRule(Recorded.SUMMED, when=(("kv_puts", "trims"), COMMIT_WITH_EFFECTS))
_NODE_AUDIT = {"node": "node.node_id", "node_epoch": "node.node_epoch"}
_STREAMS_AUDIT = {"node": "node.node_id", "streams": "streams.stream_id"}


# -- work

_COMMIT = Work(RequestClass.COMMIT)
_CHANGE = Work(RequestClass.CHANGE)


def _page(items: str = "") -> Work:
    """Return the work of a read that describes named items, or a page of all."""
    return Work(RequestClass.READ, items, DESCRIPTION_LOOKUPS, Unnamed.PAGE)


def _lookup(items: str) -> Work:
    return Work(RequestClass.READ, items)


# -- rows

_READ, _SAFE, _REQUEST_ID, _OBJECT_ID, _CONDITIONAL = Retry
_VITAL, _COMMIT_MEMORY, _ORDINARY, _BULK = MemoryClass
_LEADER, _ANY = True, False

_EFFECTS = (RequestList("kv_puts", 0), RequestList("trims", 0))
_NAMED = RequestList("objects", most=NAMED_OBJECTS_MAX)


# fmt: off
ROWS: Mapping[str, Mapping[str, MethodFacts]] = {
    # The columns are: access, audit; then retry, leader only, work, memory, lists of the request,
    # list of the answer.
    "QuorumService": {
        "AddVoter": MethodFacts(_ADMIN,
            _guarded(voter="voter.key.node_id", directory_id="voter.key.directory_id",
                endpoint="voter.endpoint"),
            _SAFE, _LEADER, None, _VITAL, (), None),
        "RemoveVoter": MethodFacts(_ADMIN,
            _guarded(voter="key.node_id", directory_id="key.directory_id"),
            _SAFE, _LEADER, None, _VITAL, (), None),
        "DescribeQuorum": MethodFacts(_DESCRIBE, SUMMED_ALWAYS,
            _READ, _ANY, None, _VITAL, (), None),
    },
    "AdminService": {
        "DescribeCluster": MethodFacts(_DESCRIBE, SUMMED_ALWAYS,
            _READ, _ANY, None, _VITAL, (), None),
        "StateHash": MethodFacts(_may(_PEER, _READER, _RECONCILER, _BACKUP, _ADMIN_ROLE), SUMMED,
            _READ, _ANY, None, _BULK, (), None),
        "TakeSnapshot": MethodFacts(_may(_BACKUP, _ADMIN_ROLE),
            _guarded({"end_offset": "end_offset"}),
            _SAFE, _ANY, None, _BULK, (), None),
        "TransferLeadership": MethodFacts(_ADMIN, _guarded(to="to_node_id"),
            _CONDITIONAL, _LEADER, None, _VITAL, (), None),
        "UpdateFeatureLevel": MethodFacts(_ADMIN,
            _guarded({"before": "before"}, level="level", dry_run="dry_run"),
            _SAFE, _LEADER, None, _ORDINARY, (), None),
        "AdoptObjects": MethodFacts(_ADMIN, _guarded(objects="objects.object_id"),
            _SAFE, _LEADER, _CHANGE, _ORDINARY,
            (RequestList("objects"), RequestList("replaced_object_ids", 0)), None),
        "FinishRestore": MethodFacts(_ADMIN,
            _guarded({"was_recovering": "was_recovering"}, given_up="given_up"),
            _SAFE, _LEADER, None, _ORDINARY, (), None),
    },
    "NodeService": {
        "RegisterNode": MethodFacts(_OWNER, _change(**_NODE_AUDIT),
            _SAFE, _LEADER, _CHANGE, _ORDINARY, (), None),
        # A rejected heartbeat would fence the broker.
        "Heartbeat": MethodFacts(_OWNER, SUMMED_ALWAYS,
            _SAFE, _LEADER, Work(RequestClass.HEARTBEAT), _VITAL, (), None),
        "UnregisterNode": MethodFacts(_OWNER_OR_ADMIN, _guarded(**_NODE_AUDIT),
            _SAFE, _LEADER, _CHANGE, _VITAL, (), None),
        # A broker with a node id has no use for another one.
        "GetNextNodeId": MethodFacts(_may(_ADMIN_ROLE, new_brokers=True),
            _change({"node": "node_id"}),
            _REQUEST_ID, _LEADER, _CHANGE, _ORDINARY, (), None),
        "GetNodes": MethodFacts(_LOOK, SUMMED,
            _READ, _LEADER, Work(RequestClass.READ, walks_with="include_stream_set_objects"),
            _ORDINARY, (RequestList("node_ids", 0),), AnswerList("nodes")),
        "ListStreamSetObjects": MethodFacts(_LOOK, SUMMED,
            _READ, _LEADER,
            Work(RequestClass.READ, "", DESCRIPTION_LOOKUPS, Unnamed.PAGE,
                lists=("include_ranges",)),
            _BULK, (), AnswerList("objects")),
        "LockNode": MethodFacts(_ADMIN, _guarded(node="node_id"),
            _SAFE, _LEADER, _CHANGE, _VITAL, (), None),
        "UnlockNode": MethodFacts(_ADMIN, _guarded(node="node_id"),
            _SAFE, _LEADER, _CHANGE, _VITAL, (), None),
    },
    "StreamService": {
        "CreateStreams": MethodFacts(_OWNER_OR_ADMIN,
            _change({"streams": "stream_ids"}, node="node.node_id"),
            _REQUEST_ID, _LEADER, _CHANGE, _ORDINARY, (RequestList("streams"),), None),
        "OpenStreams": MethodFacts(_OWNER, _change(**_STREAMS_AUDIT),
            _SAFE, _LEADER, _CHANGE, _ORDINARY, (RequestList("streams"),), None),
        "CloseStreams": MethodFacts(_OWNER, _change(**_STREAMS_AUDIT),
            _SAFE, _LEADER, _CHANGE, _VITAL, (RequestList("streams"),), None),
        "TrimStreams": MethodFacts(_OWNER, _change(**_STREAMS_AUDIT),
            _SAFE, _LEADER, _CHANGE, _VITAL, (RequestList("streams"),), None),
        "DeleteStreams": MethodFacts(_OWNER_OR_ADMIN, _guarded(**_STREAMS_AUDIT),
            _SAFE, _LEADER, _CHANGE, _VITAL, (RequestList("streams"),), None),
        "IssueProducerIds": MethodFacts(_OWNER,
            _change({"first": "first_producer_id"}, node="node.node_id", count="count"),
            _SAFE, _LEADER, _CHANGE, _ORDINARY, (), None),
        # A page skips deleted streams, and streams of other owners.
        "DescribeStreams": MethodFacts(_LOOK, SUMMED,
            _READ, _LEADER,
            Work(RequestClass.READ, "stream_ids", DESCRIPTION_LOOKUPS, Unnamed.WALK,
                lists=("include_ranges", "include_stream_objects")),
            _BULK, (RequestList("stream_ids", 0),), AnswerList("streams")),
        # A page examines more streams than it returns.
        "FindStreams": MethodFacts(_LOOK, SUMMED,
            _READ, _LEADER, Work(RequestClass.READ, unnamed=Unnamed.WALK), _BULK,
            (RequestList("tags", most=TAGS_MAX),), AnswerList("streams")),
        "GetOpeningStreams": MethodFacts(_OWNER, _change(**_NODE_AUDIT, failover="failover"),
            _SAFE, _LEADER, Work(RequestClass.SCAN), _ORDINARY, (),
            AnswerList("streams", is_split=False)),
        "AbandonUploads": MethodFacts(_ADMIN,
            _guarded({"abandoned": "abandoned.stream_id"}, node="node_id", streams="stream_ids",
                node_epoch="close_streams_of_epoch"),
            _SAFE, _LEADER, _CHANGE, _VITAL, (RequestList("stream_ids", 0),), None),
    },
    "ObjectService": {
        "PrepareObjects": MethodFacts(_WRITER,
            _change({"first": "first_object_id"}, node="node.node_id", count="count"),
            _REQUEST_ID, _LEADER, _CHANGE, _ORDINARY, (), None),
        # The object is in the bucket already, so its commit is rejected as late as possible.
        "CommitStreamSetObject": MethodFacts(_UPLOADER, _COMMIT_AUDIT,
            _OBJECT_ID, _LEADER, _COMMIT, _COMMIT_MEMORY,
            (RequestList("compacted_object_ids", 0), *_EFFECTS), None),
        "CommitStreamObject": MethodFacts(_COMMITTER, _COMMIT_AUDIT,
            _OBJECT_ID, _LEADER, _COMMIT, _COMMIT_MEMORY,
            (RequestList("source_object_ids"), *_EFFECTS), None),
        # The pipeline bounds its own messages in flight.
        "CommitPipeline": MethodFacts(_UPLOADER, SUMMED,
            _OBJECT_ID, _LEADER, None, _COMMIT_MEMORY, (), None),
        "GetObjects": MethodFacts(_LOOK, SUMMED,
            _READ, _LEADER, _lookup("queries"), _ORDINARY, (RequestList("queries"),),
            AnswerList("results")),
        "DescribeObjects": MethodFacts(_LOOK, SUMMED,
            _READ, _LEADER, _page("object_ids"), _BULK, (RequestList("object_ids", 0),),
            AnswerList("objects")),
        "ListStreamObjects": MethodFacts(_LOOK, SUMMED,
            _READ, _LEADER, Work(RequestClass.READ, unnamed=Unnamed.PAGE), _BULK, (),
            AnswerList("objects")),
        # A caller that is about to delete says so, and its check is on record before it does.
        "CheckObjects": MethodFacts(_may(_BROKER, _COMPACTOR, _RECONCILER, _ADMIN_ROLE),
            AuditRule(Recorded.SUMMED, when=(("deleting",), _guarded(objects="object_ids"))),
            _READ, _LEADER, _lookup("object_ids"), _BULK, (RequestList("object_ids"),),
            AnswerList("states", is_split=False)),
        "CommitNamedObjects": MethodFacts(_OWNER,
            _each(node="node.node_id", names="objects.name", objects="objects.object_id"),
            _OBJECT_ID, _LEADER, _CHANGE, _ORDINARY, (_NAMED,), None),
        "DeleteNamedObjects": MethodFacts(_OWNER_OR_ADMIN,
            _guarded({"owner_key_deleted": "owner_key_deleted"}, node="node.node_id",
                names="objects.name", owner_stream="owner_stream_id",
                owner_key="owner_key.namespace/key"),
            _SAFE, _LEADER, _CHANGE, _VITAL,
            (RequestList("objects", 0, NAMED_OBJECTS_MAX),), None),
        "DescribeNamedObjects": MethodFacts(_LOOK, SUMMED,
            _READ, _LEADER, _page("names"), _BULK, (RequestList("names", 0),),
            AnswerList("objects")),
    },
    "KVService": {
        "PutKVs": MethodFacts(_PUT, _each(keys="items.namespace/key"),
            _CONDITIONAL, _LEADER, _CHANGE, _ORDINARY, (RequestList("items"),), None),
        "GetKVs": MethodFacts(_may(_BROKER, _READER, _RECONCILER, _ADMIN_ROLE), SUMMED,
            _READ, _LEADER, _lookup("keys"), _ORDINARY, (RequestList("keys"),),
            AnswerList("results")),
        "DeleteKVs": MethodFacts(_may(_BROKER, _ADMIN_ROLE), _guarded(keys="keys.namespace/key"),
            _SAFE, _LEADER, _CHANGE, _VITAL, (RequestList("keys"),), None),
        "ListKVs": MethodFacts(_may(_BROKER, _READER, _ADMIN_ROLE), SUMMED,
            _READ, _LEADER, _page(), _BULK, (), AnswerList("entries")),
    },
    "MetadataService": {
        "Watch": MethodFacts(_may(_BROKER, _COMPACTOR, _READER, _RECONCILER, _BACKUP, _ADMIN_ROLE),
            AuditRule(Recorded.SUMMED, at_start=True),
            _READ, _ANY, None, _BULK,
            (RequestList("stream_ids", 0), RequestList("node_ids", 0),
                RequestList("kv_prefixes", 0, WATCHED_PREFIXES_MAX)), None),
        "GetSnapshot": MethodFacts(_SNAPSHOT_READER,
            _each(not_before_offset="not_before_offset", hold_ms="hold_ms"),
            _READ, _LEADER, Work(RequestClass.SNAPSHOT), _BULK, (), None),
    },
}
"""Facts by service and method."""
# fmt: on
