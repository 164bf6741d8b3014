"""`streammeta storage` formats once, and tells all of a stopped directory without touching it."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammeta.cli.framework.output import run_cli
from streammeta.cli.root import cli
from streammeta.controller.ids import ClusterId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.journal.journal import Journal
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.voters import ReplicaKey, VoterSet
from streammeta.controller.runtime.persistence.metadata_checkpoint import snapshot_check
from streammeta.controller.snapshot.checkpoint_file import write_checkpoint
from streammeta.controller.snapshot.voters import voters_section
from tests.journal.journal_tools import batch

DISK_ID = "6d0f5b5e-3b0f-4b43-a7d3-5d3b7f4f1a11"
VOTERS = f"1@10.0.0.1:9090/{DISK_ID},2@10.0.0.2:9090"


class Ran:
    """One run of the command, its output read as JSON."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: object) -> None:
        capsys.readouterr()
        self.code = run_cli(cli, ["storage", *map(str, words), "--format", "json"])
        self.answer: dict[str, Any] = json.loads(capsys.readouterr().out)

    @property
    def error(self) -> str:
        return f"{self.answer['error']['code']}: {self.answer['error']['message']}"


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return partial(Ran, capsys)


def format_words(path: Path, *more: object) -> tuple[object, ...]:
    return ("format", "--data-dir", path, "--cluster-id", "demo", "--node-id", 1, *more)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def open_journal(path: Path, segment_bytes: int = 1) -> Journal:
    cluster_id = ClusterId("demo")
    return Journal.open(
        path,
        cluster_id=cluster_id,
        node_id=NodeId(1),
        read_snapshot_voters=snapshot_check(cluster_id),
        segment_bytes=segment_bytes,
    )


def checkpoint(which: SnapshotId) -> bytes:
    sink = io.BytesIO()
    sections: Mapping[str, Any] = {
        "voters": voters_section(VoterSet()),
        "streams": {"stream_id": np.arange(50, dtype=np.int64)},
    }
    write_checkpoint(sink, SnapshotId(which.end_offset, which.epoch), "demo", sections)
    return sink.getvalue()


@pytest.fixture
def used(tmp_path: Path, run: Run) -> Path:
    """Return a directory with a trimmed log of three segments and a snapshot."""
    path = tmp_path / "data"
    assert run(*format_words(path, "--voters", VOTERS)).code == 0
    journal = open_journal(path)
    journal.write_quorum_state(QuorumState(Epoch(3), ReplicaKey(NodeId(2)), NodeId(2)))
    journal.append([batch(i, 1 + i // 2, b"payload", b"two") for i in (0, 2, 4)])
    journal.append([batch(6, 3, b"newest")])
    journal.sync()
    which = SnapshotId(EndOffset(4), Epoch(2))
    writer = journal.snapshots.begin(which)
    writer.write(checkpoint(which))
    writer.seal()
    assert journal.finish_snapshot(writer)
    journal.trim(EndOffset(4))
    journal.close()
    return path


def test_format_prints_the_directory_id_and_a_node_starts_there(tmp_path: Path, run: Run) -> None:
    ran = run(*format_words(tmp_path / "new", "--voters", "1@h:1,2@[::1]:2"))
    assert (ran.code, ran.answer["formatted"]) == (0, True)
    assert uuid.UUID(ran.answer["directory_id"])
    journal = open_journal(tmp_path / "new")
    assert journal.identity.directory_id == ran.answer["directory_id"]
    found = [(v.key.node_id, v.endpoint) for v in journal.identity.bootstrap_voters]
    assert found == [(1, "h:1"), (2, "[::1]:2")]
    journal.close()


def test_the_directory_id_may_be_given_alone_or_among_the_voters(tmp_path: Path, run: Run) -> None:
    for index, words in enumerate((("--join", "--directory-id", DISK_ID), ("--voters", VOTERS))):
        ran = run(*format_words(tmp_path / str(index), *words))
        assert (ran.code, ran.answer["directory_id"]) == (0, DISK_ID)
    other = "--directory-id", str(uuid.uuid4())
    ran = run(*format_words(tmp_path / "other", "--voters", VOTERS, *other))
    assert ran.code == 1
    assert DISK_ID in ran.error
    assert not (tmp_path / "other").exists()


def test_a_joining_node_has_no_voters(tmp_path: Path, run: Run) -> None:
    assert run(*format_words(tmp_path, "--join")).code == 0
    assert run("info", "--data-dir", tmp_path).answer["bootstrap_voters"] == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "--join"),
        (("--join", "--voters", "1@h:1"), "--join"),
        (("--voters", "1@h"), "HOST:PORT"),
        (("--voters", "1@h:1/xyz"), "'xyz' is not a directory id"),
        (("--voters", "1@h:1,1@h:2"), "repeat"),
        (("--voters", ""), "ID@HOST:PORT"),
        (("--join", "--directory-id", "xyz"), "'xyz' is not a directory id"),
        (("--join", "--node-id", "1000"), "0 to 999"),
        (("--join", "--cluster-id", "a/b"), "letters"),
    ],
)
def test_called_the_wrong_way_nothing_is_made(
    tmp_path: Path, run: Run, words: tuple[str, ...], named: str
) -> None:
    ran = run(*format_words(tmp_path / "new", *words))
    assert ran.code == 2
    assert named in ran.error
    assert not (tmp_path / "new").exists()


def test_voters_without_this_node_are_refused(tmp_path: Path, run: Run) -> None:
    ran = run(*format_words(tmp_path / "new", "--voters", "2@h:2"))
    assert (ran.code, "node 1 is not among the voters" in ran.error) == (1, True)
    assert not (tmp_path / "new").exists()


def test_a_formatted_directory_stays_as_it_is(used: Path, run: Run) -> None:
    before = contents(used)
    assert run(*format_words(used, "--join")).code == 1
    again = run(*format_words(used, "--join", "--ignore-formatted"))
    assert (again.code, again.answer["formatted"]) == (0, False)
    assert again.answer["directory_id"] == DISK_ID
    for words, named in (
        (("--cluster-id", "other"), "'other'"),
        (("--node-id", 2), "node 2"),
        (("--directory-id", str(uuid.uuid4())), DISK_ID),
    ):
        ran = run(*format_words(used, "--join", "--ignore-formatted", *words))
        assert ran.code == 1
        assert named in ran.error
    assert contents(used) == before


def test_info_tells_what_is_there_and_changes_nothing(used: Path, run: Run) -> None:
    before = contents(used)
    ran = run("info", "--data-dir", used)
    assert contents(used) == before
    assert ran.code == 0
    expected = {
        "ok": True,
        "cluster_id": "demo",
        "node_id": 1,
        "directory_id": DISK_ID,
        "epoch": 3,
        "leader_id": 2,
        "voted_id": 2,
        "voted_directory_id": None,
        "log_start_offset": 4,
        "log_end_offset": 7,
        "flushed_end_offset": 7,
        "batches": 2,
        "unflushed_torn_bytes": 0,
        "repairs_up_to_offset": None,
        "epochs": [{"epoch": 3, "start_offset": 4}],
        "damage": [],
        "put_aside": [],
    }
    assert {name: ran.answer[name] for name in expected} == expected
    assert [v["node_id"] for v in ran.answer["bootstrap_voters"]] == [1, 2]
    segments = ran.answer["segments"]
    assert [(s["base_offset"], s["end_offset"]) for s in segments] == [(4, 6), (6, 7)]
    for file in [*segments, *ran.answer["snapshots"]]:
        assert file["bytes"] == len(before[file["file"]])
    assert [(s["end_offset"], s["epoch"]) for s in ran.answer["snapshots"]] == [(4, 2)]


def test_a_directory_in_use_is_left_to_its_node(used: Path, run: Run) -> None:
    journal = open_journal(used)
    for command in ("info", "verify"):
        ran = run(command, "--data-dir", used)
        assert ran.code == 1
        assert ran.error.startswith("IN_USE")
        assert "stop the controller" in ran.answer["error"]["hint"]
    journal.close()
    assert run("verify", "--data-dir", used).code == 0


def test_what_is_no_data_directory_is_refused(tmp_path: Path, run: Run) -> None:
    (tmp_path / "thesis.tex").write_text("ten years of work")
    for path, named in ((tmp_path, "thesis.tex"), (tmp_path / "missing", "not formatted")):
        for command in ("info", "verify"):
            ran = run(command, "--data-dir", path)
            assert ran.code == 1
            assert named in ran.error


def test_verify_finds_every_flipped_byte_and_changes_nothing(used: Path, run: Run) -> None:
    assert run("verify", "--data-dir", used).answer["damages"] == 0
    for name in sorted(contents(used)):
        if not name.endswith((".log", ".checkpoint")):
            continue
        good = (used / name).read_bytes()
        step = max(1, len(good) // 60)
        for position in range(0, len(good), step):
            bad = good[:position] + bytes([good[position] ^ 16]) + good[position + 1 :]
            (used / name).write_bytes(bad)
            before = contents(used)
            ran = run("verify", "--data-dir", used)
            assert contents(used) == before
            assert (ran.code, ran.answer["ok"]) == (1, False), f"{name}, byte {position}"
            found = ran.answer["damage"][0]
            assert found["file"] == name
            assert found["byte"] <= position
            assert str(found["offset"])
        (used / name).write_bytes(good)


def test_verify_goes_on_behind_the_first_damage(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "data"
    run(*format_words(path, "--voters", VOTERS))
    journal = open_journal(path, segment_bytes=1 << 20)
    journal.write_quorum_state(QuorumState(Epoch(3)))
    payloads = [f"payload {i:03}".encode() for i in range(9)]
    journal.append([batch(i, 1, payload) for i, payload in enumerate(payloads)])
    journal.close()
    (segment,) = path.glob("*.log")
    good = data = segment.read_bytes()
    for index in (1, 4, 5):
        data = data.replace(payloads[index], b"PAYLOAD xyz")
    segment.write_bytes(data)
    ran = run("verify", "--data-dir", path)
    assert [found["offset"] for found in ran.answer["damage"]] == [1, 4, 5]
    for found in ran.answer["damage"]:
        assert good.startswith(b"SMB1", found["byte"])
    assert ran.answer["batches"] == 6


def test_verify_tells_small_files_missing_parts_and_lost_promises(used: Path, run: Run) -> None:
    good = contents(used)
    older, newer = sorted(name for name in good if name.endswith(".log"))
    (snapshot,) = (name for name in good if name.endswith(".checkpoint"))

    def damage_of(changed: dict[str, bytes | None]) -> list[dict[str, Any]]:
        for name, data in (good | changed).items():
            if data is None:
                (used / name).unlink()
            else:
                (used / name).write_bytes(data)
        ran = run("verify", "--data-dir", used)
        assert ran.code == 1
        found: list[dict[str, Any]] = ran.answer["damage"]
        return found

    for name in ("quorum-state", "flushed-mark"):
        (found,) = damage_of({name: bytes(byte ^ 1 for byte in good[name])})
        assert found["file"] == name
    (found,) = damage_of({newer: None})
    assert (found["offset"], found["what"]) == (6, "the log ends at offset 6, but 7 was flushed")
    (found,) = damage_of({older: None})
    assert "begins at offset 6" in found["what"]
    (found,) = damage_of({snapshot: None})
    assert "newest snapshot ends at 0" in found["what"]
    for name, data in good.items():
        (used / name).write_bytes(data)
    (used / newer).unlink()
    open_journal(used).close()
    ran = run("info", "--data-dir", used)
    assert (ran.code, ran.answer["repairs_up_to_offset"]) == (0, 7)
    assert [found["offset"] for found in ran.answer["damage"]] == [6]


def test_an_unflushed_torn_tail_is_no_damage(used: Path, run: Run) -> None:
    newest = max(used.glob("*.log"))
    with newest.open("ab") as file:
        file.write(b"SMB1 half a batch")
    before = contents(used)
    assert run("verify", "--data-dir", used).code == 0
    assert run("info", "--data-dir", used).answer["unflushed_torn_bytes"] == 17
    assert contents(used) == before


@pytest.mark.parametrize("output_format", ["table", "plain"])
def test_people_get_text(
    used: Path, capsys: pytest.CaptureFixture[str], output_format: str
) -> None:
    capsys.readouterr()
    for command in ("info", "verify"):
        words = ["storage", command, "--data-dir", str(used), "--format", output_format]
        assert run_cli(cli, words) == 0
    shown = capsys.readouterr().out
    assert DISK_ID in shown
    assert "00000000000000000004.log" in shown
    (used / "quorum-state").write_bytes(b"{}")
    assert run_cli(cli, words) == 1
    failed = capsys.readouterr()
    assert "quorum-state" in failed.out
    assert "1 places are damaged" in failed.err
