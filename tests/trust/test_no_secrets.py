"""One marker in every text of every request: it is in no log, and in the audit log as a name alone.

Values of keys and tags and addresses of write-ahead logs are in no error either; an error may tell
its caller what else was wrong with a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from streammeta.controller.trust.audit.auditor import Auditor, LeadershipState
from streammeta.rpc import methods
from streammeta.rpc.method_facts import Recorded
from streammeta.v1 import common_pb2, nodes_pb2
from tests.attack.direct_calls import METHODS, Controller, DirectContext
from tests.kit.waiting import ManualClock
from tests.trust.test_audit_calls import MemoryWriter
from tests.trust.test_rules import CALLERS
from tests.trust.trusted_server import CLUSTER, PLAIN_TEXT, shown

MARKER = "m4rk3r-of-this-test"
SECRETS = {
    "streammeta.v1.KVToPut.value",
    "streammeta.v1.RegisterNodeRequest.wal_config",
    "streammeta.v1.Tag.value",
}
NUMBERS = {"node_id": 1000, "node_epoch": 1, "ttl_ms": 60_000, "page_size": 10, "hold_ms": 1_000}
TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def texts_in(
    descriptor: Descriptor, above: tuple[FieldDescriptor, ...] = ()
) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Yield the way to every text in a message, however deep."""
    for found in descriptor.fields:
        if found.type in TEXTS:
            yield (*above, found)
        elif found.message_type is not None:
            yield from texts_in(found.message_type, (*above, found))


def filled(descriptor: Descriptor, way: tuple[FieldDescriptor, ...]) -> Message:
    """Return a message with something in every field, and the marker at the end of the way."""
    message = GetMessageClass(descriptor)()
    for found in descriptor.fields:
        is_marked = bool(way) and found.number == way[0].number
        if found.message_type is not None:
            part = filled(found.message_type, way[1:] if is_marked else ())
            if found.is_repeated:
                getattr(message, found.name).append(part)
            else:
                getattr(message, found.name).CopyFrom(part)
        elif found.is_repeated:
            getattr(message, found.name).append(value_of(found, is_marked=is_marked))
        else:
            setattr(message, found.name, value_of(found, is_marked=is_marked))
    return message


def value_of(found: FieldDescriptor, *, is_marked: bool) -> Any:
    text = MARKER if is_marked else CLUSTER if found.name == "cluster_id" else "x"
    if found.type == FieldDescriptor.TYPE_STRING:
        return text
    if found.type == FieldDescriptor.TYPE_BYTES:
        return text.encode()
    if found.type == FieldDescriptor.TYPE_BOOL:
        return False
    return NUMBERS.get(found.name, 1)


WAYS = [(method, way) for method in METHODS for way in texts_in(method.input_type)]


def is_name(method: MethodDescriptor, way: tuple[FieldDescriptor, ...]) -> bool:
    """Whether the rule of a method names a text, or it is the id of the request."""
    path = ".".join(field.name for field in way)
    rule = methods.METHODS[method.full_name].audit
    if rule.when is not None:
        _, rule = rule.when  # every field is filled, those that it depends on too
    named = {
        ".".join((*asked.split(".")[:-1], name))
        for asked in rule.asked.values()
        for name in asked.split(".")[-1].split("/")
    }
    return path in named or (path == "request_id" and rule.recorded is not Recorded.SUMMED)


async def said_of(
    method: MethodDescriptor, data: bytes, caught: list[Any], *, by: Any
) -> tuple[str, str, str]:
    """Make a call; return what the error, the audit log and the log say of it."""
    writer = MemoryWriter()
    writer.durable.set()
    auditor = Auditor(writer, ManualClock(), lambda: LeadershipState(3, 7, leads=True))
    controller = Controller(auditor)
    register = next(method for method in METHODS if method.name == "RegisterNode")
    node = nodes_pb2.RegisterNodeRequest(node=common_pb2.NodeIdentity(node_id=1000, node_epoch=1))
    await controller.call(register, node.SerializeToString(), DirectContext(PLAIN_TEXT))
    context = DirectContext(by, metadata=(("authorization", MARKER), ("user-agent", MARKER)))
    await controller.call(method, data, context)
    auditor.end_minute()
    audited = json.dumps([line.members() for line in writer.lines])
    return f"{context.message} {context.trailing!r}", audited, repr(caught)


@pytest.mark.parametrize(
    ("method", "way"),
    WAYS,
    ids=[f"{method.name}-{'.'.join(field.name for field in way)}" for method, way in WAYS],
)
async def test_a_text_of_a_request_goes_nowhere_it_should_not(
    method: MethodDescriptor, way: tuple[FieldDescriptor, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    data = filled(method.input_type, way).SerializeToString()
    assert MARKER.encode() in data
    calls = [(data, caller) for caller in (PLAIN_TEXT, shown(CALLERS["b"]), shown(CALLERS["m"]))]
    calls += [(data[:-1], PLAIN_TEXT), (data + b"\xff", PLAIN_TEXT)]
    for payload, caller in calls:
        with structlog.testing.capture_logs() as caught:
            error, audited, logged = await said_of(method, payload, caught, by=caller)
        assert MARKER not in logged
        if way[-1].full_name in SECRETS:
            assert MARKER not in error
        if not is_name(method, way):
            assert MARKER not in audited
        elif caller is PLAIN_TEXT and payload == data:
            assert MARKER in audited, "the test no longer reaches the audit log"
    assert MARKER not in "".join(capfd.readouterr())


def test_the_ways_lead_to_every_secret() -> None:
    assert {way[-1].full_name for _, way in WAYS} >= SECRETS
