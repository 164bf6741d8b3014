"""Every version's data directory is read to the same map, and saved and read again."""

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.journal.journal import Journal
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.quorum.messages import Batch, BatchKind, encode_voters
from streammeta.controller.records.codec import decode_records
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.replication.feature_check import check_levels
from streammeta.controller.runtime.writer.controller import MetadataController
from tests.golden.golden_directory import CLUSTER, VOTERS, Facts, open_directory, unpack, versions
from tests.kit.waiting import ManualClock


class Opened(NamedTuple):
    journal: Journal
    facts: Facts


@pytest.fixture(params=versions())
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    facts = unpack(request.param, tmp_path)
    check_levels(tmp_path)
    torn = {path: path.stat().st_size for path in tmp_path.glob("*.log")}
    journal = open_directory(tmp_path)
    last = max(torn)
    assert last.stat().st_size < torn.pop(last), "the torn tail was cut"
    assert all(path.stat().st_size == size for path, size in torn.items())
    yield Opened(journal, facts)
    journal.close()


def batches(journal: Journal) -> list[Batch]:
    found: list[Batch] = []
    while (end := found[-1].end_offset if found else journal.start_offset) < journal.end_offset:
        found.extend(journal.read(end, 1 << 20))
    return found


def hashes(controller: MetadataController) -> tuple[int, str, str]:
    seen = asyncio.run(controller.state_hash(None))
    return seen.offset, seen.digest.hex(), seen.log_hash.hex()


def wanted(facts: Facts) -> tuple[int, str, str]:
    return facts.end_offset, facts.state_hash, facts.log_hash


def test_there_is_a_directory() -> None:
    assert versions()


def test_the_whole_log_is_replayed_to_the_map_that_was_recorded(opened: Opened) -> None:
    found = batches(opened.journal)
    controller = MetadataController(ClusterMetadata(), ManualClock())
    controller.on_committed(found, found[-1].end_offset)
    assert hashes(controller) == wanted(opened.facts)
    assert controller.cluster_metadata.feature_level == opened.facts.level
    payloads = [
        payload for batch in found if batch.kind is BatchKind.DATA for payload in batch.payloads
    ]
    kinds = {type(record).__name__ for payload in payloads for record in decode_records(payload)}
    assert sorted(kinds) == list(opened.facts.records)
    control = [batch for batch in found if batch.kind is BatchKind.CONTROL]
    assert {batch.payloads for batch in control} == {(encode_voters(VOTERS),)}
    assert len(control) > 1


def test_each_checkpoint_is_read_and_the_log_behind_it_replayed(opened: Opened) -> None:
    found, journal = batches(opened.journal), opened.journal
    assert [kept.end_offset for kept in journal.snapshots.kept] == opened.facts.checkpoints
    for kept in journal.snapshots.kept:
        controller = MetadataController(ClusterMetadata(), ManualClock())
        with journal.snapshots.open(kept) as file:
            controller.load(file, kept)()
        rest = [batch for batch in found if batch.base_offset >= kept.end_offset]
        controller.on_committed(rest, rest[-1].end_offset)
        assert hashes(controller) == wanted(opened.facts)


def test_what_was_read_is_saved_and_read_again(opened: Opened) -> None:
    found = batches(opened.journal)
    controller = MetadataController(ClusterMetadata(), ManualClock())
    controller.on_committed(found, found[-1].end_offset)
    saved, saved_id = io.BytesIO(), SnapshotId(EndOffset(found[-1].end_offset), Epoch(99))
    controller.freeze(SnapshotPoint(saved_id, CLUSTER, VOTERS))(saved)
    again = MetadataController(ClusterMetadata(), ManualClock())
    again.load(saved, saved_id)()
    assert hashes(again) == wanted(opened.facts)
