"""Scans wait for each other alone; queues are bounded; deadlines are kept; turns have a budget."""

import asyncio
import contextlib
import random

import pytest

from streammeta.controller.errors import LimitExceededError
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.object_listings import (
    ListStreamObjects,
    ListStreamSetObjects,
)
from streammeta.controller.metadata.api.object_slices import ObjectQuery
from streammeta.controller.metadata.tables.values import NodeIdentity, PageRequest
from streammeta.controller.runtime.load.admission import (
    OPENED_PER_TURN,
    Admission,
    ClassLimits,
    Gate,
    Ticket,
    TurnBudget,
    class_of,
)
from streammeta.rpc.method_facts import RequestClass
from streammeta.rpc.methods import facts_of
from tests.kit.waiting import ManualClock

SMALL = dict.fromkeys(RequestClass, ClassLimits(running=2, waiting=3))


def test_so_many_run_so_many_wait_and_the_rest_is_refused() -> None:
    admission = Admission(SMALL)
    tickets = [admission.ask(RequestClass.SCAN, None, 0) for _ in range(5)]
    assert [ticket.is_running for ticket in tickets] == [True, True, False, False, False]

    with pytest.raises(LimitExceededError, match="SCAN"):
        admission.ask(RequestClass.SCAN, None, 0)

    assert admission.ask(RequestClass.COMMIT, None, 0).is_running
    assert admission.next(0) is None


def test_who_waits_runs_in_the_order_of_classes_then_of_arrival() -> None:
    admission = Admission(SMALL)
    kinds = (RequestClass.SCAN, RequestClass.COMMIT)
    running = [admission.ask(kind, None, 0) for kind in kinds for _ in range(2)]
    scans = [admission.ask(RequestClass.SCAN, None, 0) for _ in range(2)]
    commits = [admission.ask(RequestClass.COMMIT, None, 0) for _ in range(2)]
    for ticket in running:
        admission.leave(ticket)

    assert [admission.next(0) for _ in range(5)] == [*commits, *scans, None]


def test_a_newer_call_does_not_pass_one_that_waits() -> None:
    """A place that comes free belongs to the first that waits, though nobody has called it yet."""
    admission = Admission(SMALL)
    running = [admission.ask(RequestClass.COMMIT, None, 0) for _ in range(2)]
    first = admission.ask(RequestClass.COMMIT, 100, 0)
    for ticket in running:
        admission.leave(ticket)
    newer = admission.ask(RequestClass.COMMIT, None, 0)
    assert not newer.is_running
    assert admission.next(0) is first
    assert first.is_running


def test_refused_calls_are_counted_by_class() -> None:
    admission = Admission(SMALL)
    for _ in range(7):
        with contextlib.suppress(LimitExceededError):
            admission.ask(RequestClass.SCAN, None, 0)
    assert admission.refused(RequestClass.SCAN) == 2
    assert admission.refused(RequestClass.COMMIT) == 0


def test_a_call_leaves_once() -> None:
    admission = Admission(SMALL)
    tickets = [admission.ask(RequestClass.SCAN, None, 0) for _ in range(2)]
    for _ in range(2):
        admission.leave(tickets[0])
    assert admission.running(RequestClass.SCAN) == 1


def test_a_late_call_is_never_run() -> None:
    admission = Admission(SMALL)
    for _ in range(2):
        first = admission.ask(RequestClass.SCAN, None, 0)
    late = admission.ask(RequestClass.SCAN, 100, 0)
    patient = admission.ask(RequestClass.SCAN, 101, 0)
    admission.leave(first)

    assert admission.next(100) is late
    assert not late.is_running
    assert admission.next(100) is patient
    assert patient.is_running
    with pytest.raises(TimeoutError):
        admission.ask(RequestClass.SCAN, 100, 100)


def test_counts_hold_whatever_happens() -> None:
    """Invariant: what runs is within the limit, and everything that came has left at the end."""
    seed = 20_260_401
    rng = random.Random(seed)
    admission, now = Admission(SMALL), 0
    waiting: set[Ticket] = set()
    running: set[Ticket] = set()
    for _ in range(5_000):
        now += rng.randrange(3)
        kind = rng.choice(list(RequestClass))
        deadline = None if rng.random() < 0.5 else now + 1 + rng.randrange(20)
        try:
            ticket = admission.ask(kind, deadline, now)
            (running if ticket.is_running else waiting).add(ticket)
        except LimitExceededError:
            assert admission.waiting(kind) == SMALL[kind].waiting, f"seed {seed}"
        for group in (running, waiting):
            if group and rng.random() < 0.4:
                gone = rng.choice(sorted(group, key=id))
                group.discard(gone)
                admission.leave(gone)
        while (turn := admission.next(now)) is not None:
            waiting.remove(turn)
            if turn.is_running:
                running.add(turn)
        for one in RequestClass:
            mine = [ticket for ticket in running if ticket.kind is one]
            assert admission.running(one) == len(mine) <= SMALL[one].running, f"seed {seed}"
            assert admission.waiting(one) == sum(t.kind is one for t in waiting), f"seed {seed}"
    for ticket in running | waiting:
        admission.leave(ticket)
    assert not any(admission.running(kind) + admission.waiting(kind) for kind in RequestClass)


def class_by_row(method: str, request: object) -> RequestClass:
    work = facts_of(method).work
    assert work is not None
    return class_of(work, request)


READS = {
    requests.GetObjects: "ObjectService.GetObjects",
    requests.GetKVs: "KVService.GetKVs",
    requests.CheckObjects: "ObjectService.CheckObjects",
    requests.GetNodes: "NodeService.GetNodes",
    requests.DescribeStreams: "StreamService.DescribeStreams",
    requests.FindStreams: "StreamService.FindStreams",
    requests.DescribeObjects: "ObjectService.DescribeObjects",
    requests.DescribeNamedObjects: "ObjectService.DescribeNamedObjects",
    ListStreamSetObjects: "NodeService.ListStreamSetObjects",
    ListStreamObjects: "ObjectService.ListStreamObjects",
    requests.ListKVs: "KVService.ListKVs",
}


def class_of_read(request: requests.ReadRequest) -> RequestClass:
    return class_by_row(READS[type(request)], request)


def test_classes_of_requests() -> None:
    node = NodeIdentity(1, 1)
    commit = requests.CommitStreamObject(
        node=node, object_id=1, object_size=1, stream_id=1, stream_epoch=1
    )
    assert class_by_row("ObjectService.CommitStreamObject", commit) is RequestClass.COMMIT
    registration = requests.RegisterNode(node=node)
    assert class_by_row("NodeService.RegisterNode", registration) is RequestClass.CHANGE
    query = ObjectQuery(1, 0, -1)
    assert class_of_read(requests.GetObjects(queries=(query,))) is RequestClass.READ
    assert class_of_read(requests.DescribeStreams()) is RequestClass.SCAN
    for count, kind in ((500, RequestClass.READ), (501, RequestClass.SCAN)):
        key = requests.KVKey(namespace="", key="k")
        assert class_of_read(requests.GetKVs(keys=(key,) * count)) is kind
        assert class_of_read(requests.GetObjects(queries=(query,) * count)) is kind
        assert class_of_read(requests.CheckObjects(object_ids=(1,) * count)) is kind
    assert class_of_read(requests.GetNodes()) is RequestClass.READ
    nodes = requests.GetNodes(include_stream_set_objects=True)
    assert class_of_read(nodes) is RequestClass.SCAN


def described(ids: tuple[int, ...], page: PageRequest) -> list[requests.ReadRequest]:
    """Return requests that describe items: those named, or a page of all."""
    names = tuple(map(str, ids))
    named: list[requests.ReadRequest] = [
        requests.DescribeObjects(object_ids=ids, page=page),
        requests.DescribeNamedObjects(names=names, page=page),
    ]
    if ids:
        return [*named, requests.DescribeStreams(stream_ids=ids)]
    return [
        *named,
        ListStreamSetObjects(node_id=1, page=page),
        requests.ListKVs(page=page),
    ]


def test_descriptions_are_classed_by_how_many_are_asked_for() -> None:
    whole = PageRequest()
    for ids, page, kind in (
        ((1,), whole, RequestClass.READ),
        (tuple(range(62)), whole, RequestClass.READ),
        (tuple(range(63)), PageRequest(1), RequestClass.SCAN),
        ((), PageRequest(62), RequestClass.READ),
        ((), PageRequest(63), RequestClass.SCAN),
        ((), whole, RequestClass.SCAN),
    ):
        for request in described(ids, page):
            assert class_of_read(request) is kind, request


def test_descriptions_with_lists_weigh_more_and_walks_are_scans() -> None:
    for ranges, objects in ((True, False), (False, True)):
        few = requests.DescribeStreams(
            stream_ids=tuple(range(8)), include_ranges=ranges, include_stream_objects=objects
        )
        assert class_of_read(few) is RequestClass.READ
        many = requests.DescribeStreams(
            stream_ids=tuple(range(9)), include_ranges=ranges, include_stream_objects=objects
        )
        assert class_of_read(many) is RequestClass.SCAN
    for ranges, kind in ((False, RequestClass.READ), (True, RequestClass.SCAN)):
        listed = ListStreamSetObjects(node_id=1, page=PageRequest(9), include_ranges=ranges)
        assert class_of_read(listed) is kind
    for size, kind in ((500, RequestClass.READ), (501, RequestClass.SCAN)):
        listed_of_stream = ListStreamObjects(stream_id=1, page=PageRequest(size))
        assert class_of_read(listed_of_stream) is kind
    one = requests.DescribeStreams(owner_node_id=1, page=PageRequest(1))
    assert class_of_read(one) is RequestClass.SCAN
    found = requests.FindStreams(tags=(("k", "v"),), page=PageRequest(1))
    assert class_of_read(found) is RequestClass.SCAN
    opening = requests.GetOpeningStreams(node=NodeIdentity(1, 1), page=PageRequest(1))
    assert class_by_row("StreamService.GetOpeningStreams", opening) is RequestClass.SCAN


async def test_what_arrives_meanwhile_goes_before_the_next_scan() -> None:
    gate = Gate(ManualClock(), Admission({**SMALL, RequestClass.SCAN: ClassLimits(1, 10)}))
    done: list[str] = []
    began = asyncio.Event()

    async def call(kind: RequestClass, name: str) -> None:
        async with gate.admitted(kind):
            done.append(name)
            began.set()

    scans = [asyncio.create_task(call(RequestClass.SCAN, f"scan {i}")) for i in range(3)]
    await began.wait()
    commit = asyncio.create_task(call(RequestClass.COMMIT, "commit"))
    await asyncio.gather(*scans, commit)
    assert done == ["scan 0", "commit", "scan 1", "scan 2"]


async def test_a_waiting_scan_is_dropped_at_its_deadline() -> None:
    clock = ManualClock()
    gate = Gate(clock, Admission({**SMALL, RequestClass.SCAN: ClassLimits(1, 10)}))
    ends = asyncio.Event()

    async def call(remaining_s: float | None) -> None:
        async with gate.admitted(RequestClass.SCAN, remaining_s):
            await ends.wait()

    first = asyncio.create_task(call(None))
    await asyncio.sleep(0)
    late, patient = asyncio.create_task(call(0.01)), asyncio.create_task(call(60.0))
    with pytest.raises(TimeoutError, match="wait"):
        await late
    assert not patient.done()
    ends.set()
    await asyncio.gather(first, patient)


async def test_a_cancelled_call_leaves_its_place_to_the_next() -> None:
    gate = Gate(ManualClock(), Admission({**SMALL, RequestClass.SCAN: ClassLimits(1, 10)}))
    began, ends = asyncio.Event(), asyncio.Event()
    came: list[int] = []

    async def call(number: int) -> None:
        async with gate.admitted(RequestClass.SCAN):
            came.append(number)
            began.set()
            await ends.wait()

    calls = [asyncio.create_task(call(number)) for number in range(3)]
    await began.wait()
    calls[1].cancel()
    ends.set()
    await asyncio.gather(*calls, return_exceptions=True)
    assert came == [0, 2]


async def test_a_call_that_gave_up_waiting_takes_no_place() -> None:
    gate = Gate(ManualClock(), Admission({**SMALL, RequestClass.SCAN: ClassLimits(1, 1)}))
    ends = asyncio.Event()

    async def call(remaining_s: float | None) -> None:
        async with gate.admitted(RequestClass.SCAN, remaining_s):
            await ends.wait()

    first = asyncio.create_task(call(None))
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError, match="wait"):
        await call(0.01)
    assert gate.admission.waiting(RequestClass.SCAN) == 0
    patient = asyncio.create_task(call(60.0))
    ends.set()
    await asyncio.gather(first, patient)
    assert gate.admission.running(RequestClass.SCAN) == 0


async def test_all_that_wait_are_admitted_however_many() -> None:
    limits = ClassLimits(running=3 * OPENED_PER_TURN, waiting=3 * OPENED_PER_TURN)
    gate = Gate(ManualClock(), Admission({**SMALL, RequestClass.READ: limits}))
    ends, came = asyncio.Event(), 0

    async def call() -> None:
        nonlocal came
        async with gate.admitted(RequestClass.READ):
            came += 1
            await ends.wait()

    calls = [asyncio.create_task(call()) for _ in range(6 * OPENED_PER_TURN)]
    await asyncio.sleep(0)
    assert came == 3 * OPENED_PER_TURN
    ends.set()
    await asyncio.gather(*calls)
    assert came == 6 * OPENED_PER_TURN


async def take_all(costs: list[int], per_turn: int) -> list[list[int]]:
    """Return the costs of tasks that all ask at once, by the turn in which they go on."""
    budget, turns = TurnBudget(per_turn), [list[int]()]

    async def work(cost: int) -> None:
        await budget.take(cost)
        turns[-1].append(cost)

    tasks = [asyncio.create_task(work(cost)) for cost in costs]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turns.append([])
    return [turn for turn in turns if turn]


@pytest.mark.parametrize(
    ("costs", "turns"),
    [
        ([3, 3, 3, 3, 3, 3, 3], [[3, 3, 3, 3], [3, 3, 3]]),
        ([1], [[1]]),
        ([10, 1, 1], [[10], [1, 1]]),
    ],
)
def test_a_turn_takes_work_until_its_budget_is_used(
    costs: list[int], turns: list[list[int]]
) -> None:
    assert asyncio.run(take_all(costs, per_turn=10)) == turns


async def test_work_larger_than_a_turn_is_paid_for_by_the_next_ones() -> None:
    budget = TurnBudget(10)
    await budget.take(35)
    later = asyncio.create_task(budget.take(1))
    for _ in range(3):
        await asyncio.sleep(0)
        assert not later.done()
    await later


async def test_a_task_that_gives_up_costs_nothing() -> None:
    budget = TurnBudget(10)
    await budget.take(10)
    gone, stays = (asyncio.create_task(budget.take(100)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await stays
