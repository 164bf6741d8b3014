"""`streammeta snapshot`: what an export holds, and that nothing but an export is ever replaced."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from streammeta.cli.framework.client import ControllerClient
from streammeta.cli.recovery.snapshot_command import DirectoryTarget
from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.snapshot.checkpoint_file import CheckpointReader, write_checkpoint
from streammeta.storage.object_store.opening import open_object_store
from tests.kit.real_cluster import put, running_cluster, streammeta
from tests.storage.s3_servers import running_moto

ID = SnapshotId(EndOffset(77), Epoch(3))


def checkpoint(path: Path, **more: Any) -> Path:
    """A checkpoint with sections of every type of column."""
    sections = {
        "streams": {"stream_id": np.arange(5), "state": np.array([0, 1, 0, 1, 0], np.int8)},
        "nodes": {"node_id": np.array([7]), "failover": np.array([True]), "wal_config": ["w"]},
        "kvs": {"key": ["a", "b"], "value": [b"\x00", b""], "version": np.array([1, 2])},
        "ranges": {"stream_id": np.array([], np.int64)},
        **more,
    }
    with path.open("wb") as file:
        write_checkpoint(file, ID, "the-cluster", sections)
    return path


def export(source: Path, target: Path | str, *words: str) -> tuple[int, dict[str, Any]]:
    """Run `snapshot export` of a file; its exit code and its answer."""
    to = ("--to", "parquet", str(target))
    answer = streammeta("snapshot", "export", str(source), *to, *words)
    return answer["exit_code"], answer


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_export_holds_every_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = checkpoint(tmp_path / "c"), tmp_path / "out" / "deep"
    code, answer = export(source, target)
    assert (code, answer["ok"]) == (0, True)
    assert capsys.readouterr().err == "", "progress is for terminals"
    with CheckpointReader.open(source) as reader:
        assert {path.name for path in target.iterdir()} == {
            *(f"{section}.parquet" for section in reader.entries),
            "manifest.json",
        }
        for section in reader.entries:
            got = pq.read_table(target / f"{section}.parquet")
            assert got.equals(reader.table(section)), section
    manifest = json.loads((target / "manifest.json").read_text())
    assert manifest["complete"] is True
    named = (manifest["cluster_id"], manifest["end_offset"], manifest["epoch"])
    assert named == ("the-cluster", 77, 3)
    rows = {file["section"]: file["rows"] for file in manifest["files"]}
    assert rows == {"streams": 5, "nodes": 1, "kvs": 2, "ranges": 0}
    for file in manifest["files"]:
        assert (target / file["file"]).stat().st_size == file["bytes"]
    assert answer["files"] == manifest["files"]


def test_a_target_that_is_not_empty_is_refused_as_it_is(tmp_path: Path) -> None:
    source, target = checkpoint(tmp_path / "c"), tmp_path / "out"
    target.mkdir()
    (target / "precious.txt").write_text("mine")
    code, answer = export(source, target)
    assert (code, answer["ok"]) == (1, False)
    assert "precious.txt" in answer["error"]["message"]
    assert "--overwrite" in answer["error"]["message"]
    assert files(target) == {"precious.txt": b"mine"}


def test_overwriting_replaces_an_export_and_leaves_foreign_files_alone(tmp_path: Path) -> None:
    target = tmp_path / "out"
    old = checkpoint(tmp_path / "old", gone={"x": np.arange(2)})
    assert export(old, target)[0] == 0
    (target / "precious.parquet").write_text("mine")
    new = checkpoint(tmp_path / "new")
    assert export(new, target, "--overwrite")[0] == 0
    there = files(target)
    assert there["precious.parquet"] == b"mine"
    assert "gone.parquet" not in there, "a section of the replaced export alone"
    assert set(there) == {
        *("precious.parquet", "manifest.json"),
        *("streams.parquet", "nodes.parquet", "kvs.parquet", "ranges.parquet"),
    }


@pytest.mark.parametrize(
    "manifest", [None, "no json", '{"version": 1}', '{"version": 9, "files": []}']
)
def test_files_of_others_are_never_overwritten(tmp_path: Path, manifest: str | None) -> None:
    source, target = checkpoint(tmp_path / "c"), tmp_path / "out"
    target.mkdir()
    (target / "streams.parquet").write_text("mine")
    if manifest is not None:
        (target / "manifest.json").write_text(manifest)
    before = files(target)
    code, answer = export(source, target, "--overwrite")
    assert (code, answer["ok"]) == (1, False)
    assert files(target) == before


def test_an_interrupted_export_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = checkpoint(tmp_path / "c"), tmp_path / "out"
    write = DirectoryTarget.write

    def write_until_full(self: DirectoryTarget, name: str, data: memoryview) -> None:
        if name == "kvs.parquet":
            raise OSError(28, "no space left")
        write(self, name, data)

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryTarget, "write", write_until_full)
        code, answer = export(source, target)
    assert (code, answer["error"]["code"]) == (1, "OS")
    assert json.loads((target / "manifest.json").read_text())["complete"] is False
    assert export(source, target, "--overwrite")[0] == 0
    assert json.loads((target / "manifest.json").read_text())["complete"] is True


@pytest.mark.parametrize("cut", [10, -1])
def test_a_damaged_checkpoint_is_refused_before_any_write(tmp_path: Path, cut: int) -> None:
    source, target = checkpoint(tmp_path / "c"), tmp_path / "out"
    source.write_bytes(source.read_bytes()[:cut])
    code, answer = export(source, target)
    assert (code, answer["error"]["code"]) == (1, "CHECKPOINT")
    assert not target.exists()


@pytest.mark.parametrize(
    "words",
    [["--to", "parquet", "out"], ["c", "--to", "csv", "out"], ["c", "--to", "parquet"], ["c"]],
)
def test_source_and_target_are_required(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.delenv("STREAMMETA_CONNECT", raising=False)
    answer = streammeta("snapshot", "export", *words)
    assert (answer["exit_code"], answer["error"]["code"]) == (2, "USAGE")


@pytest.mark.parametrize("target", ["http://x/y", "s3://", "s3://b/p?nonsense=1"])
def test_a_target_that_does_not_parse_is_explained(tmp_path: Path, target: str) -> None:
    code, answer = export(checkpoint(tmp_path / "c"), target)
    assert (code, answer["error"]["code"]) == (1, "CONFIG")
    assert answer["error"]["message"].startswith("--to: ")


def test_info_shows_what_a_file_holds_and_checks_all_of_it(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "c")
    answer = streammeta("snapshot", "info", str(source))
    assert (answer["cluster_id"], answer["end_offset"], answer["epoch"]) == ("the-cluster", 77, 3)
    assert {section["section"]: section["rows"] for section in answer["sections"]}["streams"] == 5
    damaged = bytearray(source.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    source.write_bytes(damaged)
    answer = streammeta("snapshot", "info", str(source))
    assert (answer["exit_code"], answer["error"]["code"]) == (1, "CHECKPOINT")


@pytest.mark.s3
def test_a_prefix_of_a_bucket_is_written_like_a_directory(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "c")
    with running_moto() as server:
        server.create_bucket("lake")
        uri = server.uri("lake")
        store = open_object_store(uri)
        store.put("other/streams.parquet", b"mine")
        store.put("maps/todays", b"mine")
        target = uri.replace("s3://lake?", "s3://lake/maps/today?")
        code, answer = export(source, target)
        assert (code, answer["target"]) == (0, "s3://lake/maps/today"), "no secret is shown"
        found = {info.key for info in store.list_objects()}
        assert found == {
            *("other/streams.parquet", "maps/todays", "maps/today/manifest.json"),
            *(f"maps/today/{name}.parquet" for name in ("streams", "nodes", "kvs", "ranges")),
        }
        kvs = pq.read_table(io.BytesIO(store.get_range("maps/today/kvs.parquet")))
        assert kvs.column("key").to_pylist() == ["a", "b"]
        assert export(source, target)[0] == 1
        assert export(source, target, "--overwrite")[0] == 0
        assert {info.key for info in store.list_objects()} == found
        store.close()


@pytest.mark.process
def test_a_running_cluster_is_exported(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1) as cluster:
        with ControllerClient(cluster.endpoints) as client:
            for key in ("one", "two"):
                put(client, key, f"value of {key}")
        target = tmp_path / "out"
        to = ("--to", "parquet", str(target))
        answer = streammeta("snapshot", "export", "--connect", cluster.connect, *to)
        assert answer["ok"], answer
        keys = pq.read_table(target / "kvs.parquet").to_pydict()
        assert dict(zip(keys["key"], keys["value"], strict=True)) == {
            "one": b"value of one",
            "two": b"value of two",
        }
