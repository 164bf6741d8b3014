"""The planner of adoptions: chains, epochs, gaps and conflicts, each by a few records."""

from __future__ import annotations

import pytest

from streammeta.storage.adoption.last_entries import entries_ahead, read_last_entries
from streammeta.storage.adoption.model import (
    HARMLESS,
    AdoptedRange,
    Candidate,
    Entry,
    HeldRange,
    LeftBehind,
    StoredRecord,
    StoredRun,
    StreamHead,
    Why,
)
from streammeta.storage.adoption.planner import AdoptionPlan, plan_adoption
from streammeta.storage.adoption.survey import StoredObject, copy_torn, read_candidates
from streammeta.storage.object_format.index_block import IndexEntry
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from tests.kit.built_objects import built_object
from tests.kit.memory_store import MemoryObjectStore

Part = tuple[int, int, int, str]
"""Start, end, epoch and content of a record."""


def entry(*parts: Part) -> Entry:
    return tuple(StoredRecord(start, end, by, text.encode()) for start, end, by, text in parts)


def stored(object_id: int, *entries: Entry, stream_id: int = 0) -> Candidate:
    return Candidate(object_id, 10, (StoredRun(object_id, stream_id, entries),))


def plan(*candidates: Candidate, head: StreamHead | None = None) -> AdoptionPlan:
    """Plan for stream 0, of which the map holds what lies below 10 under epoch 5."""
    return plan_adoption({0: head or StreamHead(10, 5)}, 7, candidates)


def adopted(found: AdoptionPlan) -> dict[int, tuple[int, int, int]]:
    """Start, end and epoch by object."""
    return {
        object_.object_id: (part.start, part.end, part.epoch)
        for object_ in found.objects
        for part in object_.ranges
    }


def left(found: AdoptionPlan) -> set[tuple[int, int, Why]]:
    return {(left_out.object_id, left_out.start, left_out.why) for left_out in found.left}


def test_objects_are_chained_by_offsets_whatever_their_ids() -> None:
    found = plan(
        stored(9, entry((10, 12, 5, "a"))),
        stored(3, entry((12, 15, 6, "b"), (15, 16, 6, "c"))),
        stored(5, entry((16, 17, 6, "d"))),
    )
    assert adopted(found) == {9: (10, 12, 5), 3: (12, 16, 6), 5: (16, 17, 6)}
    assert [object_.object_id for object_ in found.objects] == [9, 3, 5]
    assert not found.left


def test_what_lies_behind_a_gap_or_below_the_end_is_left() -> None:
    found = plan(
        stored(1, entry((4, 10, 5, "known"))),
        stored(2, entry((11, 12, 5, "behind"))),
        stored(3, entry((8, 12, 5, "across"))),
    )
    assert adopted(found) == {}
    assert left(found) == {(1, 4, Why.KNOWN), (2, 11, Why.GAP), (3, 8, Why.CONFLICT)}
    assert {loss.object_id for loss in found.lost} == {2, 3}


def test_a_part_is_cut_between_entries_and_never_within_one() -> None:
    two = stored(1, entry((8, 10, 5, "a")), entry((10, 12, 5, "b")))
    assert adopted(plan(two)) == {1: (10, 12, 5)}
    one = stored(1, entry((8, 10, 5, "a"), (10, 12, 5, "b")))
    assert adopted(plan(one)) == {}


def test_the_larger_epoch_wins_and_the_other_is_a_leftover() -> None:
    found = plan(stored(1, entry((10, 12, 5, "old"))), stored(2, entry((10, 11, 6, "new"))))
    assert adopted(found) == {2: (10, 11, 6)}
    assert left(found) == {(1, 10, Why.FENCED)}
    below = plan(stored(1, entry((10, 12, 4, "older than the stream"))))
    assert left(below) == {(1, 10, Why.FENCED)}


def test_an_entry_is_not_taken_if_a_later_writer_began_within_it() -> None:
    found = plan(
        stored(1, entry((10, 12, 5, "a"), (12, 14, 5, "never committed"))),
        stored(2, entry((10, 12, 5, "a"))),
        stored(3, entry((12, 13, 6, "b"))),
    )
    assert adopted(found) == {2: (10, 12, 5), 3: (12, 13, 6)}
    assert not found.lost
    within = plan(stored(1, entry((10, 14, 5, "a"))), stored(3, entry((12, 13, 6, "b"))))
    assert adopted(within) == {}


def test_equal_epochs_must_agree() -> None:
    same = plan(stored(1, entry((10, 12, 5, "a"))), stored(2, entry((10, 12, 5, "a"))))
    assert adopted(same) == {1: (10, 12, 5)}
    assert left(same) == {(2, 10, Why.DUPLICATE)}
    other = plan(stored(1, entry((10, 12, 5, "a"))), stored(2, entry((10, 12, 5, "b"))))
    assert adopted(other) == {}
    assert {loss.why for loss in other.lost} == {Why.CONFLICT}


def test_what_is_owed_is_taken_of_its_own_epoch_alone() -> None:
    head = StreamHead(10, 6, ((7, 10, 5),))
    found = plan(
        stored(1, entry((7, 10, 4, "of a fenced writer"))),
        stored(2, entry((7, 10, 5, "owed"))),
        stored(3, entry((10, 11, 6, "behind"))),
        head=head,
    )
    assert adopted(found) == {2: (7, 10, 5), 3: (10, 11, 6)}
    assert left(found) == {(1, 7, Why.FENCED)}


def test_streams_that_the_map_does_not_know_are_told_apart() -> None:
    found = plan(
        stored(1, entry((0, 1, 1, "a")), stream_id=6), stored(2, entry((0, 1, 1, "b")), stream_id=7)
    )
    assert left(found) == {(1, 0, Why.DELETED_STREAM), (2, 0, Why.NEW_STREAM)}
    assert [loss.object_id for loss in found.lost] == [2]


def test_objects_that_wait_for_each_other_come_in_one_request() -> None:
    def crossing(object_id: int, first: int, second: int) -> Candidate:
        runs = (
            StoredRun(object_id, 0, (entry((first, first + 1, 5, f"{first}")),)),
            StoredRun(object_id, 1, (entry((second, second + 1, 5, f"{second}")),)),
        )
        return Candidate(object_id, 10, runs)

    heads = {0: StreamHead(10, 5), 1: StreamHead(10, 5)}
    found = plan_adoption(heads, 7, [crossing(1, 10, 11), crossing(2, 11, 10)])
    assert [[object_.object_id for object_ in batch.objects] for batch in found.batches] == [[1, 2]]
    assert found.objects[0].ranges == (AdoptedRange(0, 10, 11, 5), AdoptedRange(1, 11, 12, 5))


def held(*ranges: tuple[int, int, int, bool], end: int = 10) -> StreamHead:
    """Stream 0 under epoch 5, which reads start, end, object and whether the bucket has it."""
    return StreamHead(end, 5, held=tuple(HeldRange(*part) for part in ranges))


GONE = held((0, 4, 50, False), (4, 10, 51, False))


def test_a_compaction_replaces_objects_that_the_bucket_no_longer_has() -> None:
    spanning = stored(1, entry((0, 4, 3, "a"), (4, 12, 5, "b")), entry((12, 15, 5, "c")))
    found = plan(spanning, head=GONE)
    assert adopted(found) == {1: (0, 15, 5)}
    assert found.replaced == (50, 51)
    assert not found.left


def test_objects_that_can_be_read_stay_as_far_as_nothing_is_lost_by_that() -> None:
    head = held((0, 4, 50, True), (4, 10, 51, True))
    aligned = stored(1, entry((0, 4, 5, "a")), entry((4, 10, 5, "b")), entry((10, 12, 5, "c")))
    assert adopted(plan(aligned, head=head)) == {1: (10, 12, 5)}
    assert plan(aligned, head=head).replaced == ()
    across = stored(1, entry((0, 4, 5, "a")), entry((4, 10, 5, "b"), (10, 12, 5, "c")))
    assert adopted(plan(across, head=head)) == {1: (4, 12, 5)}
    assert plan(across, head=head).replaced == (51,)


def test_a_dead_end_gives_way_to_a_compaction_that_goes_further() -> None:
    head = held((0, 10, 50, True))
    found = plan(
        stored(1, entry((10, 12, 5, "a"))),
        stored(2, entry((0, 10, 5, "0"), (10, 12, 5, "a"), (12, 20, 5, "b"))),
        head=head,
    )
    assert adopted(found) == {2: (0, 20, 5)}
    assert found.replaced == (50,)


def test_a_stream_that_was_trimmed_since_loses_no_more_than_the_trimmed_part() -> None:
    found = plan(stored(1, entry((2, 4, 5, "a"), (4, 12, 5, "b"))), head=GONE)
    assert adopted(found) == {1: (2, 12, 5)}
    assert found.replaced == (50, 51)


def test_a_fenced_writer_does_not_replace_what_the_bucket_has_lost() -> None:
    head = StreamHead(10, 6, held=GONE.held, owners=((0, 4, 5), (4, 10, 6)))
    found = plan(stored(1, entry((4, 10, 5, "never committed"))), head=head)
    assert adopted(found) == {}
    assert left(found) == {(1, 4, Why.FENCED)}
    later = plan(stored(1, entry((4, 10, 7, "of no writer below the end"))), head=head)
    assert adopted(later) == {}


def test_an_object_that_another_stream_reads_stays_for_all_of_its_streams() -> None:
    heads = {
        0: held((0, 10, 50, True)),
        1: held((0, 10, 50, True)),
    }
    across = stored(1, entry((0, 10, 5, "a"), (10, 12, 5, "b")))
    kept = plan_adoption(heads, 7, [across])
    assert (kept.objects, kept.replaced) == ((), ())
    assert {loss.why for loss in kept.lost} == {Why.GAP}
    both = Candidate(2, 10, (StoredRun(2, 1, (entry((0, 10, 5, "c")),)),))
    found = plan_adoption(heads, 7, [across, both])
    assert adopted(found) == {1: (0, 12, 5), 2: (0, 10, 5)}
    assert [(len(batch.objects), batch.replaced) for batch in found.batches] == [(2, (50,))]


def test_an_object_gives_one_range_of_a_stream_around_what_the_map_has() -> None:
    head = held((0, 4, 50, False), (4, 6, 51, True), (6, 10, 52, False))
    whole = stored(1, entry((0, 4, 5, "a")), entry((4, 6, 5, "b")), entry((6, 12, 5, "c")))
    found = plan(whole, head=head)
    assert adopted(found) == {1: (0, 12, 5)}
    assert found.replaced == (50, 51, 52)


def test_an_object_of_a_stream_without_any_candidate_stays() -> None:
    heads = {0: held((0, 10, 50, True)), 1: held((0, 10, 50, True))}
    found = plan_adoption(heads, 7, [stored(1, entry((0, 10, 5, "a"), (10, 12, 5, "b")))])
    assert (found.objects, found.replaced) == ((), ())
    assert found.torn == (50,)
    copy = stored(2, entry((0, 10, 5, "c")), stream_id=1)
    across = stored(1, entry((0, 10, 5, "a"), (10, 12, 5, "b")))
    again = plan_adoption(heads, 7, [across, copy])
    assert (again.replaced, again.torn) == ((50,), ())


def test_what_follows_a_gap_is_adopted_if_gaps_are_passed() -> None:
    candidates = (stored(1, entry((10, 12, 5, "a"))), stored(2, entry((15, 17, 6, "b"))))
    found = plan_adoption({0: GONE}, 7, candidates, passes_gaps=True)
    assert adopted(found) == {1: (10, 12, 5), 2: (15, 17, 6)}
    assert [part.after_gap for object_ in found.objects for part in object_.ranges] == [False, True]
    assert found.gaps == ((0, 12, 15),)
    assert not found.lost


def test_torn_objects_are_copied_to_the_keys_of_free_ids() -> None:
    store = MemoryObjectStore()
    for object_id in (5, 6):
        store.put(key_for(object_id, "here"), f"object {object_id}".encode())
    copy_torn(store, "here", (5, 6), iter(range(99, 0, -1)))
    copies = [store.get_range(key_for(object_id, "here")) for object_id in (99, 98)]
    assert copies == [b"object 5", b"object 6"]
    assert store.get_range(key_for(5, "here")) == b"object 5"


# ---- entries ahead of the metadata ----


def index_entry(stream_id: int, start: int, end: int) -> IndexEntry:
    return IndexEntry(stream_id, start, end, record_count=1, position=0, size=100)


@pytest.mark.parametrize(
    ("end", "is_ahead"),
    [(0, True), (4, True), (5, True), (7, True), (9, True), (10, False), (11, False)],
)
def test_an_entry_is_ahead_until_its_stream_has_reached_its_end(end: int, is_ahead: bool) -> None:
    spans = index_entry(1, 5, 10)
    assert entries_ahead([spans], {1: end}) == ((spans,) if is_ahead else ())


def test_a_deleted_stream_has_no_entry_ahead_and_a_stream_to_come_has_all() -> None:
    of_deleted, of_later = index_entry(1, 0, 10), index_entry(7, 0, 1)
    assert entries_ahead([of_deleted, of_later], {7: 0}) == (of_later,)


def test_a_relative_object_is_left_behind_since_nobody_knows_its_offsets() -> None:
    """Even if its bytes look like a stream's beginning. It counts as a loss."""
    store, records = MemoryObjectStore(), [[RecordBatch(0, 5, 0, 3, b"a")]]
    for object_id, relative in ((1, True), (2, False)):
        data = built_object(records, relative=relative).data
        store.put(key_for(object_id, "n"), data)
        last = read_last_entries(store, key_for(object_id, "n"), len(data))
        assert [(found.stream_id, found.end_offset) for found in last.entries] == [(0, 3)]
        assert last.relative is relative
    found = read_candidates(store, "n", [StoredObject(1, 1), StoredObject(2, 1)], lambda _: None)
    relative_object, normal_object = found
    assert relative_object == LeftBehind(1, -1, -1, -1, Why.RELATIVE)
    assert isinstance(normal_object, Candidate)
    assert Why.RELATIVE not in HARMLESS


def test_only_the_entries_ahead_are_returned_in_their_order() -> None:
    entries = [
        index_entry(1, 0, 5),
        index_entry(1, 5, 9),
        index_entry(2, 0, 3),
        index_entry(3, 8, 9),
    ]
    assert entries_ahead(entries, {1: 5, 2: 3, 3: 0}) == (entries[1], entries[3])
