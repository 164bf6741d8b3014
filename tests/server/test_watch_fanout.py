"""Many watches of one feed: encoded once, served in bounded turns, each change once, in order."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.benchmarks.http2 import Http2Connection
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.controllers.methods import PUT_KVS
from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.metadata.tables.values import column
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.records.codec import decode_records, encode_records
from streammeta.controller.records.record import KVsPut, Record, StreamsTrimmed
from streammeta.controller.records.selection import Kind, Selection, select
from streammeta.controller.rpc.watch import messages as watch_messages
from streammeta.controller.rpc.watch import service as watch_module
from streammeta.controller.rpc.watch.service import WATCHERS_MAX, Fanout
from streammeta.controller.runtime.writer.change_feed import ChangeFeed, WatcherTooSlowError
from streammeta.v1 import kv_pb2, records_pb2
from streammeta.v1 import metadata_pb2 as pb
from tests.kit.real_cluster import describe, leader_of, running_cluster
from tests.kit.seeds import seeds
from tests.kit.waiting import until

EVERYTHING = Selection()
PATIENCE_S = 60.0


def kv(key: str, size: int = 1) -> KVsPut:
    return KVsPut(namespaces=("",), keys=(key,), values=(bytes(size),))


def trimmed(*stream_ids: int) -> StreamsTrimmed:
    return StreamsTrimmed(stream_id=column(stream_ids), start_offset=column(stream_ids))


def commit(feed: ChangeFeed, *records: Record) -> None:
    for record in records:
        at = feed.end_offset
        payload = encode_records([record])
        feed.extend([Batch(EndOffset(at), Epoch(1), BatchKind.DATA, (payload,))], at + 1)


class Watch:
    """A follower whose connection takes each message after `pace` turns of the event loop."""

    def __init__(
        self,
        fanout: Fanout,
        selection: Selection = EVERYTHING,
        *,
        from_offset: int = 0,
        combines: bool = False,
        pace: int = 0,
        on_message: Callable[[], None] = lambda: None,
    ) -> None:
        self._fanout = fanout
        self._selection = selection
        self._combines = combines
        self._pace = pace
        self._on_message = on_message
        self._cursor = fanout._changes.cursor(from_offset)
        self.messages: list[pb.WatchResponse] = []
        self.next_offset = from_offset
        self.task = asyncio.create_task(self._follow())

    @property
    def changes(self) -> list[int]:
        return [message.offset for message in self.messages if message.records]

    @property
    def keys(self) -> list[str]:
        """Keys put by all changes, in the order they came."""
        sets = [records_pb2.RecordSet.FromString(message.records) for message in self.messages]
        return [key for batch in sets for record in batch.records for key in record.kvs_put.keys]

    async def _follow(self) -> None:
        with self._fanout.following(
            self._selection, self._cursor, combines=self._combines, is_typed=False
        ) as follower:
            while (message := await follower.next()) is not None:
                self._on_message()
                await follower.send(self._take(message))

    async def _take(self, message: bytes) -> None:
        for _ in range(self._pace):
            await asyncio.sleep(0)
        self.messages.append(pb.WatchResponse.FromString(message))
        self.next_offset = self.messages[-1].offset + 1


async def leave(*watches: Watch) -> None:
    for watch in watches:
        watch.task.cancel()
    await asyncio.gather(*(watch.task for watch in watches), return_exceptions=True)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often a message with changes was encoded, by its offset."""
    counts: Counter[int] = Counter()

    def counting(response: pb.WatchResponse) -> bytes:
        if response.records:
            counts[response.offset] += 1
        return response.SerializeToString()

    monkeypatch.setattr(watch_messages, "encode_message", counting)
    return counts


async def test_a_change_is_encoded_once_for_all_that_follow_it(encoded: Counter[int]) -> None:
    feed = ChangeFeed()
    watches = [Watch(fanout := Fanout(feed), pace=0)]
    watches += [Watch(fanout, pace=number % 3) for number in range(199)]
    for number in range(5):
        commit(feed, kv(f"{number}"))
        await until(
            lambda: all(watch.next_offset == feed.end_offset for watch in watches), "the messages"
        )
    assert all(watch.changes == [0, 1, 2, 3, 4] for watch in watches)
    assert encoded == dict.fromkeys(range(5), 1)
    await leave(*watches)


async def test_an_entry_is_decoded_once_and_cut_once_for_each_selection(
    encoded: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts: Counter[Selection] = Counter()
    decoded: list[bytes] = []

    def counting_select(records: list[Record], selection: Selection) -> tuple[Record, ...] | None:
        cuts[selection] += 1
        return select(records, selection)

    def counting_decode(payload: bytes) -> list[Record]:
        decoded.append(payload)
        return list(decode_records(payload))

    monkeypatch.setattr(watch_messages, "select", counting_select)
    monkeypatch.setattr(watch_messages, "decode_records", counting_decode)

    feed = ChangeFeed()
    fanout = Fanout(feed)
    selections = [Selection(stream_ids=frozenset({number})) for number in range(20)]
    watches = [Watch(fanout, selection) for selection in selections for _ in range(10)]
    commit(feed, trimmed(3, 4, 99))
    await until(lambda: all(watch.changes for watch in watches[30:50]), "the messages")
    assert len(decoded) == 1
    assert encoded == {0: 2}, "of streams 3 and 4, each for its ten watches"
    assert cuts == {selections[3]: 1, selections[4]: 1}, "the index tells the other 18"
    assert not any(watch.changes for watch in watches[:30] + watches[50:])
    await leave(*watches)


class Turns:
    """Counts what happens in each turn of the event loop."""

    def __init__(self) -> None:
        self.number = 0
        self.events: Counter[int] = Counter()
        self._task = asyncio.create_task(self._count())

    def note(self) -> None:
        self.events[self.number] += 1

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.number += 1

    def stop(self) -> None:
        self._task.cancel()


async def test_a_turn_of_the_event_loop_serves_a_bounded_number_of_watches() -> None:
    feed, turns = ChangeFeed(), Turns()
    fanout = Fanout(feed)
    watches = [Watch(fanout, on_message=turns.note) for _ in range(1_000)]
    commit(feed, *(kv(f"{number}") for number in range(3)))
    await until(lambda: all(len(watch.changes) == 3 for watch in watches), "the messages")
    assert turns.events.total() >= 3_000
    assert max(turns.events.values()) <= 16
    turns.stop()
    await leave(*watches)


@pytest.mark.parametrize("seed", seeds(2, slow=1))
async def test_all_watches_get_each_change_once_and_in_order(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)

    feed = ChangeFeed()
    fanout = Fanout(feed)
    selections = [EVERYTHING, Selection(kinds=frozenset({Kind.KV}))]
    selections.append(Selection(kinds=frozenset({Kind.NODE})))
    watches: list[tuple[Watch, int]] = []
    keys: dict[int, str] = {}
    for number in range(200):
        for _ in range(rng.randrange(3)):
            keys[feed.end_offset] = f"{number}-{feed.end_offset}"
            commit(feed, kv(keys[feed.end_offset]))
        if rng.random() < 0.4:
            begin = rng.randrange(feed.end_offset + 3)
            watch = Watch(
                fanout,
                selections[rng.randrange(3)],
                from_offset=begin,
                combines=rng.random() < 0.5,
                pace=rng.randrange(20),
            )
            watches.append((watch, begin))
        if watches and rng.random() < 0.05:
            await leave(watches.pop(rng.randrange(len(watches)))[0])
        for _ in range(rng.randrange(8)):
            await asyncio.sleep(0)
    of_nodes = [watch for watch, _ in watches if watch._selection is selections[2]]
    of_all = [(watch, begin) for watch, begin in watches if watch not in of_nodes]
    wanted = {begin: [keys[at] for at in keys if at >= begin] for _, begin in of_all}
    await until(
        lambda: all(len(watch.keys) >= len(wanted[at]) for watch, at in of_all), "the messages"
    )
    for watch, begin in of_all:
        assert watch.keys == wanted[begin]
    assert not any(watch.changes for watch in of_nodes)
    await leave(*(watch for watch, _ in watches))
    assert not fanout.messages._groups
    assert fanout._sending_bytes == 0


async def test_a_watch_that_may_combine_catches_up_in_few_messages() -> None:
    feed = ChangeFeed()
    count = watch_messages.EXAMINED_MAX + 36
    commit(feed, *(kv(f"{number}") for number in range(count)))
    watch = Watch(Fanout(feed), combines=True)
    await until(lambda: watch.next_offset == count, "the messages")
    assert watch.keys == [f"{number}" for number in range(count)]
    assert watch.changes == [watch_messages.EXAMINED_MAX - 1, count - 1]
    await leave(watch)


async def test_a_watch_that_takes_nothing_makes_room_when_others_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages that are not taken hold bounded memory; the oldest of them is given up first."""
    monkeypatch.setattr(watch_module, "SENDING_BYTES_MAX", 1_000)
    monkeypatch.setattr(watch_module, "SENDING_S_MAX", 0.0)

    feed = ChangeFeed()
    fanout = Fanout(feed)
    stuck = Watch(fanout, pace=1 << 60)
    commit(feed, kv("large", size=2_000))
    await until(lambda: fanout._sending_bytes > 0, "the messages")
    other = Watch(fanout)
    await until(lambda: other.changes == [0], "the messages")
    with pytest.raises(WatcherTooSlowError) as raised:
        await stuck.task
    assert raised.value.from_offset == 1
    await leave(other)


async def test_a_watch_that_keeps_up_rests_between_messages_and_misses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_module, "REST_PER_WATCH_S", 0.1)
    feed = ChangeFeed()
    fanout = Fanout(feed)
    rested, prompt = Watch(fanout, combines=True), Watch(fanout)
    commit(feed, kv("first"))
    await until(lambda: len(rested.keys) == 1, "what comes after silence")
    for number in range(20):
        commit(feed, kv(f"{number}"))
        await asyncio.sleep(0.001)
    await until(lambda: len(prompt.changes) == 21, "one message a change")
    await until(lambda: rested.next_offset == feed.end_offset, "the changes", PATIENCE_S)
    assert rested.keys == prompt.keys == ["first", *map(str, range(20))]
    assert len(rested.changes) <= 3, "as many as times it rested, on any machine about one"
    await leave(rested, prompt)


async def test_a_watch_that_is_behind_does_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "REST_PER_WATCH_S", 0.5)
    feed = ChangeFeed()
    commit(feed, *(kv(f"{number}") for number in range(5 * watch_messages.EXAMINED_MAX)))
    watch = Watch(Fanout(feed), combines=True)
    await until(lambda: watch.next_offset == feed.end_offset, "all there was", PATIENCE_S)
    assert len(watch.changes) == 5
    commit(feed, kv("next"))
    await asyncio.sleep(0.01)
    assert len(watch.changes) == 5, "rests"
    await leave(watch)


CONNECTIONS = 20
PUTS = 300
WRITERS = 16
WATCHED_FOR_S = 90.0


class RawWatch:
    """The keys that one watch has seen put, in order."""

    def __init__(self, connection: Http2Connection) -> None:
        self.keys: list[str] = []
        self.has_begun = self.has_ended = False
        stream_id = connection.open("/streammeta.v1.MetadataService/Watch", self._take, self._end)
        request = pb.WatchRequest(kinds=[pb.ENTITY_KIND_KV], may_combine=True)
        connection.send(stream_id, request.SerializeToString(), is_last=True)

    def _take(self, message: bytes) -> None:
        self.has_begun = True
        records = records_pb2.RecordSet.FromString(pb.WatchResponse.FromString(message).records)
        for record in records.records:
            self.keys += record.kvs_put.keys

    def _end(self) -> None:
        self.has_ended = True


async def put_all(client: ControllerClient, numbers: "itertools.count[int]") -> None:
    while (number := next(numbers)) < PUTS:
        item = kv_pb2.KVToPut(key=f"k{number:05}", value=b"v", overwrite=True)
        answer = await client.call(PUT_KVS, kv_pb2.PutKVsRequest(items=[item]))
        assert answer.results[0].error == 0


@pytest.mark.process
def test_a_leader_that_all_watch_keeps_its_office(tmp_path: Path) -> None:
    """With the product's own timeouts."""
    with running_cluster(tmp_path, options=()) as cluster:
        leader = leader_of(cluster)
        before = describe(cluster, leader)

        async def scenario() -> None:
            endpoint = cluster.endpoints[leader - 1]
            connections = [await Http2Connection.connect(endpoint) for _ in range(CONNECTIONS)]
            watches = [RawWatch(connections[at % CONNECTIONS]) for at in range(WATCHERS_MAX)]
            await until(lambda: all(watch.has_begun for watch in watches), "watches", WATCHED_FOR_S)
            async with ControllerClient(cluster.endpoints, deadline_s=WATCHED_FOR_S) as client:
                numbers = itertools.count()
                await asyncio.gather(*(put_all(client, numbers) for _ in range(WRITERS)))
            await until(
                lambda: all(len(watch.keys) >= PUTS for watch in watches), "changes", WATCHED_FOR_S
            )
            assert not any(watch.has_ended for watch in watches)
            order = watches[0].keys
            assert sorted(order) == [f"k{number:05}" for number in range(PUTS)]
            assert all(watch.keys == order for watch in watches)
            for connection in connections:
                connection.close()

        asyncio.run(scenario())
        after = describe(cluster, leader)
        assert (after.leader_id, after.epoch) == (before.leader_id, before.epoch)
