"""The table of methods: complete, consistent with the contract, and required in full."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from streammeta.controller.rpc.calls.interceptors import CallPipeline
from streammeta.controller.rpc.services.contract import service_handler
from streammeta.controller.trust.authenticator import Authenticator
from streammeta.rpc.contract import SERVICES
from streammeta.rpc.method_facts import (
    Access,
    AnswerList,
    AuditRule,
    MethodFacts,
    Recorded,
    RequestClass,
    RequestList,
    Retry,
    Work,
)
from streammeta.rpc.methods import METHODS, complete, facts_of
from streammeta.tls.identity import Role

CONTRACT = Path(__file__).resolve().parents[2] / "proto" / "streammeta" / "v1"
NEW = "example.v1.CopyService.CopyKeys"


def new_service() -> Any:
    """Return the descriptor of a service with one method that the table does not know."""
    file = descriptor_pb2.FileDescriptorProto(
        name="example/v1/copy.proto", package="example.v1", syntax="proto3"
    )
    request = file.message_type.add(name="CopyKeysRequest")
    request.field.add(name="keys", number=1, type=9, label=3)
    request.field.add(name="overwrite", number=2, type=8, label=1)
    answer = file.message_type.add(name="CopyKeysResponse")
    answer.field.add(name="versions", number=1, type=3, label=3)
    service = file.service.add(name="CopyService")
    service.method.add(
        name="CopyKeys",
        input_type=".example.v1.CopyKeysRequest",
        output_type=".example.v1.CopyKeysResponse",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindServiceByName("example.v1.CopyService")


def new_facts() -> dict[str, Any]:
    """Return all facts of the new method, by field of its row."""
    return {
        "access": Access(roles=frozenset((Role.ADMIN,))),
        "audit": AuditRule(Recorded.EACH, asked={"keys": "keys"}),
        "retry": Retry.SAFE,
        "leader_only": True,
        "work": Work(RequestClass.CHANGE, "keys"),
        "memory": facts_of("KVService.PutKVs").memory,
        "request_lists": (RequestList("keys"),),
        "answer_list": AnswerList("versions"),
    }


def test_a_new_method_with_all_facts_is_accepted() -> None:
    row = MethodFacts(**new_facts())
    grown = complete({**METHODS, NEW: row}, [*SERVICES.values(), new_service()])
    assert grown[NEW] is row


@pytest.mark.parametrize("forgotten", [field.name for field in fields(MethodFacts)])
def test_a_new_method_without_one_of_its_facts_fails(forgotten: str) -> None:
    facts = new_facts()
    del facts[forgotten]
    with pytest.raises(TypeError, match=forgotten):
        MethodFacts(**facts)


def test_no_fact_has_a_default() -> None:
    assert [
        field.name
        for field in fields(MethodFacts)
        if field.default is not MISSING or field.default_factory is not MISSING
    ] == []


def test_a_method_without_a_row_fails() -> None:
    with pytest.raises(ValueError, match=NEW):
        complete(METHODS, [*SERVICES.values(), new_service()])


def test_a_row_without_a_method_fails() -> None:
    with pytest.raises(ValueError, match=NEW):
        complete({**METHODS, NEW: MethodFacts(**new_facts())}, SERVICES.values())


def test_a_method_without_a_handler_fails_at_the_start() -> None:
    with pytest.raises(ValueError, match="CopyKeys"):
        service_handler(new_service(), CallPipeline(Authenticator("test")), {})


def test_a_service_may_leave_out_methods_that_are_named() -> None:
    entrance = CallPipeline(Authenticator("test"))
    handler: Any = service_handler(new_service(), entrance, {}, unserved=["CopyKeys"])
    assert handler.service_name() == "example.v1.CopyService"


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("access", Access(roles=frozenset((Role.BROKER,)), binds_brokers=True)),
        ("access", Access(roles=frozenset(), roles_of_fields={"absent": frozenset()})),
        ("audit", AuditRule(Recorded.EACH, asked={"keys": "absent"})),
        ("audit", AuditRule(Recorded.EACH, made={"keys": "versions.absent"})),
        ("audit", AuditRule(Recorded.SUMMED, when=(("absent",), AuditRule(Recorded.EACH)))),
        ("retry", Retry.REQUEST_ID),
        ("work", Work(RequestClass.READ, "absent")),
        ("work", Work(RequestClass.READ, walks_with="absent")),
        ("request_lists", (RequestList("overwrite"),)),
        ("answer_list", AnswerList("absent")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_row_that_names_an_unknown_field_fails(field: str, wrong: Any) -> None:
    row = replace(MethodFacts(**new_facts()), **{field: wrong})
    with pytest.raises(ValueError, match="is not a"):
        complete({NEW: row}, [new_service()])


_RETRY_COMMENTS = {
    Retry.READ: r"safe, a read\.",
    Retry.REQUEST_ID: r"safe with the same request_id,",
    Retry.OBJECT_ID: r"safe by object id|safe, each commit by its object id",
    Retry.CONDITIONAL: r"safe with to_node_id|safe without a condition",
    Retry.SAFE: r"safe, (?!a read\.|each commit by)",
}


def test_the_comments_of_the_contract_state_the_same_retry_safety() -> None:
    stated = {}
    for path in CONTRACT.glob("*.proto"):
        text = path.read_text()
        for comment, method in re.findall(r"((?:^  //.*\n)+)  rpc (\w+)", text, re.M):
            said = re.search(r"// Retry: (.*)", comment)
            assert said is not None, method
            stated[method] = [
                retry for retry, form in _RETRY_COMMENTS.items() if re.match(form, said[1])
            ]
    assert stated == {method.rpartition(".")[2]: [facts.retry] for method, facts in METHODS.items()}


def test_every_method_that_may_fill_an_answer_with_a_page_counts_its_unread_bytes() -> None:
    paged = {
        method.full_name
        for service in SERVICES.values()
        for method in service.methods
        if "page" in method.input_type.fields_by_name
    }
    assert {name for name in paged if METHODS[name].answer_list is None} == set()
