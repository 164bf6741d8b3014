"""Maps in files beside a live one: the shell on both, and on a backup."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count as count_from
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.framework.client import ControllerClient
from streammeta.cli.framework.output import run_cli
from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.cli.root import cli
from streammeta.client import StreamClient
from tests.kit.real_cluster import STEADY, describe, put, quorum, running_cluster, streammeta
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.process

_SHELL = [sys.executable, "-m", "streammeta.cli.main", "shell"]


def shell(*words: str, before: Sequence[str] = (), exit_code: int = 0) -> dict[str, Any]:
    """Run one command of the shell; return its one JSON object."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = run_cli(cli, ["shell", *before, "--format", "json", "--", *words])
    assert code == exit_code, said.getvalue()
    answer: dict[str, Any] = json.loads(said.getvalue())
    return answer


def table(answer: dict[str, Any], name: str = "usage") -> list[dict[str, Any]]:
    (document,) = answer["documents"]
    rows: list[dict[str, Any]] = document[name]
    return rows


@dataclass(frozen=True)
class World:
    """A cluster, three copies of its map of one moment, and what was committed since."""

    cluster: LocalCluster
    checkpoint: Path
    export: Path
    backup: str
    offset: int
    """Offset that the copies end at, and later changes begin at."""

    @property
    def copies(self) -> tuple[str, ...]:
        return (str(self.checkpoint), str(self.export), f"{self.backup}@{self.offset}")

    @property
    def live(self) -> tuple[str, ...]:
        return ("--connect", self.cluster.connect)


async def write(cluster: LocalCluster, bucket: str, topics: Sequence[str], payload: bytes) -> None:
    """One node creates a stream a topic, writes to each and commits, its first set object."""
    async with await StreamClient.open(cluster.endpoints, bucket, node_id=7) as client:
        created = await client.create_streams([{"topic": topic} for topic in topics])
        (await client.open_streams(created)).require_all()
        for stream_id in created:
            await client.append(stream_id, payload)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("maps")
    backups = f"file://{root / 'backups'}"
    (root / "backups").mkdir()
    options = (*STEADY, "--backup-store", backups, "--backup-interval-ms", "100")
    with running_cluster(root, 1, options) as cluster:
        bucket = f"file://{root / 'bucket'}"
        asyncio.run(write(cluster, bucket, ["flights", "rails"], b"first"))
        with ControllerClient(cluster.endpoints) as client:
            put(client, "colour", "red")
        quorum(cluster, "snapshot")
        checkpoint = max(root.glob("**/*.checkpoint"))
        offset = int(checkpoint.name.partition("-")[0])
        words = ("--to", "parquet", str(root / "map"))
        assert streammeta("snapshot", "export", str(checkpoint), *words)["ok"]
        wait_until(lambda: reaches(backups, offset), "the backup to reach the checkpoint")
        yield World(cluster, checkpoint, root / "map", backups, offset)


def reaches(backups: str, offset: int) -> bool:
    listed = streammeta("backup", "list", "--from", backups)["restorable"]
    return any(offset <= span["to_offset"] for span in listed)


@pytest.fixture(scope="module")
def grown(world: World) -> World:
    """The same world after a stream was created, written to, and a key was changed."""
    bucket = f"file://{world.export.parent / 'bucket'}"
    asyncio.run(write(world.cluster, bucket, ["ships"], b"second"))
    with ControllerClient(world.cluster.endpoints) as client:
        put(client, "depth", "deep")
    return world


def without_leaders_knowledge(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the documents without the fields that only the leader knows, or may show."""
    left_out = ("key", "state", "wal_config")
    return [
        {name: value for name, value in document.items() if name not in left_out}
        for document in answer["documents"]
    ]


def test_a_copy_in_files_has_the_tree_that_the_cluster_had(world: World) -> None:
    words = ("tree", "/kv", "/nodes", "/objects", "/streams")
    live = without_leaders_knowledge(shell(*words, before=world.live))
    assert {document["path"] for document in live} >= {"/streams/0", "/streams/1", "/nodes/7/info"}
    for copy in world.copies:
        assert without_leaders_knowledge(shell(*words, before=("--file", copy))) == live, copy


def test_bytes_are_counted_by_state_stream_node_tag_and_age(world: World) -> None:
    for before in (("--file", str(world.checkpoint)), world.live):
        by_state = {row["state"]: row for row in table(shell("du", before=before))}
        assert set(by_state) <= {"COMMITTED", "PREPARED"}
        whole = by_state["COMMITTED"]
        assert (whole["objects"] > 0, whole["bytes"] > 0) == (True, True)
        by_stream = table(shell("du", "stream", before=before))
        assert sorted(row["stream_id"] for row in by_stream) == [0, 1]
        by_node = table(shell("du", "node", before=before))
        assert [(row["node_id"], row["objects"]) for row in by_node] == [(7, whole["objects"])]
        by_tag = table(shell("du", "tag", "topic", before=before))
        assert sorted(row["value"] for row in by_tag) == ["flights", "rails"]
        for rows in (by_stream, by_node, by_tag):
            assert abs(sum(row["bytes"] + row["shared_bytes"] for row in rows) - whole["bytes"]) < 3
        by_age = table(shell("du", "age", before=before))
        assert by_age[0] == {
            "age": "under 1 hour",
            "objects": whole["objects"],
            "bytes": whole["bytes"],
        }


def test_two_copies_of_one_moment_are_equal(world: World) -> None:
    for copy in world.copies[1:]:
        answer = shell("diff", copy, before=("--file", str(world.checkpoint)))
        assert answer["documents"][0]["equal"] is True, copy


def test_a_copy_and_the_cluster_differ_by_what_was_committed_since(grown: World) -> None:
    told = []
    for before, other in (
        (("--file", str(grown.checkpoint), *grown.live), "live"),
        (grown.live, str(grown.export)),
    ):
        answer = shell("diff", other, before=before)
        (document,) = answer["documents"]
        assert document["equal"] is False
        assert document["before_offset"] == grown.offset < document["after_offset"]
        assert ("added", 2) in [(row["change"], row["id"]) for row in document["streams_changes"]]
        assert {row["change"] for row in document["objects_changes"]} == {"added"}
        assert document["objects_that_differ"] == len(document["objects_changes"])
        changed = {row["field"]: row for row in document["nodes_changes"]}
        assert changed["node_epoch"]["before"] < changed["node_epoch"]["after"]
        told.append([document[f"{kind}_changes"] for kind in ("streams", "objects", "nodes")])
    assert told[0] == told[1], "whichever of two maps is walked"
    only = shell("diff", "live", "nodes", before=("--file", str(grown.checkpoint), *grown.live))
    assert "streams_changes" not in only["documents"][0]


def test_changes_come_from_an_offset_in_order_and_end_after_as_many_as_asked(grown: World) -> None:
    answer = shell("tail", "2", str(grown.offset), before=grown.live)
    offsets = [change["offset"] for change in answer["changes"]]
    assert len(offsets) == 2
    assert offsets == sorted(offsets)
    assert offsets[0] >= grown.offset
    with ControllerClient(grown.cluster.endpoints) as client:
        put(client, "last", "z")
    every = []
    for count in count_from(3):
        every = shell("tail", str(count), str(grown.offset), before=grown.live)["changes"]
        if every[-1].get("keys") == ["last"]:
            break
    assert every[:2] == answer["changes"]
    kinds = {change["kind"]: change for change in every}
    assert kinds["streams_created"]["first_stream_id"] == 2
    assert kinds["streams_created"]["tags"] == ["topic=ships"]


def test_changes_are_printed_as_they_are_committed(grown: World) -> None:
    """The first line is there while the command still runs."""
    end = describe(grown.cluster).high_watermark
    words = [*_SHELL, *grown.live, "--", "tail", "2", str(end)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        with ControllerClient(grown.cluster.endpoints) as client:
            put(client, "first", "x")
            first = running.stdout.readline()
            assert running.poll() is None
            put(client, "second", "secret-value")
        second = running.stdout.readline()
        assert running.wait(60) == 0
    assert first.split()[1:] == ["kvs_put", "namespaces=", "keys=first", "value_bytes=1"]
    assert "keys=second" in second
    assert "secret-value" not in second


@pytest.mark.parametrize(
    ("words", "code", "exit_code"),
    [
        (("du", "colour"), "USAGE", 2),
        (("du", "tag"), "USAGE", 2),
        (("diff", "/nowhere"), "NO_MAP", 1),
        (("diff", "live"), "NO_CLUSTER", 1),
        (("diff", "/dev/null"), "CHECKPOINT", 1),
        (("diff", "/"), "EXPORT", 1),
        (("tail",), "USAGE", 2),
        (("tail", "two"), "USAGE", 2),
        (("tail", "2"), "NO_CLUSTER", 1),
    ],
)
def test_refusals_explain(world: World, words: tuple[str, ...], code: str, exit_code: int) -> None:
    answer = shell(*words, before=("--file", str(world.checkpoint)), exit_code=exit_code)
    assert answer["error"]["code"] == code
    assert answer["error"]["hint"]


def test_streams_are_found_by_tag_live_and_in_copies(world: World) -> None:
    for before in (world.live, *(("--file", copy) for copy in world.copies)):
        answer = shell("find", "--tag", "topic=rails", before=before)
        assert [entry["path"] for entry in answer["entries"]] == ["/streams/1"], before
        assert shell("find", "--tag", "topic=roads", before=before)["entries"] == []


@pytest.mark.parametrize("position", [0, 40, -1])
def test_a_damaged_checkpoint_is_refused(world: World, tmp_path: Path, position: int) -> None:
    data = bytearray(world.checkpoint.read_bytes())
    data[position] ^= 1
    damaged = tmp_path / "damaged.checkpoint"
    damaged.write_bytes(data)
    answer = shell("ls", "/", before=("--file", str(damaged)), exit_code=1)
    assert answer["error"]["code"] == "CHECKPOINT"


def test_an_export_that_lacks_rows_is_refused(world: World, tmp_path: Path) -> None:
    for file in world.export.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["files"][0]["rows"] += 1
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    answer = shell("ls", "/", before=("--file", str(tmp_path)), exit_code=1)
    assert answer["error"]["code"] == "EXPORT"


@pytest.mark.parametrize(("lines", "is_paged"), [("3", True), ("50", False)])
def test_long_output_is_paged(world: World, tmp_path: Path, lines: str, is_paged: bool) -> None:
    pager, mark = tmp_path / "pager", tmp_path / "paged"
    pager.write_text(f'#!/bin/sh\ncat > "{mark}"\n')
    pager.chmod(0o755)
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [*_SHELL, "--file", str(world.checkpoint), "--", "find", "/streams", "/nodes"],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            env={**os.environ, "PAGER": str(pager), "LINES": lines, "TERM": "xterm"},
            timeout=60,
            check=False,
        )
    finally:
        os.close(theirs)
        os.close(ours)
    assert (done.returncode, done.stderr) == (0, b"")
    assert mark.exists() == is_paged
    if is_paged:
        assert "/streams/1" in mark.read_text().splitlines()
