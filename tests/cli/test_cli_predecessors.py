"""Commands wait until no controller of the cluster before can acknowledge changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from streammeta.cli.framework.client import CallError, ControllerClient
from streammeta.cli.framework.output import CommandError
from streammeta.cli.recovery import adoption_command, predecessors
from streammeta.storage.cluster_files.bucket_marker import (
    FENCE_WAIT_MS,
    BucketMarker,
    Fenced,
    Generation,
    create_generation,
    create_marker,
    put_fenced,
    read_ownership,
)
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.real_cluster import streammeta

NAMESPACE = "_streammeta_test"


class Waiting:
    """A clock that sleeping moves; `after(s)` is called when it has gone on for so long."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return 0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.events and self.now >= self.events[0][0]:
            self.events.pop(0)[1]()


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    found = Waiting()
    monkeypatch.setattr(predecessors, "time", found)
    return found


@pytest.fixture
def store() -> MemoryObjectStore:
    made = MemoryObjectStore()
    create_marker(
        made, BucketMarker(cluster_id="t", cluster_uuid="u", namespace=NAMESPACE, created_ms=1)
    )
    return made


def begin_generation(store: MemoryObjectStore, number: int) -> Generation:
    generation = Generation(
        cluster_id="after",
        cluster_uuid=f"u-{number}",
        namespace=NAMESPACE,
        number=number,
        undecided_from=0,
        undecided_below=1,
        created_ms=1,
    )
    create_generation(store, generation)
    return generation


def wait_for(store: MemoryObjectStore, *, is_declared: bool, number: int = 2) -> None:
    predecessors.wait_for_fence(
        store, NAMESPACE, cluster_uuid=f"u-{number}", is_declared=is_declared
    )


def test_a_cluster_never_restored_does_not_wait(store: MemoryObjectStore, waiting: Waiting) -> None:
    wait_for(store, is_declared=False)
    assert waiting.now == 0


def test_the_lease_is_waited_out_and_marked(store: MemoryObjectStore, waiting: Waiting) -> None:
    begin_generation(store, 2)
    wait_for(store, is_declared=False)
    assert waiting.now == FENCE_WAIT_MS / 1000
    assert read_ownership(store, NAMESPACE).unfenced is None
    wait_for(store, is_declared=False)
    assert waiting.now == FENCE_WAIT_MS / 1000, "a repeat finds the mark"


def test_nothing_is_marked_before_the_wait_ends(store: MemoryObjectStore, waiting: Waiting) -> None:
    generation = begin_generation(store, 2)
    seen: list[Generation | None] = []
    waiting.events.append(
        (FENCE_WAIT_MS / 1000 - 1, lambda: seen.append(read_ownership(store, NAMESPACE).unfenced))
    )
    wait_for(store, is_declared=False)
    assert seen == [generation]


def test_a_controller_that_waited_ends_it(store: MemoryObjectStore, waiting: Waiting) -> None:
    begin_generation(store, 2)
    mark = Fenced(cluster_uuid="u-2", number=2, is_declared=False, created_ms=1)
    waiting.events.append((5, lambda: put_fenced(store, NAMESPACE, mark)))
    wait_for(store, is_declared=False)
    assert waiting.now < 7


@pytest.mark.parametrize("is_declared", [False, True])
def test_only_the_own_mark_is_set(
    store: MemoryObjectStore, waiting: Waiting, is_declared: bool
) -> None:
    """A command that is repeated late says nothing about controllers it does not know."""
    begin_generation(store, 2)
    newer = begin_generation(store, 3)
    with pytest.raises(CommandError, match="bucket"):
        wait_for(store, is_declared=is_declared)
    assert read_ownership(store, NAMESPACE).unfenced == newer


def test_an_operator_may_declare_them_stopped(store: MemoryObjectStore, waiting: Waiting) -> None:
    begin_generation(store, 2)
    wait_for(store, is_declared=True)
    assert waiting.now == 0
    assert read_ownership(store, NAMESPACE).unfenced is None


class Leader:
    """A leader that answers each call with the next of its answers."""

    def __init__(self, *codes: str) -> None:
        self.codes = list(codes)

    def call(self, *_: Any) -> str:
        if self.codes:
            raise CallError(self.codes.pop(0), "no", "")
        return "done"


def client_of(leader: Leader) -> ControllerClient:
    return cast(ControllerClient, leader)


def test_a_call_is_repeated_until_the_leader_has_seen_the_fence(waiting: Waiting) -> None:
    call: Any = SimpleNamespace()
    leader = Leader("FENCE_PENDING", "FENCE_PENDING")
    assert predecessors.call_when_fenced(client_of(leader), call, call) == "done"
    with pytest.raises(CallError, match="no"):
        predecessors.call_when_fenced(client_of(Leader("RECOVERING")), call, call)
    with pytest.raises(CallError):
        predecessors.call_when_fenced(client_of(Leader(*["FENCE_PENDING"] * 1_000)), call, call)


@pytest.mark.parametrize("words", [("adopt", "--yes"), ("finish",)])
def test_reading_follows_the_wait(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the old cluster acknowledges until the end of its lease is in the bucket then."""
    order: list[str] = []

    def noting(name: str, result: Any = None) -> Callable[..., Any]:
        def note(*_: Any, **__: Any) -> Any:
            order.append(name)
            return result

        return note

    cluster = SimpleNamespace(object_namespace=NAMESPACE, cluster_uuid="u-2", cluster_id="after")
    monkeypatch.setattr(adoption_command, "describe_restored", lambda _: cluster)
    monkeypatch.setattr(adoption_command, "open_store", lambda _: nullcontext())
    monkeypatch.setattr(adoption_command, "require_own", noting("ownership"))
    monkeypatch.setattr(predecessors, "wait_for_fence", noting("wait"))
    monkeypatch.setattr(adoption_command, "_survey", noting("survey"))
    answer = SimpleNamespace(was_recovering=False)
    monkeypatch.setattr(predecessors, "call_when_fenced", noting("call", answer))
    streammeta("restore", *words, "--connect", "127.0.0.1:1", "--store", "file:///nowhere")
    assert order[:3] == ["ownership", "wait", "survey"]
