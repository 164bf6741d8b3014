"""Audit rules: which call is recorded how, and which of its fields name what it is about.

One table by full method name. Fields that are not named here never reach a line: values of keys,
tags, `wal_config`, tokens of pages and bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from google.protobuf.message import Message

from streammeta.controller.trust.audit.lines import clipped
from streammeta.v1.common_pb2 import ErrorCode

LISTED_MAX = 100
"""Maximum number of ids in a line; of more there are count, first, last and a digest."""

LISTED_BYTES_MAX = 8_192
"""Maximum size of a list of names in a line, in bytes."""

_DIGEST_BYTES = 16


class Recorded(StrEnum):
    """Kinds of records of a method's calls."""

    EACH = "each"
    """A line for each, with all ids."""
    CHANGE = "change"
    """A line for each, with the number of ids and the first."""
    SUMMED = "summed"
    """A line a minute for each principal."""


@dataclass(frozen=True, slots=True)
class AuditRule:
    """Record of one method's calls, and the places of their targets.

    `asked` and `made` are paths into the request and the answer, by the name that a line gives
    them. A guarded call has a line before it is decided, is answered once its outcome's line is
    durable, and is refused while lines can't be written.
    """

    recorded: Recorded
    is_guarded: bool = False
    at_start: bool = False
    """Counted when it begins: it may last for days."""
    asked: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)
    when: tuple[tuple[str, ...], AuditRule] | None = None
    """Fields of the request, and the rule instead of this one where one of them is set."""

    def of(self, request: Message) -> AuditRule:
        """Return the rule of a request of the method."""
        if self.when is None:
            return self
        names, rule = self.when
        return rule if any(getattr(request, name) for name in names) else self


def _guarded(**asked: str) -> AuditRule:
    return AuditRule(Recorded.EACH, is_guarded=True, asked=asked)


def _change(**asked: str) -> AuditRule:
    return AuditRule(Recorded.CHANGE, asked=asked)


def _creation(made: Mapping[str, str], **asked: str) -> AuditRule:
    return AuditRule(Recorded.CHANGE, asked=asked, made=made)


SUMMED = AuditRule(Recorded.SUMMED)

COMMIT_WITH_EFFECTS = AuditRule(
    Recorded.EACH,
    asked={
        "node": "node.node_id",
        "object": "object_id",
        "keys": "kv_puts.namespace/key",
        "trims": "trims.stream_id",
    },
)
"""Rule of a commit that puts values or trims streams."""

_COMMIT = AuditRule(Recorded.SUMMED, when=(("kv_puts", "trims"), COMMIT_WITH_EFFECTS))

_OF_STREAMS = {"node": "node.node_id", "streams": "streams.stream_id"}

RULES: Mapping[str, AuditRule] = {
    f"streammeta.v1.{name}": rule
    for name, rule in {
        "QuorumService.AddVoter": _guarded(
            voter="voter.key.node_id",
            directory_id="voter.key.directory_id",
            endpoint="voter.endpoint",
        ),
        "QuorumService.RemoveVoter": _guarded(voter="key.node_id", directory_id="key.directory_id"),
        "QuorumService.DescribeQuorum": SUMMED,
        "AdminService.TakeSnapshot": AuditRule(
            Recorded.EACH, is_guarded=True, made={"end_offset": "end_offset"}
        ),
        "AdminService.TransferLeadership": _guarded(to="to_node_id"),
        "AdminService.UpdateFeatureLevel": AuditRule(
            Recorded.EACH,
            is_guarded=True,
            asked={"level": "level", "dry_run": "dry_run"},
            made={"before": "before"},
        ),
        "AdminService.AdoptObjects": _guarded(objects="objects.object_id"),
        "AdminService.FinishRestore": AuditRule(
            Recorded.EACH,
            is_guarded=True,
            asked={"given_up": "given_up"},
            made={"was_recovering": "was_recovering"},
        ),
        "AdminService.DescribeCluster": SUMMED,
        "AdminService.StateHash": SUMMED,
        "NodeService.RegisterNode": _change(node="node.node_id", node_epoch="node.node_epoch"),
        "NodeService.UnregisterNode": _guarded(node="node.node_id", node_epoch="node.node_epoch"),
        "NodeService.GetNextNodeId": _creation({"node": "node_id"}),
        "NodeService.LockNode": _guarded(node="node_id"),
        "NodeService.UnlockNode": _guarded(node="node_id"),
        "NodeService.GetNodes": SUMMED,
        "NodeService.ListStreamSetObjects": SUMMED,
        "NodeService.Heartbeat": SUMMED,
        "StreamService.CreateStreams": _creation({"streams": "stream_ids"}, node="node.node_id"),
        "StreamService.OpenStreams": _change(**_OF_STREAMS),
        "StreamService.CloseStreams": _change(**_OF_STREAMS),
        "StreamService.TrimStreams": _change(**_OF_STREAMS),
        "StreamService.DeleteStreams": _guarded(**_OF_STREAMS),
        "StreamService.GetOpeningStreams": _change(
            node="node.node_id", node_epoch="node.node_epoch", failover="failover"
        ),
        "StreamService.AbandonUploads": AuditRule(
            Recorded.EACH,
            is_guarded=True,
            asked={
                "node": "node_id",
                "streams": "stream_ids",
                "node_epoch": "close_streams_of_epoch",
            },
            made={"abandoned": "abandoned.stream_id"},
        ),
        "StreamService.DescribeStreams": SUMMED,
        "ObjectService.PrepareObjects": _creation(
            {"first": "first_object_id"}, node="node.node_id", count="count"
        ),
        "ObjectService.CommitStreamSetObject": _COMMIT,
        "ObjectService.CommitStreamObject": _COMMIT,
        "ObjectService.CommitPipeline": SUMMED,
        "ObjectService.GetObjects": SUMMED,
        "ObjectService.DescribeObjects": SUMMED,
        "ObjectService.CommitNamedObjects": AuditRule(
            Recorded.EACH,
            asked={"node": "node.node_id", "names": "objects.name", "objects": "objects.object_id"},
        ),
        "ObjectService.DeleteNamedObjects": _guarded(node="node.node_id", names="objects.name"),
        "ObjectService.DescribeNamedObjects": SUMMED,
        "ObjectService.CheckObjects": AuditRule(
            Recorded.SUMMED, when=(("deleting",), _guarded(objects="object_ids"))
        ),
        "KVService.PutKVs": AuditRule(Recorded.EACH, asked={"keys": "items.namespace/key"}),
        "KVService.DeleteKVs": _guarded(keys="keys.namespace/key"),
        "KVService.GetKVs": SUMMED,
        "KVService.ListKVs": SUMMED,
        "MetadataService.Watch": AuditRule(Recorded.SUMMED, at_start=True),
        "MetadataService.GetSnapshot": AuditRule(
            Recorded.EACH, asked={"not_before_offset": "not_before_offset", "hold_ms": "hold_ms"}
        ),
    }.items()
}
"""The rule of each method of the contract."""


def rule_of(method: str) -> AuditRule:
    """Return a method's rule; services that are not of the contract, such as health, are summed."""
    return RULES.get(method, SUMMED)


_NEEDED_ALWAYS = frozenset(
    {"NodeService.Heartbeat", "QuorumService.DescribeQuorum", "AdminService.DescribeCluster"}
)


def is_needed_always(call: str) -> bool:
    """Return whether a call is answered although nothing can be recorded.

    Brokers would be fenced for want of heartbeats, and no call would show what is wrong.
    """
    return call in _NEEDED_ALWAYS or call.startswith("grpc.")


def refusals(answer: Message | None) -> tuple[str, int]:
    """Return the first error in an answer by its name, and how many items were refused."""
    errors = [error for error in _errors(answer) if error] if answer is not None else []
    if not errors:
        return "", 0
    return ErrorCode.Name(errors[0]).removeprefix("ERROR_CODE_"), len(errors)


def _errors(answer: Any) -> Iterator[ErrorCode.ValueType]:
    for found in answer.DESCRIPTOR.fields:
        if found.name == "error":
            yield answer.error
        elif found.name == "errors":
            yield from answer.errors
        elif found.message_type is not None and "error" in found.message_type.fields_by_name:
            yield from (item.error for item in getattr(answer, found.name))


def targets(rule: AuditRule, request: Message | None, answer: Message | None) -> dict[str, Any]:
    """Return what a call is about, as members of a line."""
    found: dict[str, Any] = {}
    for message, paths in ((request, rule.asked), (answer, rule.made)):
        for name, path in paths.items() if message is not None else ():
            values = list(_at(message, path.split(".")))
            if _is_list(message, path):
                found[name] = listed(values, all_ids=rule.recorded is Recorded.EACH)
            elif values:
                found[name] = _shown(values[0])
    return found


def listed(values: Sequence[Any], *, all_ids: bool) -> Any:
    """Return ids for a line: all of few, else their number, first, last and a digest of all."""
    if not all_ids:
        return {"count": len(values), **({"first": _shown(values[0])} if values else {})}
    encoded = json.dumps(values).encode()
    if len(values) <= LISTED_MAX and len(encoded) <= LISTED_BYTES_MAX:
        return list(values)
    return {
        "count": len(values),
        "first": _shown(values[0]),
        "last": _shown(values[-1]),
        "digest": f"blake2b:{blake2b(encoded, digest_size=_DIGEST_BYTES).hexdigest()}",
    }


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(part) for part in value]
    return clipped(value) if isinstance(value, str) else value


def _at(message: Any, path: Sequence[str]) -> Iterator[Any]:
    """Yield the values at a path; of several names with `/` between, a list of their values."""
    name, *rest = path
    if "/" in name:
        yield [getattr(message, part) for part in name.split("/")]
        return
    found = message.DESCRIPTOR.fields_by_name[name]
    if found.has_presence and not message.HasField(name):
        return
    value = getattr(message, name)
    for one in value if found.is_repeated else (value,):
        if rest:
            yield from _at(one, rest)
        else:
            yield one


def _is_list(message: Any, path: str) -> bool:
    descriptor = message.DESCRIPTOR
    for name in path.split("."):
        if "/" in name:
            break
        if descriptor.fields_by_name[name].is_repeated:
            return True
        descriptor = descriptor.fields_by_name[name].message_type
    return False
