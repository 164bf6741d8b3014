"""A log with a level that this version lacks stops a start before anything is changed."""

from pathlib import Path

import pytest

from streammeta.controller.features import SUPPORTED
from streammeta.controller.journal.errors import DirectoryNotFormattedError, NewerVersionError
from streammeta.controller.records.codec import encode_records
from streammeta.controller.records.record import FeatureLevelSet, KVsPut
from streammeta.controller.runtime.replication import feature_check
from streammeta.controller.runtime.replication.feature_check import check_levels
from tests.journal.journal_tools import batch, make, open_journal

BEYOND = SUPPORTED.highest + 1
ORDINARY = encode_records(
    (KVsPut(namespaces=("n",), keys=("k",), values=(b"\xf2\x01\x02\x08\x09",)),)
)
"""A record of another kind whose bytes look like that of a level."""


def level(number: int) -> bytes:
    return encode_records((FeatureLevelSet(level=number),))


def written(directory: Path, *payloads: bytes, segment_bytes: int = 1 << 20) -> None:
    """Write a log with one batch for each payload."""
    make(directory)
    journal = open_journal(directory, segment_bytes)
    for base, payload in enumerate(payloads):
        journal.append([batch(base, 1, payload)])
        journal.sync()
    journal.close()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("segment_bytes", [1, 1 << 20])
@pytest.mark.parametrize("piece_bytes", [*range(4, 12), 1 << 20])
def test_a_level_beyond_this_version_is_found_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int, piece_bytes: int
) -> None:
    monkeypatch.setattr(feature_check, "_PIECE_BYTES", piece_bytes)
    payloads = (ORDINARY, level(2), level(BEYOND), ORDINARY)
    written(tmp_path, *payloads, segment_bytes=segment_bytes)
    before = contents(tmp_path)
    with pytest.raises(NewerVersionError, match=f"level {BEYOND}"):
        check_levels(tmp_path)
    assert contents(tmp_path) == before


def test_levels_of_this_version_and_bytes_that_look_like_one_pass(tmp_path: Path) -> None:
    written(tmp_path, ORDINARY, level(SUPPORTED.highest), ORDINARY)
    check_levels(tmp_path)


def test_a_kind_of_a_newer_version_beside_such_bytes_is_refused_too(tmp_path: Path) -> None:
    newer = b"\x0a\x07\xfa\x3f\x04\xf2\x01\x02\x08"  # a record of kind 1023
    written(tmp_path, newer)
    with pytest.raises(NewerVersionError):
        check_levels(tmp_path)


def test_a_torn_tail_is_left_to_recovery(tmp_path: Path) -> None:
    written(tmp_path, ORDINARY, level(BEYOND))
    (segment,) = tmp_path.glob("*.log")
    segment.write_bytes(segment.read_bytes()[:-1])
    check_levels(tmp_path)


def test_a_directory_that_is_not_formatted_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(DirectoryNotFormattedError):
        check_levels(tmp_path)
