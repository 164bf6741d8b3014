"""`streammeta s3` writes and explains addresses, and tells whether a store can be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli import s3_command
from streammeta.cli.output import run_cli
from streammeta.cli.root import cli
from streammeta.storage.errors import StoreRejectedError
from streammeta.storage.object_store.address import open_object_store
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.real_cluster import streammeta
from tests.storage.s3_servers import free_port, running_moto


def run_json(*words: str) -> tuple[int, dict[str, Any]]:
    answer = streammeta("s3", *words)
    return answer.pop("exit_code"), answer


@pytest.mark.s3
def test_a_good_server_passes_all_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with running_moto() as endpoint:
        endpoint.create_bucket("data")
        assert run_cli(cli, ["s3", "check", endpoint.uri("data")]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        lines = out.splitlines()
        assert [line[:7] for line in lines[:8]] == ["[ OK ] "] * 8
        assert lines[8].startswith("checksums that this server refuses damaged bytes by: none")
        store = open_object_store(endpoint.uri("data"))
        assert list(store.list_objects()) == []
        store.close()

        code, answer = run_json("check", endpoint.uri("absent"))
        assert (code, answer["ok"], answer["error"]["code"]) == (1, False, "UNSUITABLE")
        first = answer["error"]["details"]["steps"][0]
        assert not first["ok"]
        assert "bucket 'absent' does not exist" in first["reason"]


def test_a_directory_passes_too_and_json_names_the_steps(tmp_path: Path) -> None:
    code, answer = run_json("check", f"file://{tmp_path}")
    assert (code, answer["ok"], answer["left_behind"]) == (0, True, "")
    assert len(answer["steps"]) == 8
    assert all(step["ok"] for step in answer["steps"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_failed_step_is_shown_with_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryObjectStore()
    store.fail_next("copy_part", StoreRejectedError("no copies here"))
    monkeypatch.setattr(s3_command, "open_object_store", lambda _: store)
    assert run_cli(cli, ["s3", "check", "s3://data"]) == 1
    out, err = capsys.readouterr()
    assert "[FAILED] Upload multipart object: no copies here" in out
    assert "[ OK ] Create an object once" in out
    assert "3 of 8 steps failed" in err


def test_a_server_that_is_not_there_is_told() -> None:
    address = f"s3://b?endpoint=http://127.0.0.1:{free_port()}&accessKey=i&secretKey=hidden"
    code, answer = run_json("check", address, "--step-timeout", "0.3")
    assert code == 1
    assert "hidden" not in json.dumps(answer)
    assert not any(step["ok"] for step in answer["error"]["details"]["steps"])


@pytest.mark.parametrize(
    "words",
    [
        ("check", "s3://b/path"),
        ("check", "gs://b"),
        ("check", "s3://b?checksum=sha1"),
        ("check",),
        ("url",),
        ("url", "s3://b", "--bucket", "b"),
        ("url", "--bucket", "b", "--access-key", "i"),
        ("url", "--bucket", "b", "--endpoint", "host:9000"),
    ],
)
def test_a_wrong_call_is_told_with_exit_code_2(words: tuple[str, ...]) -> None:
    code, answer = run_json(*words)
    assert (code, answer["ok"], answer["error"]["code"]) == (2, False, "USAGE")


def test_an_address_is_written_and_explained() -> None:
    options = ["--bucket", "data", "--endpoint", "http://192.0.2.1:9000", "--region", "eu-1"]
    keys = ["--access-key", "id", "--secret-key", "a+b", "--checksum", "crc32c"]
    code, written = run_json("url", *options, *keys)
    assert code == 0
    assert written["address"] == (
        "s3://data?endpoint=http%3A%2F%2F192.0.2.1%3A9000&region=eu-1&pathStyle=true&accessKey=id"
        "&secretKey=a%2Bb&checksum=crc32c"
    )
    assert (written["secret_key"], written["access_key"]) == ("given", "id")
    _, explained = run_json("url", written["address"])
    assert explained == written
    _, of_server_form = run_json("url", written["server_form"])
    assert of_server_form["address"] == written["address"].removesuffix("&checksum=crc32c")
    _, amazon = run_json("url", "--bucket", "data")
    assert (amazon["endpoint"], amazon["path_style"]) == ("Amazon S3", False)
    assert amazon["server_form"] is None
    _, by_host = run_json("url", *options, "--host-style")
    assert by_host["path_style"] is False
