"""Verdicts: a table of every rule, and a slow model over sets that must agree on any input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammeta.reconcile.vocabulary.verdicts import (
    ABSENT,
    WITHOUT_METADATA,
    JoinedColumns,
    Owner,
    Reading,
    Rules,
    Verdict,
    judge,
)
from streammeta.storage.object_format.object_key import ObjectKind
from streammeta.v1 import common_pb2

PREPARED, COMMITTED, MARK_DESTROYED, LINKED = STATES = (
    common_pb2.OBJECT_STATE_PREPARED,
    common_pb2.OBJECT_STATE_COMMITTED,
    common_pb2.OBJECT_STATE_MARK_DESTROYED,
    common_pb2.OBJECT_STATE_LINKED,
)

NEXT_ID = 1000
YOUNG_FROM = 50_000
UNLISTED_FROM = 90_000
RULES = Rules(next_object_id=NEXT_ID, young_from_ms=YOUNG_FROM, unlisted_from_ms=UNLISTED_FROM)


@dataclass(frozen=True, slots=True)
class Row:
    """One joined row; by default an old, small key of ours that the map does not know."""

    owner: int = Owner.OWN
    object_id: int = 7
    size: int = 100
    modified_ms: int = 10_000
    map_state: int = ABSENT
    map_size: int = ABSENT
    map_time_ms: int = ABSENT
    map_attributes: int = 0
    reading: int = ABSENT


def known(state: int, size: int = 100, time_ms: int = 10_000, attributes: int = 0) -> Row:
    """Make a listed key of ours whose id is in the map."""
    return Row(map_state=state, map_size=size, map_time_ms=time_ms, map_attributes=attributes)


def unlisted(row: Row) -> Row:
    """Take the object out of the bucket."""
    return replace(row, size=ABSENT, modified_ms=ABSENT)


TABLE = [
    ("committed", known(COMMITTED), Verdict.LIVE),
    ("linked", known(LINKED), Verdict.LINKED),
    ("live is live however young", replace(known(COMMITTED), modified_ms=99_999), Verdict.LIVE),
    ("prepared", known(PREPARED, size=0), Verdict.IN_FLIGHT),
    ("mark destroyed", known(MARK_DESTROYED, size=99), Verdict.DELETING),
    ("a state of a later version", known(77), Verdict.UNKNOWN_STATE),
    ("wrong size", known(COMMITTED, size=101), Verdict.SIZE_MISMATCH),
    ("wrong size of a linked object", known(LINKED, size=99), Verdict.SIZE_MISMATCH),
    (
        "a composite records the size of what it links",
        known(COMMITTED, size=5000, attributes=ObjectKind.COMPOSITE | 3 << 2),
        Verdict.LIVE,
    ),
    (
        "other bytes than were committed",
        replace(known(COMMITTED), reading=Reading.CHECKSUM_DIFFERS),
        Verdict.CHECKSUM_MISMATCH,
    ),
    (
        "other bytes of a linked object",
        replace(known(LINKED), reading=Reading.CHECKSUM_DIFFERS),
        Verdict.CHECKSUM_MISMATCH,
    ),
    ("no footer", replace(known(COMMITTED), reading=Reading.MALFORMED), Verdict.MALFORMED),
    (
        "cut off",
        replace(known(COMMITTED, size=101), reading=Reading.MALFORMED),
        Verdict.SIZE_MISMATCH,
    ),
    ("read and sound", replace(known(COMMITTED), reading=Reading.SOUND), Verdict.LIVE),
    (
        "read, and destroyed since",
        replace(known(MARK_DESTROYED), reading=Reading.MALFORMED),
        Verdict.DELETING,
    ),
    ("forgotten and old", Row(), Verdict.ORPHAN),
    ("last issued id", Row(object_id=NEXT_ID - 1), Verdict.ORPHAN),
    ("empty file", Row(size=0), Verdict.ORPHAN),
    ("last moment before the grace period", Row(modified_ms=YOUNG_FROM - 1), Verdict.ORPHAN),
    ("first moment of the grace period", Row(modified_ms=YOUNG_FROM), Verdict.TOO_YOUNG),
    ("id not issued", Row(object_id=NEXT_ID), Verdict.NOT_ISSUED),
    ("another cluster's", Row(owner=Owner.OTHER_CLUSTER), Verdict.OTHER_CLUSTER),
    ("not a key of ours", Row(owner=Owner.FOREIGN, object_id=ABSENT), Verdict.FOREIGN),
    ("write-ahead log", Row(owner=Owner.LOG, object_id=ABSENT), Verdict.LOG),
    ("marker or claim", Row(owner=Owner.MARKER, object_id=ABSENT), Verdict.MARKER),
    ("in quarantine", Row(owner=Owner.QUARANTINED, object_id=ABSENT), Verdict.QUARANTINED),
    ("committed, gone", unlisted(known(COMMITTED)), Verdict.MISSING),
    ("linked, gone", unlisted(known(LINKED)), Verdict.MISSING),
    (
        "committed while the listing ran",
        unlisted(known(COMMITTED, time_ms=UNLISTED_FROM)),
        Verdict.UNLISTED,
    ),
    ("prepared, not stored yet", unlisted(known(PREPARED)), ""),
    ("destroyed and deleted", unlisted(known(MARK_DESTROYED)), ""),
]


def columns(rows: list[Row]) -> JoinedColumns:
    """Turn rows into what the job sees."""
    return JoinedColumns(
        *(
            np.array([getattr(row, name) for row in rows], dtype=np.int64)
            for name in JoinedColumns.__dataclass_fields__
        )
    )


@pytest.mark.parametrize(
    ("row", "verdict"), [(r, v) for _, r, v in TABLE], ids=[t[0] for t in TABLE]
)
def test_verdict_table(row: Row, verdict: str) -> None:
    assert judge(columns([row]), RULES).tolist() == [verdict]


def test_every_verdict_is_in_the_table() -> None:
    assert {verdict for _, _, verdict in TABLE} == {*Verdict, ""} - {
        *(Verdict.UNCOMPARED, Verdict.UNDECIDED, Verdict.UNFINISHED_UPLOAD),
        *(Verdict.OLD_VERSION, Verdict.DELETE_MARKER),
    }


def test_every_owner_has_a_verdict_without_a_map_and_none_is_a_candidate() -> None:
    assert set(WITHOUT_METADATA) == set(Owner)
    assert Verdict.ORPHAN not in WITHOUT_METADATA.values()


def test_rows_do_not_influence_each_other() -> None:
    for table in (TABLE, []):
        found = judge(columns([row for _, row, _ in table]), RULES)
        assert found.tolist() == [verdict for _, _, verdict in table]


@dataclass(frozen=True, slots=True)
class World:
    """A bucket and a map by object id, and keys that are not ours."""

    listed: dict[int, tuple[int, int]]  # id -> size, modified
    objects: dict[int, tuple[int, int, int, int, int]]  # id -> state, size, time, kind, reading
    strangers: list[Owner]


def model(world: World) -> dict[str, set[int]]:
    """Verdict -> object ids, worked out with sets, from the meaning of the words."""
    stored, mapped = set(world.listed), set(world.objects)
    wanted = {i for i, o in world.objects.items() if o[0] in (2, 5)}
    fickle = {i for i in wanted if world.objects[i][3] % 4 != ObjectKind.COMPOSITE}
    differs = {i for i in fickle & stored if world.listed[i][0] != world.objects[i][1]}
    read = {i: world.objects[i][4] for i in (wanted & stored) - differs}
    bad_sums = {i for i, reading in read.items() if reading == Reading.CHECKSUM_DIFFERS}
    formless = {i for i, reading in read.items() if reading == Reading.MALFORMED}
    whole = set(read) - bad_sums - formless
    late = {i for i in wanted if world.objects[i][2] >= UNLISTED_FROM}
    unknown = stored - mapped
    issued = {i for i in unknown if i < NEXT_ID}
    young = {i for i in issued if world.listed[i][1] >= YOUNG_FROM}

    def in_state(state: int) -> set[int]:
        return {i for i in stored & mapped if world.objects[i][0] == state}

    return {
        Verdict.LIVE: {i for i in whole if world.objects[i][0] == COMMITTED},
        Verdict.LINKED: in_state(LINKED) & whole,
        Verdict.CHECKSUM_MISMATCH: bad_sums,
        Verdict.MALFORMED: formless,
        Verdict.SIZE_MISMATCH: differs,
        Verdict.MISSING: wanted - stored - late,
        Verdict.UNLISTED: (wanted - stored) & late,
        Verdict.IN_FLIGHT: in_state(PREPARED),
        Verdict.DELETING: in_state(MARK_DESTROYED),
        Verdict.UNKNOWN_STATE: in_state(0),
        Verdict.NOT_ISSUED: unknown - issued,
        Verdict.TOO_YOUNG: young,
        Verdict.ORPHAN: issued - young,
    }


ids = st.integers(NEXT_ID - 6, NEXT_ID + 3)
sizes = st.integers(0, 2)
around_young = st.integers(YOUNG_FROM - 2, YOUNG_FROM + 2)
around_late = st.integers(UNLISTED_FROM - 2, UNLISTED_FROM + 2)
map_rows = st.tuples(
    st.sampled_from([0, *STATES]),
    sizes,
    around_late,
    st.sampled_from([0, 1, 8, 9]),
    st.sampled_from(Reading),
)
worlds = st.builds(
    World,
    listed=st.dictionaries(ids, st.tuples(sizes, around_young)),
    objects=st.dictionaries(ids, map_rows),
    strangers=st.lists(st.sampled_from([owner for owner in Owner if owner is not Owner.OWN])),
)


@settings(max_examples=300)
@given(worlds)
def test_agrees_with_a_model_over_sets(world: World) -> None:
    rows = [
        Row(Owner.OWN, i, *world.listed.get(i, (ABSENT,) * 2), *world.objects.get(i, (ABSENT,) * 5))
        for i in sorted(set(world.listed) | set(world.objects))
    ]
    strangers = [Row(owner=owner, object_id=NEXT_ID - 3) for owner in world.strangers]
    got = judge(columns(rows + strangers), RULES).tolist()
    by_verdict = {
        verdict: {row.object_id for row, found in zip(rows, got, strict=False) if found == verdict}
        for verdict in model(world)
    }
    assert by_verdict == model(world)
    expected = [Verdict[owner.name].value for owner in world.strangers]
    assert got[len(rows) :] == expected


def test_an_object_of_before_a_restore_is_missing_however_late_it_was_committed() -> None:
    rules = replace(RULES, settled_below=8)
    before = unlisted(known(COMMITTED, time_ms=UNLISTED_FROM))
    after = replace(before, object_id=8)
    found = judge(columns([before, after]), rules).tolist()
    assert found == [Verdict.MISSING, Verdict.UNLISTED]


def test_what_a_restore_left_undecided_is_no_candidate_unless_the_map_knows_it() -> None:
    rules = replace(RULES, undecided=((5, 10), (20, 30)))
    rows = [Row(object_id=object_id) for object_id in (4, 5, 9, 10, 19, 20, 29, 30)]
    rows += [replace(known(COMMITTED), object_id=7), replace(known(MARK_DESTROYED), object_id=21)]
    assert judge(columns(rows), rules).tolist() == [
        *(Verdict.ORPHAN, Verdict.UNDECIDED, Verdict.UNDECIDED, Verdict.ORPHAN),
        *(Verdict.ORPHAN, Verdict.UNDECIDED, Verdict.UNDECIDED, Verdict.ORPHAN),
        *(Verdict.LIVE, Verdict.DELETING),
    ]
    late = replace(rules, undecided=((NEXT_ID - 1, NEXT_ID + 1),))
    assert judge(columns([Row(object_id=NEXT_ID)]), late).tolist() == [Verdict.UNDECIDED]
