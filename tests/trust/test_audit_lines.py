"""Lines of the audit log: their form, their chain, their sums, and the rule of each method."""

import json
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from streammeta.controller.trust.audit import lines
from streammeta.controller.trust.audit.rules import LISTED_MAX, listed, refusals, targets
from streammeta.rpc.contract import SERVICES
from streammeta.rpc.method_facts import AuditRule, Recorded
from streammeta.rpc.methods import METHODS, SERVED_METHODS, facts_of
from streammeta.v1 import admin_pb2, common_pb2, kv_pb2, nodes_pb2, streams_pb2
from tests.trust.audited_cluster import chained, line

DESCRIPTORS = {
    method.full_name: method for service in SERVICES.values() for method in service.methods
}


def test_a_line_has_the_members_that_say_something() -> None:
    said = json.loads(lines.Chain().link(line(1)))
    assert said == {
        "v": 1,
        "seq": 1,
        "ts": "2027-01-15T08:00:00.001Z",
        "node": 3,
        "epoch": 7,
        "leader": True,
        "principal": "admin/alice",
        "cert": "sha256:12ab",
        "peer": "10.0.0.9:4711",
        "call": "NodeService.LockNode",
        "target": {"node": 1001},
        "verdict": "OK",
        "offset": 101,
        "prev": lines.GENESIS,
    }


def test_each_line_names_the_hash_of_the_one_before() -> None:
    first, second = chained(2)
    assert json.loads(second)["prev"] == lines.line_hash(first.rstrip(b"\n"))
    assert json.loads(second)["seq"] == 2


def test_a_text_of_a_caller_can_neither_end_a_line_nor_fill_it() -> None:
    forged = lines.AuditLine(
        ts_ms=0,
        node=1,
        epoch=1,
        leader=True,
        call="x",
        verdict=lines.Verdict.OK,
        request_id='a"}\n{"v":1}\x1b[2J\u202e' + "x" * 1_000,
    )
    written = lines.Chain().link(forged)
    assert written.count(b"\n") == 1
    assert written.isascii()
    assert b"\x1b" not in written
    assert len(json.loads(written)["request_id"]) == 128


def test_lost_lines_are_counted_by_the_next() -> None:
    assert json.loads(lines.Chain().link(line(1), dropped=3))["dropped"] == 3


def test_sums_count_by_principal_and_call_and_begin_anew() -> None:
    sums = lines.Sums()
    sums.add("broker/1", "Commit", rows=10, offset=7)
    sums.add("broker/1", "Commit", rows=5, refusals=1, offset=6)
    sums.add("broker/2", "Commit")
    assert list(sums.drain(60_000)) == [
        ("broker/1", "Commit", lines.Sum(2, 15, 1, 60_000), 7),
        ("broker/2", "Commit", lines.Sum(1, 0, 0, 60_000), None),
    ]
    assert list(sums.drain(0)) == []


def test_denials_of_one_kind_have_a_number_of_lines_a_minute() -> None:
    limit = lines.DenialLimit()
    seen = [limit.has_room("broker/1", "Vote", "ROLE") for _ in range(lines.DENIALS_A_MINUTE + 5)]
    assert seen == [True] * lines.DENIALS_A_MINUTE + [False] * 5
    assert limit.has_room("broker/2", "Vote", "ROLE")
    limit.begin_minute()
    assert limit.has_room("broker/1", "Vote", "ROLE")


def test_methods_of_other_services_are_summed() -> None:
    audit = SERVED_METHODS["grpc.health.v1.Health.Check"].audit
    assert audit.recorded is Recorded.SUMMED


@pytest.mark.parametrize(
    "method",
    [
        *("QuorumService.AddVoter", "QuorumService.RemoveVoter", "AdminService.TransferLeadership"),
        *("AdminService.TakeSnapshot", "NodeService.LockNode", "NodeService.UnlockNode"),
        *("NodeService.UnregisterNode", "StreamService.AbandonUploads"),
        *("StreamService.DeleteStreams", "KVService.DeleteKVs"),
        *("AdminService.AdoptObjects", "AdminService.FinishRestore"),
    ],
)
def test_admin_calls_and_those_that_destroy_are_guarded(method: str) -> None:
    rule = facts_of(method).audit
    assert rule.is_guarded
    assert rule.recorded is Recorded.EACH


@pytest.mark.parametrize("name", sorted(METHODS))
def test_paths_lead_to_fields_that_hold_ids_and_names(name: str) -> None:
    method, rule = DESCRIPTORS[name], METHODS[name].audit
    for descriptor, paths in ((method.input_type, rule.asked), (method.output_type, rule.made)):
        for path in paths.values():
            assert all(leaf not in NEVER for leaf in leaves(descriptor, path)), path


NEVER = {"value", "wal_config", "tags", "page_token", "next_page_token", "data", "records"}


def leaves(descriptor: Any, path: str) -> list[str]:
    """Return the names at a path's end; fails if one is no field."""
    *way, last = path.split(".")
    for name in way:
        descriptor = descriptor.fields_by_name[name].message_type
    names = last.split("/")
    for name in names:
        assert descriptor.fields_by_name[name].type != FieldDescriptor.TYPE_MESSAGE, path
    return names


def test_targets_name_ids_of_request_and_answer() -> None:
    rule = facts_of("StreamService.AbandonUploads").audit
    request = streams_pb2.AbandonUploadsRequest(node_id=7, stream_ids=[1, 2])
    answer = streams_pb2.AbandonUploadsResponse(
        abandoned=[streams_pb2.PendingUpload(stream_id=2, node_id=7)]
    )
    assert targets(rule, request, answer) == {"node": 7, "streams": [1, 2], "abandoned": [2]}
    assert targets(rule, None, None) == {}


def test_a_field_that_is_not_set_is_left_out() -> None:
    rule = facts_of("AdminService.TransferLeadership").audit
    assert targets(rule, admin_pb2.TransferLeadershipRequest(), None) == {}
    assert targets(rule, admin_pb2.TransferLeadershipRequest(to_node_id=2), None) == {"to": 2}


def test_keys_are_named_by_their_namespace_and_without_their_values() -> None:
    rule = facts_of("KVService.PutKVs").audit
    request = kv_pb2.PutKVsRequest(items=[kv_pb2.KVToPut(namespace="n", key="k", value=b"secret")])
    assert targets(rule, request, None) == {"keys": [["n", "k"]]}


def test_changes_of_state_name_the_first_id_and_their_number() -> None:
    rule = facts_of("StreamService.CreateStreams").audit
    answer = streams_pb2.CreateStreamsResponse(stream_ids=[4, 5, 6])
    assert targets(rule, None, answer) == {"streams": {"count": 3, "first": 4}}


def test_of_a_long_list_there_are_first_last_and_a_digest() -> None:
    assert listed(list(range(LISTED_MAX)), all_ids=True) == list(range(LISTED_MAX))
    many = listed(list(range(LISTED_MAX + 1)), all_ids=True)
    assert (many["count"], many["first"], many["last"]) == (LISTED_MAX + 1, 0, LISTED_MAX)
    other = listed([*range(LISTED_MAX - 1), 7, LISTED_MAX], all_ids=True)
    assert many["digest"] != other["digest"]
    assert many["digest"].startswith("blake2b:")
    assert listed([], all_ids=False) == {"count": 0}


def test_few_long_names_are_a_long_list_too() -> None:
    shown = listed([["ns", "k" * 1_000]] * 20, all_ids=True)
    assert shown["count"] == 20
    assert len(json.dumps(shown)) < 1_000


def test_a_rule_without_paths_names_nothing() -> None:
    assert targets(AuditRule(Recorded.EACH), kv_pb2.PutKVsRequest(), None) == {}


def test_an_answer_with_errors_names_the_first_and_their_number() -> None:
    none = streams_pb2.DeleteStreamsResponse(errors=[common_pb2.ERROR_CODE_NONE])
    some = streams_pb2.DeleteStreamsResponse(
        errors=[
            common_pb2.ERROR_CODE_NONE,
            common_pb2.ERROR_CODE_STREAM_NOT_EXIST,
            common_pb2.ERROR_CODE_STREAM_FENCED,
        ]
    )
    items = kv_pb2.DeleteKVsResponse(
        results=[kv_pb2.KVResult(error=common_pb2.ERROR_CODE_KEY_EXIST)]
    )
    whole = nodes_pb2.LockNodeResponse(error=common_pb2.ERROR_CODE_NODE_EPOCH_NOT_EXIST)
    assert [refusals(refusal) for refusal in (None, none, some, items, whole)] == [
        ("", 0),
        ("", 0),
        ("STREAM_NOT_EXIST", 2),
        ("KEY_EXIST", 1),
        ("NODE_EPOCH_NOT_EXIST", 1),
    ]
