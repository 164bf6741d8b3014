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
_COMMITTER = _may(
    *(_BROKER, _COMPACTOR),
    binds_brokers=True,
    roles_of_fields={"kv_puts": _PUT.roles, "trims": _OWNER.roles},
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


ROWS: Mapping[str, Mapping[str, MethodFacts]] = {
    "QuorumService": {
        "AddVoter": MethodFacts(
            access=_ADMIN,
            audit=_guarded(
                voter="voter.key.node_id",
                directory_id="voter.key.directory_id",
                endpoint="voter.endpoint",
            ),
            retry=Retry.SAFE,
            leader_only=True,
            work=None,
            memory=MemoryClass.VITAL,
            request_lists=(),
            answer_list=None,
        ),
        "RemoveVoter": MethodFacts(
            access=_ADMIN,
            audit=_guarded(voter="key.node_id", directory_id="key.directory_id"),
            retry=Retry.SAFE,
            leader_only=True,
            work=None,
            memory=MemoryClass.VITAL,
            request_lists=(),
            answer_list=None,
        ),
        "DescribeQuorum": MethodFacts(
            access=_DESCRIBE,
            audit=SUMMED_ALWAYS,
            retry=Retry.READ,
            leader_only=False,
            work=None,
            memory=MemoryClass.VITAL,
            request_lists=(),
            answer_list=None,
        ),
    },
    "AdminService": {
        "DescribeCluster": MethodFacts(
            access=_DESCRIBE,
            audit=SUMMED_ALWAYS,
            retry=Retry.READ,
            leader_only=False,
            work=None,
            memory=MemoryClass.VITAL,
            request_lists=(),
            answer_list=None,
        ),
        "StateHash": MethodFacts(
            access=_may(_PEER, _READER, _RECONCILER, _BACKUP, _ADMIN_ROLE),
            audit=SUMMED,
            retry=Retry.READ,
            leader_only=False,
            work=None,
            memory=MemoryClass.BULK,
            request_lists=(),
            answer_list=None,
        ),
        "TakeSnapshot": MethodFacts(
            access=_may(_BACKUP, _ADMIN_ROLE),
            audit=_guarded({"end_offset": "end_offset"}),
            retry=Retry.SAFE,
            leader_only=False,
            work=None,
            memory=MemoryClass.BULK,
            request_lists=(),
            answer_list=None,
        ),
        "TransferLeadership": MethodFacts(
            access=_ADMIN,
            audit=_guarded(to="to_node_id"),
            retry=Retry.CONDITIONAL,
            leader_only=True,
            work=None,
            memory=MemoryClass.VITAL,
            request_lists=(),
            answer_list=None,
        ),
        "UpdateFeatureLevel": MethodFacts(
            access=_ADMIN,
            audit=_guarded({"before": "before"}, level="level", dry_run="dry_run"),
            retry=Retry.SAFE,
            leader_only=True,
            work=None,
            memory=MemoryClass.ORDINARY,
            request_lists=(),
            answer_list=None,
        ),
        "AdoptObjects": MethodFacts(
            access=_ADMIN,
            audit=_guarded(objects="objects.object_id"),
            retry=Retry.SAFE,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.ORDINARY,
            request_lists=(
                RequestList("objects"),
                RequestList("replaced_object_ids", least=0),
            ),
            answer_list=None,
        ),
        "FinishRestore": MethodFacts(
            access=_ADMIN,
            audit=_guarded({"was_recovering": "was_recovering"}, given_up="given_up"),
            retry=Retry.SAFE,
            leader_only=True,
            work=None,
            memory=MemoryClass.ORDINARY,
            request_lists=(),
            answer_list=None,
        ),
    },
    "NodeService": {
        "RegisterNode": MethodFacts(
            access=_OWNER,
            audit=_change(**_NODE_AUDIT),
            retry=Retry.SAFE,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.ORDINARY,
            request_lists=(),
            answer_list=None,
        ),
        "Heartbeat": MethodFacts(
            access=_OWNER,
            audit=SUMMED_ALWAYS,
            retry=Retry.SAFE,
            leader_only=True,
            work=Work(RequestClass.HEARTBEAT),
            # A rejected heartbeat would fence the broker.
            memory=MemoryClass.VITAL,
            request_lists=(),
            answer_list=None,
        ),
        "UnregisterNode": MethodFacts(
            access=_OWNER_OR_ADMIN,
            audit=_guarded(**_NODE_AUDIT),
            retry=Retry.SAFE,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.VITAL,
            request_lists=(),
            answer_list=None,
        ),
        "GetNextNodeId": MethodFacts(
            # A broker with a node id has no use for another one.
            access=_may(_ADMIN_ROLE, new_brokers=True),
            audit=_change({"node": "node_id"}),
            retry=Retry.REQUEST_ID,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.ORDINARY,
            request_lists=(),
            answer_list=None,
        ),
        "GetNodes": MethodFacts(
            access=_LOOK,
            audit=SUMMED,
            retry=Retry.READ,
            leader_only=True,
            work=Work(RequestClass.READ, walks_with="include_stream_set_objects"),
            memory=MemoryClass.ORDINARY,
            request_lists=(RequestList("node_ids", least=0),),
            answer_list=AnswerList("nodes"),
        ),
        "ListStreamSetObjects": MethodFacts(
            access=_LOOK,
            audit=SUMMED,
            retry=Retry.READ,
            leader_only=True,
            work=_page(),
            memory=MemoryClass.BULK,
            request_lists=(),
            answer_list=AnswerList("objects"),
        ),
        "LockNode": MethodFacts(
            access=_ADMIN,
            audit=_guarded(node="node_id"),
            retry=Retry.SAFE,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.VITAL,
            request_lists=(),
            answer_list=None,
        ),
        "UnlockNode": MethodFacts(
            access=_ADMIN,
            audit=_guarded(node="node_id"),
            retry=Retry.SAFE,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.VITAL,
            request_lists=(),
            answer_list=None,
        ),
    },
    "StreamService": {
        "CreateStreams": MethodFacts(
            access=_OWNER_OR_ADMIN,
            audit=_change({"streams": "stream_ids"}, node="node.node_id"),
            retry=Retry.REQUEST_ID,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.ORDINARY,
            request_lists=(RequestList("streams"),),
            answer_list=None,
        ),
        "OpenStreams": MethodFacts(
            access=_OWNER,
            audit=_change(**_STREAMS_AUDIT),
            retry=Retry.SAFE,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.ORDINARY,
            request_lists=(RequestList("streams"),),
            answer_list=None,
        ),
        "CloseStreams": MethodFacts(
            access=_OWNER,
            audit=_change(**_STREAMS_AUDIT),
            retry=Retry.SAFE,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.VITAL,
            request_lists=(RequestList("streams"),),
            answer_list=None,
        ),
        "TrimStreams": MethodFacts(
            access=_OWNER,
            audit=_change(**_STREAMS_AUDIT),
            retry=Retry.SAFE,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.VITAL,
            request_lists=(RequestList("streams"),),
            answer_list=None,
        ),
        "DeleteStreams": MethodFacts(
            access=_OWNER_OR_ADMIN,
            audit=_guarded(**_STREAMS_AUDIT),
            retry=Retry.SAFE,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.VITAL,
            request_lists=(RequestList("streams"),),
            answer_list=None,
        ),
        "DescribeStreams": MethodFacts(
            access=_LOOK,
            audit=SUMMED,
            retry=Retry.READ,
            leader_only=True,
            work=Work(
                RequestClass.READ,
                "stream_ids",
                DESCRIPTION_LOOKUPS,
                Unnamed.WALK,  # a page skips deleted streams, and streams of other owners
                lists=("include_ranges", "include_stream_objects"),
            ),
            memory=MemoryClass.BULK,
            request_lists=(RequestList("stream_ids", least=0),),
            answer_list=AnswerList("streams"),
        ),
        "GetOpeningStreams": MethodFacts(
            access=_OWNER,
            audit=_change(**_NODE_AUDIT, failover="failover"),
            retry=Retry.SAFE,
            leader_only=True,
            work=Work(RequestClass.SCAN),
            memory=MemoryClass.ORDINARY,
            request_lists=(),
            answer_list=AnswerList("streams", is_split=False),
        ),
        "AbandonUploads": MethodFacts(
            access=_ADMIN,
            audit=_guarded(
                {"abandoned": "abandoned.stream_id"},
                node="node_id",
                streams="stream_ids",
                node_epoch="close_streams_of_epoch",
            ),
            retry=Retry.SAFE,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.VITAL,
            request_lists=(RequestList("stream_ids", least=0),),
            answer_list=None,
        ),
    },
    "ObjectService": {
        "PrepareObjects": MethodFacts(
            access=_WRITER,
            audit=_change({"first": "first_object_id"}, node="node.node_id", count="count"),
            retry=Retry.REQUEST_ID,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.ORDINARY,
            request_lists=(),
            answer_list=None,
        ),
        "CommitStreamSetObject": MethodFacts(
            access=_COMMITTER,
            audit=_COMMIT_AUDIT,
            retry=Retry.OBJECT_ID,
            leader_only=True,
            work=_COMMIT,
            # The object is in the bucket already, so its commit is rejected as late as possible.
            memory=MemoryClass.COMMIT,
            request_lists=(
                RequestList("compacted_object_ids", least=0),
                RequestList("kv_puts", least=0),
                RequestList("trims", least=0),
            ),
            answer_list=None,
        ),
        "CommitStreamObject": MethodFacts(
            access=_COMMITTER,
            audit=_COMMIT_AUDIT,
            retry=Retry.OBJECT_ID,
            leader_only=True,
            work=_COMMIT,
            memory=MemoryClass.COMMIT,
            request_lists=(
                RequestList("source_object_ids"),
                RequestList("kv_puts", least=0),
                RequestList("trims", least=0),
            ),
            answer_list=None,
        ),
        "CommitPipeline": MethodFacts(
            access=_COMMITTER,
            audit=SUMMED,
            retry=Retry.OBJECT_ID,
            leader_only=True,
            work=None,  # the pipeline bounds its own messages in flight
            memory=MemoryClass.COMMIT,
            request_lists=(),
            answer_list=None,
        ),
        "GetObjects": MethodFacts(
            access=_LOOK,
            audit=SUMMED,
            retry=Retry.READ,
            leader_only=True,
            work=_lookup("queries"),
            memory=MemoryClass.ORDINARY,
            request_lists=(RequestList("queries"),),
            answer_list=AnswerList("results"),
        ),
        "DescribeObjects": MethodFacts(
            access=_LOOK,
            audit=SUMMED,
            retry=Retry.READ,
            leader_only=True,
            work=_page("object_ids"),
            memory=MemoryClass.BULK,
            request_lists=(RequestList("object_ids", least=0),),
            answer_list=AnswerList("objects"),
        ),
        "CheckObjects": MethodFacts(
            access=_may(_BROKER, _COMPACTOR, _RECONCILER, _ADMIN_ROLE),
            # A caller that is about to delete says so, and its check is on record before it does.
            audit=AuditRule(Recorded.SUMMED, when=(("deleting",), _guarded(objects="object_ids"))),
            retry=Retry.READ,
            leader_only=True,
            work=_lookup("object_ids"),
            memory=MemoryClass.BULK,
            request_lists=(RequestList("object_ids"),),
            answer_list=AnswerList("states", is_split=False),
        ),
        "CommitNamedObjects": MethodFacts(
            access=_OWNER,
            audit=_each(node="node.node_id", names="objects.name", objects="objects.object_id"),
            retry=Retry.OBJECT_ID,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.ORDINARY,
            request_lists=(RequestList("objects", most=NAMED_OBJECTS_MAX),),
            answer_list=None,
        ),
        "DeleteNamedObjects": MethodFacts(
            access=_OWNER_OR_ADMIN,
            audit=_guarded(node="node.node_id", names="objects.name"),
            retry=Retry.SAFE,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.VITAL,
            request_lists=(RequestList("objects", most=NAMED_OBJECTS_MAX),),
            answer_list=None,
        ),
        "DescribeNamedObjects": MethodFacts(
            access=_LOOK,
            audit=SUMMED,
            retry=Retry.READ,
            leader_only=True,
            work=_page("names"),
            memory=MemoryClass.BULK,
            request_lists=(RequestList("names", least=0),),
            answer_list=AnswerList("objects"),
        ),
    },
    "KVService": {
        "PutKVs": MethodFacts(
            access=_PUT,
            audit=_each(keys="items.namespace/key"),
            retry=Retry.CONDITIONAL,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.ORDINARY,
            request_lists=(RequestList("items"),),
            answer_list=None,
        ),
        "GetKVs": MethodFacts(
            access=_may(_BROKER, _READER, _RECONCILER, _ADMIN_ROLE),
            audit=SUMMED,
            retry=Retry.READ,
            leader_only=True,
            work=_lookup("keys"),
            memory=MemoryClass.ORDINARY,
            request_lists=(RequestList("keys"),),
            answer_list=AnswerList("results"),
        ),
        "DeleteKVs": MethodFacts(
            access=_may(_BROKER, _ADMIN_ROLE),
            audit=_guarded(keys="keys.namespace/key"),
            retry=Retry.SAFE,
            leader_only=True,
            work=_CHANGE,
            memory=MemoryClass.VITAL,
            request_lists=(RequestList("keys"),),
            answer_list=None,
        ),
        "ListKVs": MethodFacts(
            access=_may(_BROKER, _READER, _ADMIN_ROLE),
            audit=SUMMED,
            retry=Retry.READ,
            leader_only=True,
            work=_page(),
            memory=MemoryClass.BULK,
            request_lists=(),
            answer_list=AnswerList("entries"),
        ),
    },
    "MetadataService": {
        "Watch": MethodFacts(
            access=_may(_BROKER, _COMPACTOR, _READER, _RECONCILER, _BACKUP, _ADMIN_ROLE),
            audit=AuditRule(Recorded.SUMMED, at_start=True),
            retry=Retry.READ,
            leader_only=False,
            work=None,
            memory=MemoryClass.BULK,
            request_lists=(
                RequestList("stream_ids", least=0),
                RequestList("node_ids", least=0),
                RequestList("kv_prefixes", least=0, most=WATCHED_PREFIXES_MAX),
            ),
            answer_list=None,
        ),
        "GetSnapshot": MethodFacts(
            access=_SNAPSHOT_READER,
            audit=_each(not_before_offset="not_before_offset", hold_ms="hold_ms"),
            retry=Retry.READ,
            leader_only=True,
            work=Work(RequestClass.SNAPSHOT),
            memory=MemoryClass.BULK,
            request_lists=(),
            answer_list=None,
        ),
    },
}
"""Facts by service and method."""
