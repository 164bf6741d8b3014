"""Random requests for every RPC by certificates of every role: none does what its role may not.

`STREAMMETA_FUZZ_CALLS=1000000` makes as many calls a seed, `STREAMMETA_FUZZ_SEEDS=100:200` takes
other seeds; a failure names its seed and call.
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from streammeta.tls.identity import Principal, Role
from streammeta.v1 import common_pb2, metadata_pb2, nodes_pb2, objects_pb2, streams_pb2
from tests.attack.direct_calls import METHODS, Controller, DirectContext
from tests.kit.seeds import seeds
from tests.server.fuzz_messages import RandomMessages
from tests.trust.test_rules import CALLERS, HELD_TO_A_NODE, WHO_MAY
from tests.trust.trusted_server import CLUSTER, PLAIN_TEXT, ShownContext, shown

_CALLS = int(os.environ.get("STREAMMETA_FUZZ_CALLS", "15000"))
_DEFECTS = {"INTERNAL", "UNKNOWN", "DATA_LOSS", "UNAVAILABLE", "ABORTED"}
_DENIED = {"PERMISSION_DENIED", "UNAUTHENTICATED"}
_HOLDERS = {"x", "k", "a"}
"""May hold deletions."""
OWN_NODE = 1_000
"""The broker's."""
NODES = (7, OWN_NODE, 1_001)
"""Those of `RandomMessages`."""
KNOWN = {**CALLERS, "b": Principal(CLUSTER, Role.BROKER, str(OWN_NODE))}
_STRANGERS = {
    "another cluster's admin": shown(Principal("other", Role.ADMIN, "eve")),
    "two identities": shown(CALLERS["a"], CALLERS["b"]),
    "no identity": shown("spiffe://elsewhere/x"),
}
_CONTEXTS: dict[str, ShownContext] = {
    **{letter: shown(principal) for letter, principal in KNOWN.items()},
    **_STRANGERS,
}


def nodes_in(message: Message) -> Iterator[common_pb2.NodeIdentity]:
    """Yield every node identity of a request, however deep."""
    for found, value in message.ListFields():
        if found.message_type is None:
            continue
        for item in value if found.is_repeated else (value,):
            if isinstance(item, common_pb2.NodeIdentity):
                yield item
            else:
                yield from nodes_in(item)


def parsed(method: MethodDescriptor, payload: bytes) -> Message | None:
    try:
        return GetMessageClass(method.input_type).FromString(payload)
    except DecodeError:
        return None


def may_change(letter: str, method: MethodDescriptor, payload: bytes) -> bool:
    """Whether the caller may change anything by this request, by rules written for this test."""
    if letter not in WHO_MAY[method.name]:
        return False
    request = parsed(method, payload)
    if request is None:
        return False
    if letter == "b" and method.name in HELD_TO_A_NODE:
        return all(node.node_id == OWN_NODE for node in nodes_in(request))
    if isinstance(request, metadata_pb2.GetSnapshotRequest):
        return letter in _HOLDERS
    return True


class Fuzz:
    """Draws calls of one seed, and judges what became of them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.messages = RandomMessages(self.rng, (CLUSTER, "other"))
        self.changed: Counter[str] = Counter()
        self.denied: Counter[str] = Counter()

    def draw(self) -> tuple[str, MethodDescriptor, bytes]:
        """Return a caller, a method and the bytes of a request."""
        letter = self.rng.choice(list(_CONTEXTS))
        method = self.rng.choice(METHODS)
        payload = self.messages.make(method.input_type).SerializeToString()
        if self.rng.random() < 0.1:
            payload = self.messages.spoil(payload)
        return letter, method, payload

    def judge(
        self, letter: str, method: MethodDescriptor, payload: bytes, code: str, *, changed: bool
    ) -> None:
        """Require what holds of every call."""
        where = f"seed {self.seed}: {letter} calls {method.full_name} with {payload.hex()[:2_000]}"
        assert code not in _DEFECTS, f"{where}: {code}"
        may = letter not in _STRANGERS and letter in WHO_MAY[method.name]
        assert may or code in _DENIED, f"{where}: {code}"
        if changed:
            assert letter not in _STRANGERS, where
            assert may_change(letter, method, payload), f"{where}: the map changed"
        self.changed[f"{letter} {method.name}"] += changed
        self.denied[letter] += code in _DENIED


def first_requests(node_id: int) -> Sequence[tuple[str, Message]]:
    """Return requests that make a node, streams and objects for later calls to name."""
    node = common_pb2.NodeIdentity(node_id=node_id, node_epoch=1)
    return (
        ("RegisterNode", nodes_pb2.RegisterNodeRequest(node=node)),
        (
            "CreateStreams",
            streams_pb2.CreateStreamsRequest(
                request_id="first", node=node, streams=[streams_pb2.NewStream()] * 8
            ),
        ),
        (
            "PrepareObjects",
            objects_pb2.PrepareObjectsRequest(
                request_id="first", node=node, count=8, ttl_ms=3_600_000
            ),
        ),
    )


async def prepare(controller: Controller) -> None:
    """Make nodes, streams and objects for later calls to name."""
    by_name = {method.name: method for method in METHODS}
    for name, request in itertools.chain.from_iterable(map(first_requests, NODES)):
        data = request.SerializeToString()
        context = DirectContext(PLAIN_TEXT)
        assert await controller.call(by_name[name], data, context) is not None, context.message


@pytest.mark.timeout(120 + _CALLS // 500)
@pytest.mark.parametrize("seed", seeds(1, variable="STREAMMETA_FUZZ_SEEDS"))
async def test_no_caller_does_what_its_role_may_not(seed: int) -> None:
    controller, fuzz = Controller(), Fuzz(seed)
    await prepare(controller)
    epoch = controller.log.epoch
    for _ in range(_CALLS):
        letter, method, payload = fuzz.draw()
        before, reached = controller.log.next_offset, len(controller.reached)
        context = DirectContext(_CONTEXTS[letter])
        await controller.call(method, payload, context)
        changed = controller.log.next_offset > before or len(controller.reached) > reached
        fuzz.judge(letter, method, payload, context.code, changed=changed)
    assert controller.map.is_active
    assert controller.log.epoch == epoch
    _require_variety(fuzz, _CALLS)


def _require_variety(fuzz: Fuzz, calls: int) -> None:
    """Fail if the fuzz is too tame to show anything."""
    assert len(fuzz.denied) >= len(_CONTEXTS) - 1
    changes = {key for key, count in fuzz.changed.items() if count}
    assert len(changes) > 12 or calls < 5_000, sorted(changes)
    assert any(key.startswith("b ") for key in changes)
