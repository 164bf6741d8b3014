"""What a watcher asked for is never left out, and what a record shows to be something else is."""

from dataclasses import fields
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from streammeta.controller.metadata.tables.values import column
from streammeta.controller.records import record as rec
from streammeta.controller.records.codec import decode_records, encode_records
from streammeta.controller.records.selection import _RULES, EntryIndex, Kind, Selection, select

ALL_TYPES = get_args(rec.Record)
_ROWS = column(range(3))


def sample(cls: type[Any], node_id: int = 7, rows: rec.Int64Column = _ROWS) -> Any:
    """A record with three rows, of streams 0, 1 and 2 where it names streams."""
    samples: dict[Any, Any] = {
        int: 5,
        bool: True,
        str: "text",
        rec.Int64Column: rows,
        rec.StreamSetObjectRanges: rec.StreamSetObjectRanges(
            stream_id=column([0, 1, 2]), start_offset=column([0] * 3), end_offset=column([9] * 3)
        ),
        rec.Tags: (("key", "value"),),
        tuple[rec.Tags, ...]: ((("a", "0"),), (("a", "1"),), (("a", "2"),)),
        tuple[str, ...]: ("a", "b", "c"),
        tuple[bytes, ...]: (b"a", b"b", b"c"),
    }
    hints = get_type_hints(cls, vars(rec))
    values = {field.name: samples[hints[field.name]] for field in fields(cls)}
    special = {"node_id": node_id, "range_count": column([1, 1, 1]), "count": len(rows)}
    values |= {name: value for name, value in special.items() if name in values}
    if "first_stream_id" in values:
        values["first_stream_id"] = 0
    return cls(**values)


def stream_ids(record: Any) -> list[int] | None:
    """The streams a record names, None if it has no place for that."""
    if isinstance(record, rec.StreamsCreated):
        return list(range(record.first_stream_id, record.first_stream_id + record.count))
    holder = getattr(record, "ranges", record)
    return holder.stream_id.tolist() if hasattr(holder, "stream_id") else None


def chosen(record: rec.Record, **asked: Any) -> tuple[rec.Record, ...]:
    return select([record], Selection(**asked)) or ()


def test_every_record_type_has_one_rule() -> None:
    assert set(_RULES) == set(ALL_TYPES)
    assert all(rule.kinds for rule in _RULES.values())


@pytest.mark.parametrize("cls", ALL_TYPES, ids=lambda cls: cls.__name__)
def test_a_record_comes_for_its_kinds_and_for_no_other(cls: type[Any]) -> None:
    record = sample(cls)
    got = {kind for kind in Kind if chosen(record, kinds=frozenset({kind}))}
    assert got == _RULES[cls].kinds
    message_kinds = {
        Kind.KV: cls.__name__.startswith("KV"),
        Kind.NODE: cls.__name__.startswith("Node"),
        Kind.STREAM: cls.__name__.startswith("Streams"),
        Kind.OBJECT: cls.__name__.startswith("Objects"),
    }
    assert all(kind in got for kind, is_named_so in message_kinds.items() if is_named_so)


@pytest.mark.parametrize("cls", ALL_TYPES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("wanted", [{0, 2}, {1}, {5}])
def test_rows_of_other_streams_are_cut_and_columns_stay_parallel(
    cls: type[Any], wanted: set[int]
) -> None:
    record = sample(cls)
    got = chosen(record, stream_ids=frozenset(wanted))
    if stream_ids(record) is None:
        assert got in ((), (record,))
        return
    named = [stream_id for part in got for stream_id in stream_ids(part) or ()]
    assert named == sorted(wanted & {0, 1, 2})
    if got:
        assert [*map(type, decode_records(encode_records(got)))] == [cls] * len(got)
    for part in got:
        assert_rows_are_those_of(part, record)


def assert_rows_are_those_of(part: Any, whole: Any) -> None:
    """Each cut column holds the values the whole record has for the same streams."""
    rows = [(stream_ids(whole) or []).index(stream_id) for stream_id in stream_ids(part) or ()]
    for field in fields(whole):
        before, after = getattr(whole, field.name), getattr(part, field.name)
        if field.name == "ranges":
            assert_rows_are_those_of(after, before)
        elif isinstance(before, np.ndarray):
            assert after.tolist() == before[rows].tolist(), field.name
        elif field.name in ("tags", "keys") and isinstance(before[0], tuple):
            assert after == tuple(before[row] for row in rows)


@pytest.mark.parametrize("cls", ALL_TYPES, ids=lambda cls: cls.__name__)
def test_a_record_that_names_another_node_is_left_out_one_that_names_none_of_its_own_is_not(
    cls: type[Any],
) -> None:
    names_a_node = hasattr(sample(cls), "node_id")
    mine = bool(chosen(sample(cls, node_id=7), node_ids=frozenset({7, 8})))
    others = bool(chosen(sample(cls, node_id=9), node_ids=frozenset({7, 8})))
    if names_a_node:
        assert (mine, others) == (True, False)
    else:
        assert mine == others == (stream_ids(sample(cls)) is not None or "Object" in cls.__name__)


def test_a_recovery_concerns_both_nodes() -> None:
    record = rec.RecoveryAssigned(node_id=7, target_id=8)
    assert [bool(chosen(record, node_ids=frozenset({node}))) for node in (7, 8, 9)] == [
        *(True, True, False)
    ]


def test_what_has_no_stream_is_no_change_of_a_stream_but_objects_by_id_may_be() -> None:
    asked = {"stream_ids": frozenset({1})}
    assert chosen(sample(rec.KVsPut), **asked) == ()
    assert chosen(sample(rec.NodeRegistered), **asked) == ()
    destroyed = sample(rec.ObjectsDestroyed)
    assert chosen(destroyed, **asked) == (destroyed,)


def test_a_set_object_keeps_the_rows_asked_for_and_goes_when_it_has_none() -> None:
    record = rec.StreamSetObjectsCommitted(
        node_id=7,
        committed_at_ms=1,
        data_time_ms=1,
        object_id=column([10, 11, 12]),
        order_id=column([10, 11, 12]),
        object_size=column([100, 110, 120]),
        attributes=column([0, 1, 2]),
        range_count=column([2, 1, 3]),
        ranges=rec.StreamSetObjectRanges(
            stream_id=column([1, 2, 3, 1, 2, 4]),
            start_offset=column([0, 1, 2, 3, 4, 5]),
            end_offset=column([10, 11, 12, 13, 14, 15]),
        ),
        crc32c=column([5, 6, -1]),
    )
    (got,) = chosen(record, stream_ids=frozenset({2, 4}))
    assert isinstance(got, rec.StreamSetObjectsCommitted)
    assert got.object_id.tolist() == [10, 12]
    assert (got.object_size.tolist(), got.attributes.tolist()) == ([100, 120], [0, 2])
    assert got.range_count.tolist() == [1, 2]
    assert (got.crc32c.tolist(), got.max_timestamp_ms.tolist()) == ([5, -1], [])
    assert got.ranges.stream_id.tolist() == [2, 2, 4]
    assert got.ranges.start_offset.tolist() == [1, 4, 5]
    assert got.ranges.end_offset.tolist() == [11, 14, 15]


def test_created_streams_stay_apart_where_others_lay_between_and_keep_their_tags() -> None:
    record = sample(rec.StreamsCreated)
    got = chosen(record, stream_ids=frozenset({0, 2}))
    assert [(record.first_stream_id, record.count, record.tags) for record in got] == [  # type: ignore[union-attr]
        (0, 1, ((("a", "0"),),)),
        (2, 1, ((("a", "2"),),)),
    ]


def test_a_column_that_may_be_empty_stays_empty() -> None:
    closed = rec.StreamsClosed(stream_id=column([1, 2]), end_offset=column())
    (got,) = chosen(closed, stream_ids=frozenset({2}))
    assert isinstance(got, rec.StreamsClosed)
    assert (got.stream_id.tolist(), got.end_offset.tolist()) == ([2], [])
    opened = rec.StreamsOpened(node_id=7, stream_id=column([1, 2]), stream_epoch=column([3, 4]))
    (kept,) = chosen(opened, stream_ids=frozenset({2}))
    assert isinstance(kept, rec.StreamsOpened)
    assert (kept.stream_epoch.tolist(), kept.tags) == ([4], ())


def test_many_streams_asked_for_are_found_as_few_are() -> None:
    trimmed = rec.StreamsTrimmed(stream_id=column(range(1000)), start_offset=column(range(1000)))
    few, many = frozenset({3, 700}), frozenset({3, 700, *range(2_000, 9_000)})
    for asked in (few, many):
        (got,) = chosen(trimmed, stream_ids=asked)
        assert stream_ids(got) == [3, 700]


def test_order_is_kept_and_nothing_is_none() -> None:
    records = [sample(cls) for cls in ALL_TYPES]
    assert select(records, Selection()) == tuple(records)
    of_objects = select(records, Selection(kinds=frozenset({Kind.OBJECT})))
    assert of_objects is not None
    places = [records.index(record) for record in of_objects]
    assert places == sorted(places)
    assert select([sample(rec.CommitRowsRejected)], Selection(kinds=frozenset({Kind.KV}))) is None


@pytest.mark.parametrize("cls", ALL_TYPES, ids=lambda cls: cls.__name__)
def test_the_index_of_an_entry_never_hides_what_a_selection_would_find(cls: type[Any]) -> None:
    records = [sample(cls, node_id=7)]
    index = EntryIndex(records)
    for kinds in (frozenset[Kind](), *(frozenset({kind}) for kind in Kind)):
        for streams in ((), (1,), (2, 50), (50,)):
            for nodes in ((), (7,), (8,), (5, 8)):
                for prefixes in ((), (("a", ""),), (("b", "b"), ("c", "x")), (("b", "c"),)):
                    selection = Selection(
                        kinds, frozenset(streams), frozenset(nodes), frozenset(prefixes)
                    )
                    if select(records, selection) is not None:
                        assert index.may_concern(selection), selection


def test_the_index_of_an_entry_leaves_out_other_streams_and_other_nodes() -> None:
    index = EntryIndex(
        [sample(rec.StreamSetObjectsCommitted, node_id=7), sample(rec.StreamsTrimmed)]
    )
    assert index.may_concern(Selection(stream_ids=frozenset({2, 9})))
    assert not index.may_concern(Selection(stream_ids=frozenset({9})))
    assert not index.may_concern(Selection(kinds=frozenset({Kind.NODE})))
    locked = EntryIndex([sample(rec.NodeRegistered, node_id=7)])
    assert not locked.may_concern(Selection(node_ids=frozenset({8})))
    assert not locked.may_concern(Selection(stream_ids=frozenset({2})))


def test_rows_of_other_keys_are_cut() -> None:
    keys = ("group/a", "group/b", "other", "group/a")
    put = rec.KVsPut(namespaces=("n", "n", "n", "m"), keys=keys, values=(b"1", b"2", b"3", b"4"))
    deleted = rec.KVsDeleted(namespaces=put.namespaces, keys=keys)
    (cut,) = chosen(put, kv_prefixes=frozenset({("n", "group/"), ("absent", "")}))
    assert isinstance(cut, rec.KVsPut)
    assert (cut.keys, cut.values) == (("group/a", "group/b"), (b"1", b"2"))
    (of_m,) = chosen(put, kv_prefixes=frozenset({("m", "")}))
    assert encode_records([of_m]) == encode_records(
        [rec.KVsPut(namespaces=("m",), keys=("group/a",), values=(b"4",))]
    )
    (gone,) = chosen(deleted, kv_prefixes=frozenset({("n", "o")}))
    assert isinstance(gone, rec.KVsDeleted)
    assert (gone.namespaces, gone.keys) == (("n",), ("other",))
    nothing = frozenset({("n", "group/c"), ("", "")})
    assert chosen(put, kv_prefixes=nothing) == ()
    assert not EntryIndex([put]).may_concern(Selection(kv_prefixes=nothing))


def test_prefixes_of_keys_leave_changes_of_other_kinds_as_they_are() -> None:
    prefixes = frozenset({("n", "a")})
    trimmed = sample(rec.StreamsTrimmed)
    assert chosen(trimmed, kv_prefixes=prefixes) == (trimmed,)
    assert chosen(trimmed, kv_prefixes=prefixes, kinds=frozenset({Kind.KV})) == ()
    put = rec.KVsPut(namespaces=("n",), keys=("a",), values=(b"1",))
    assert chosen(put, kv_prefixes=prefixes, stream_ids=frozenset({1})) == ()
