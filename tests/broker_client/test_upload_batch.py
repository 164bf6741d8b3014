"""The split rule: big streams get objects of their own, the rest shares one, in stream order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker_client.upload_batch import StreamRun, WriterStream, plan_objects
from storage.object_format.object_reader import ObjectReader
from storage.object_format.record import RecordBatch

SPLIT = 100


def run_of(stream_id: int, sizes: list[int]) -> StreamRun:
    run = StreamRun(WriterStream(stream_id, 3, len(sizes), 0))
    run.records = [RecordBatch(stream_id, 3, i, 1, bytes(size)) for i, size in enumerate(sizes)]
    run.payload_bytes = sum(sizes)
    return run


def test_a_single_stream_is_a_stream_object_however_small() -> None:
    (plan,) = plan_objects([run_of(7, [1])], SPLIT)
    assert not plan.shared


def test_a_stream_of_exactly_the_split_size_stands_alone() -> None:
    runs = [run_of(1, [99]), run_of(2, [50, 50]), run_of(3, [1])]
    plans = plan_objects(runs, SPLIT)
    assert [(plan.shared, [run.stream.stream_id for run in plan.runs]) for plan in plans] == [
        (True, [1, 3]),
        (False, [2]),
    ]


@given(
    st.dictionaries(
        st.integers(0, 50), st.lists(st.integers(0, 120), min_size=1, max_size=4), min_size=1
    )
)
def test_every_record_is_in_exactly_one_object(streams: dict[int, list[int]]) -> None:
    runs = [run_of(stream_id, sizes) for stream_id, sizes in streams.items()]
    plans = plan_objects(runs, SPLIT)
    assert [plan.shared for plan in plans] == sorted((p.shared for p in plans), reverse=True)
    assert sum(plan.shared for plan in plans) <= 1
    assert not (len(streams) == 1 and plans[0].shared)
    found: dict[int, int] = {}
    for plan in plans:
        built = plan.build(64)
        parser = ObjectReader("object", built.size)
        while (needed := parser.needed) is not None:
            parser.receive(built.data[needed.start : needed.end])
        for entry in parser.index:
            found[entry.stream_id] = found.get(entry.stream_id, 0) + entry.record_count
        if not plan.shared and len(streams) > 1:
            assert plan.runs[0].payload_bytes >= SPLIT
    assert found == {stream_id: len(sizes) for stream_id, sizes in streams.items()}
