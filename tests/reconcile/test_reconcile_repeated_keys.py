"""Keys that a listing has more than once: one row counts, the same on both engines."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.reconcile.listing import repeated_keys
from streammeta.reconcile.listing.key_owners import owner_of
from streammeta.reconcile.listing.repeated_keys import OF_VERSIONS, KeyNumbers, keep_one_row_a_key
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.vocabulary.tables import LISTING_COLUMNS, record_batch
from streammeta.reconcile.vocabulary.verdicts import Owner
from streammeta.storage.object_format.object_key import key_for
from tests.reconcile.fake_controller import COMMITTED, OTHER, OWN, FakeMap, MapObject, own
from tests.reconcile.inventories import LONG_AGO_MS, Listed, write_inventory

DAY_MS = 24 * 3_600_000
TAKEN_MS = LONG_AGO_MS + 100 * DAY_MS
YOUNG_MS = TAKEN_MS - 1000


def write_table(folder: Path, rows: Sequence[tuple[str, int, int, str]], parts: int) -> Path:
    """Write key, size, time of change and etag of each row to a table of so many files."""
    folder.mkdir()
    for number in range(parts):
        with (folder / f"part-{number}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["path", "size", "modified", "etag"])
            writer.writerows(rows[number::parts])
    return folder


def verdicts_of(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Verdict, size, time and etag of each key of a plan, none of which stands twice."""
    rows = pq.read_table(folder / plan_folder.VERDICTS).to_pylist()
    columns = ("verdict", "size", "modified_ms", "etag")
    found = {row["key"]: tuple(row[name] for name in columns) for row in rows}
    assert len(found) == len(rows), "a key stands twice"
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("parts", [1, 3])
def test_the_newest_row_of_a_key_counts_and_each_key_once(
    state: FakeMap, tmp_path: Path, make_plan: Callable[..., Any], parts: int
) -> None:
    state.objects = {
        id_: MapObject(COMMITTED, size=10, time_ms=TAKEN_MS - 50 * DAY_MS) for id_ in (1, 2, 300)
    }
    theirs = key_for(905, OTHER)
    rows = [
        (own(1), 3, LONG_AGO_MS, "stale"),
        (own(1), 10, LONG_AGO_MS + 1, "e"),
        (own(2), 10, LONG_AGO_MS, "e"),
        (own(2), 11, LONG_AGO_MS, "d"),  # at the same moment the largest counts
        (own(300), 10, LONG_AGO_MS, "a"),
        (own(300), 10, LONG_AGO_MS, "b"),
        (own(300), 10, LONG_AGO_MS, ""),
        (own(4), 7, LONG_AGO_MS, "e"),
        (own(4), 7, LONG_AGO_MS, "e"),
        (own(4), 7, LONG_AGO_MS, "e"),
        (own(5), 7, YOUNG_MS, "e"),
        (own(5), 7, LONG_AGO_MS, "e"),
        (own(6), 7, LONG_AGO_MS, "e"),
        ("zoo/a", 1, LONG_AGO_MS, "e"),
        ("zoo/a", 2, LONG_AGO_MS + 1, "e"),
        ("zoo/b", 2, LONG_AGO_MS, "e"),
        (theirs, 5, LONG_AGO_MS, "e"),
        (theirs, 5, LONG_AGO_MS, "e"),
    ]
    table = write_table(tmp_path / "table", rows, parts)
    folder, result = make_plan("plan", inventory=str(table), inventory_taken_ms=TAKEN_MS)
    assert verdicts_of(folder) == {
        own(1): ("live", 10, LONG_AGO_MS + 1, "e"),
        own(2): ("size_mismatch", 11, LONG_AGO_MS, "d"),
        own(300): ("live", 10, LONG_AGO_MS, "b"),
        own(4): ("orphan", 7, LONG_AGO_MS, "e"),
        own(5): ("too_young", 7, YOUNG_MS, "e"),
        own(6): ("orphan", 7, LONG_AGO_MS, "e"),
        "zoo/a": ("foreign", 2, LONG_AGO_MS + 1, "e"),
        "zoo/b": ("foreign", 2, LONG_AGO_MS, "e"),
        theirs: ("other_cluster", 5, LONG_AGO_MS, "e"),
    }
    counted = {str(verdict): (tally.keys, tally.size) for verdict, tally in result.classes.items()}
    assert counted == {
        "live": (2, 20),
        "size_mismatch": (1, 11),
        "orphan": (2, 14),
        "too_young": (1, 7),
        "foreign": (2, 4),
        "other_cluster": (1, 5),
    }
    candidates = pq.read_table(folder / plan_folder.CANDIDATES)["key"].to_pylist()
    assert sorted(candidates) == sorted([own(4), own(6)])
    assert result.repeated_rows == len(rows) - 9


@pytest.mark.timeout(300)
def test_versions_of_a_key_all_stay_and_of_its_current_rows_one_counts(
    state: FakeMap, tmp_path: Path, make_plan: Callable[..., Any]
) -> None:
    state.objects = {7: MapObject(COMMITTED, size=10)}
    rows = [
        Listed(own(7), 9, version="b"),
        Listed(own(7), 10, LONG_AGO_MS + 1000, version="c"),
        *[Listed(own(7), 4, version=version, is_latest=False) for version in ("a", "z")],
        *[Listed(own(8), None, version=one, is_marker=True, is_latest=False) for one in "xy"],
        *[Listed("zoo/a", 3, version=version, is_latest=False) for version in "pq"],
    ]
    manifest = write_inventory(tmp_path, rows, "Parquet", started_ms=TAKEN_MS)
    folder, result = make_plan("plan", inventory=str(manifest))
    counted = {str(verdict): (tally.keys, tally.size) for verdict, tally in result.classes.items()}
    assert counted == {"live": (1, 10), "old_version": (4, 14), "delete_marker": (2, 0)}
    assert pq.read_table(folder / plan_folder.VERDICTS).num_rows == 7
    assert result.repeated_rows == 1


@pytest.mark.timeout(300)
def test_keys_without_map_too(
    state: FakeMap, tmp_path: Path, make_plan: Callable[..., Any]
) -> None:
    rows = [(own(1), 3, LONG_AGO_MS, ""), (own(1), 10, LONG_AGO_MS + 1, "")]
    rows += [("zoo/a", 1, LONG_AGO_MS, ""), ("zoo/a", 2, LONG_AGO_MS + 1, "")]
    table = write_table(tmp_path / "table", rows, 1)
    state.broken_copies = 99
    _, result = make_plan("plan", inventory=str(table), inventory_taken_ms=TAKEN_MS, patience_s=0)
    counted = {str(verdict): (tally.keys, tally.size) for verdict, tally in result.classes.items()}
    assert counted == {"uncompared": (1, 10), "foreign": (1, 2)}
    assert result.repeated_rows == 2


keys = st.sampled_from(
    [own(1), own(17), own(257), own(1 << 40), "zoo/a", "zoo/b", key_for(1, OTHER)]
)
listed = st.tuples(
    keys,
    st.sampled_from([None, *OF_VERSIONS]),  # a key's own owner, or a version behind it
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([None, "", "a", "b"]),
)


def batch_of(rows: Sequence[tuple[str, Owner | None, int, int, str | None]]) -> pa.RecordBatch:
    """Rows of a listing."""
    owners = [owner_of(key, OWN) for key, *_ in rows]
    found: list[Owner] = [
        own_of_key[0] if given is None else given
        for own_of_key, (_, given, *_) in zip(owners, rows, strict=True)
    ]
    values = {
        "key": [key for key, *_ in rows],
        "size": [size for _, _, size, _, _ in rows],
        "modified_ms": [modified for _, _, _, modified, _ in rows],
        "etag": [etag for *_, etag in rows],
        "owner": [int(owner) for owner in found],
        "object_id": [object_id for _, object_id, _ in owners],
        "note": [note for _, _, note in owners],
    }
    return record_batch(LISTING_COLUMNS, values)


@given(st.lists(st.lists(listed, max_size=12), min_size=1, max_size=3), st.sampled_from([1, 2, 99]))
def test_repeated_keys_are_found_and_reduced_as_a_dictionary_does(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[tuple[str, Owner | None, int, int, str | None]]],
    numbers_at_once: int,
) -> None:
    listing = tmp_path_factory.mktemp("draft") / "listing"
    listing.mkdir()
    batches = [batch_of(rows) for rows in files]
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryFile(buffering=0) as scratch:
        patched.setattr(repeated_keys, "_NUMBERS_AT_ONCE", numbers_at_once)
        patched.setattr(repeated_keys, "_READ_AT_ONCE", 3)
        numbers = KeyNumbers(scratch)
        for number, rows in enumerate(batches):
            pq.write_table(pa.Table.from_batches([rows]), listing / f"part-{number}.parquet")
            numbers.add(rows)
        found = numbers.may_repeat()

    rows = [row for batch in batches for row in batch.to_pylist()]
    of_versions = [row for row in rows if row["owner"] in OF_VERSIONS]
    newest: dict[str, Any] = {}
    for row in rows:
        if row["owner"] not in OF_VERSIONS:
            newest[row["key"]] = max(newest.get(row["key"], row), row, key=precedence)
    assert found == (len(newest) + len(of_versions) < len(rows))
    keep_one_row_a_key(listing)
    kept = [tuple(row.values()) for row in pq.read_table(listing).to_pylist()]
    assert sorted(kept, key=str) == sorted(
        (tuple(row.values()) for row in [*newest.values(), *of_versions]), key=str
    )


def precedence(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells which row of a key counts."""
    return row["modified_ms"], row["size"], row["etag"] is not None, row["etag"] or ""
