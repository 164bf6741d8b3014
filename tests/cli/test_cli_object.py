"""Commands about objects and buckets: dumps, addresses, and the precheck of a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.framework import output
from streammeta.cli.framework.output import run_cli
from streammeta.cli.local.local_cluster import free_ports
from streammeta.cli.root import cli
from streammeta.storage.errors import StoreRejectedError
from streammeta.storage.object_format.composite import LinkedObject, encode_composite
from streammeta.storage.object_format.index_block import IndexEntry
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store import opening
from streammeta.storage.object_store.opening import open_object_store
from tests.kit.built_objects import ObjectBuilder, built_object
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.real_cluster import streammeta
from tests.storage.format_objects import PUBLISHED_LINES, published_object
from tests.storage.kafka_batches import PARTITION, PRODUCERS, ZSTD, kafka_batch, kafka_record
from tests.storage.s3_servers import running_ministack


@pytest.fixture(scope="module")
def published() -> bytes:
    """The object of the published dump, with the published payloads of stream 3."""
    return published_object(PRODUCERS, PARTITION).data


@pytest.fixture
def sound(published: bytes, tmp_path: Path) -> Path:
    """A file of that object, called by its id."""
    (tmp_path / "78").write_bytes(published)
    return tmp_path / "78"


def dump(*words: str | Path) -> int:
    return output.run_cli(cli, ["object", "dump", *map(str, words)])


def document(*words: str | Path) -> dict[str, Any]:
    """The JSON object of `dump`, with its `exit_code`."""
    return streammeta("object", "dump", *map(str, words))


def kafka_object(*payloads: bytes) -> bytes:
    builder = ObjectBuilder()
    builder.write([RecordBatch(4, 0, 10 * i, 10, payload) for i, payload in enumerate(payloads)])
    return builder.finish().data


def test_a_published_object_is_shown_alike(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dump("--decode", "metastream", "--stream", "3", sound) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(PUBLISHED_LINES)] == PUBLISHED_LINES
    assert lines[len(PUBLISHED_LINES) :][0] == (
        "===========StreamRecordBatch{streamId=3, epoch=0, baseOffset=4, count=1, size=138}"
    )
    assert lines[-4] == "key=PRODUCER_SNAPSHOTS"
    assert lines[-3].startswith("offset=50555, content=[ProducerStateEntry(producerId=7001,")
    assert lines[-2:] == [
        "===========StreamRecordBatch{streamId=3, epoch=0, baseOffset=5, count=1, size=48}",
        'key=PARTITION, value={"s":0,"c":0,"r":50540,"cs":false}',
    ]


def test_as_many_records_show_as_asked_for(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sound.rename(sound.with_name("object"))
    shown = {}
    for words in ((), ("--records", "3"), ("--no-records",), ("--records", "0", "--stream", "5")):
        assert dump(*words, path) == 0
        lines = capsys.readouterr().out.splitlines()
        shown[words] = (sum(line.startswith("=====") for line in lines), lines[-1])
        assert "objectId" not in lines[len(PUBLISHED_LINES) - 1]
    assert shown[()][0] == 422
    assert shown[("--records", "3")] == (3, "records not shown: 419")
    assert shown[("--no-records",)] == (0, "records not shown: 422")
    assert shown[("--records", "0", "--stream", "5")] == (0, "records not shown: 84")


def test_the_same_in_json(sound: Path) -> None:
    found = document("--decode", "metastream", "--stream", "3", sound)
    assert (found["exit_code"], found["ok"]) == (0, True)
    assert (found["object_id"], found["size"], found["kind"]) == (78, 5242306, "normal")
    assert found["footer"] == {"index_position": 5242006, "index_size": 252}
    assert len(found["index"]) == 7
    assert found["index"][1] == {
        "stream_id": 4,
        "start_offset": 50390,
        "end_offset": 51410,
        "record_count": 68,
        "position": 262,
        "size": 1060062,
    }
    assert found["ranges"][1] == {"stream_id": 4, "start_offset": 50390, "end_offset": 55430}
    assert found["faults"] == []
    assert [record["base_offset"] for record in found["records"]] == [4, 5]
    assert found["records"][1]["meta"]["value"]["r"] == 50540


def test_kafka_batches_show_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [kafka_record(0, b"k", b"v\x1b" + bytes(100)), kafka_record(1, None, None)]
    path = tmp_path / "object"
    path.write_bytes(
        kafka_object(
            kafka_batch(0, records, producer=(7002, 0, 5400)),
            kafka_batch(10, records, codec=ZSTD),
            b"no batch",
        )
    )
    assert dump("--decode", "kafka", path) == 0
    lines = capsys.readouterr().out.splitlines()[4:]
    assert len(lines) == 4 + 4 + 2
    checksum = lines[1].partition(",")[0]
    assert lines[1] == (
        f"{checksum}, baseOffset=0, maxTimestamp=1712451146370, timestampType=CREATE_TIME,"
        " baseOffset=0, lastOffset=1, nextOffset=2, magic=2, producerId=7002, producerEpoch=0,"
        " baseSequence=5400, lastSequence=5401, compressionType=NONE, sizeInBytes=180,"
        " partitionLeaderEpoch=0, isControlBatch=false, isTransactional=false"
    )
    assert lines[2].startswith('  offset=0, timestamp=1712451146370, key="k", value="v\\u001b')
    assert lines[2].endswith("... and 38 bytes, headers=[]")
    assert lines[3].endswith("key=null, value=null, headers=[]")
    assert lines[-1].startswith(
        "not decoded: remaining length for a batch header at byte 0 is 8 bytes"
    )
    assert all(line.isprintable() for line in lines)
    found = document("--decode", "kafka", path)["records"]
    assert [record["batches"][0]["compression"] for record in found[:2]] == ["NONE", "ZSTD"]
    assert found[1]["batches"][0]["records"][0]["key_base64"] == "aw=="
    assert found[2]["not_decoded"]["found"] == "8 bytes"


def test_a_batch_whose_checksum_does_not_hold_is_damage(tmp_path: Path) -> None:
    batch = bytearray(kafka_batch(0, [kafka_record(0, None, b"value")]))
    batch[-2] ^= 1
    path = tmp_path / "object"
    path.write_bytes(kafka_object(bytes(batch)))
    assert document(path)["ok"]
    found = document("--decode", "kafka", path)
    assert (found["exit_code"], found["error"]["code"]) == (1, "CORRUPT_OBJECT")
    assert found["faults"][0]["position"] == 10 + 33
    assert found["records"][0]["batches"][0]["checksum_holds"] is False


def test_a_corrupt_object(
    sound: Path, published: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    sound.write_bytes(published[:-1])
    found = document("--stream", "3", sound)
    assert (found["exit_code"], found["error"]["code"]) == (1, "CORRUPT_OBJECT")
    assert (found["footer"], found["kind"], found["ranges"]) == (None, None, None)
    wanted = "0x88e241b785f4cff7 or 0x88e241b785f4cff8 or 0x88e241b785f4cff9"
    assert found["faults"][0]["expected"] == wanted
    assert [record["base_offset"] for record in found["records"]] == [4, 5]

    assert dump("--stream", "3", sound) == 1
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].startswith("CORRUPT at byte 5242297: footer magic is ")
    assert lines[1].startswith("===========StreamRecordBatch{streamId=3,")
    assert "has 2 corrupt places. At byte 5242297 footer magic" in shown.err


def test_an_object_comes_from_standard_input_too(
    sound: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with sound.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert dump("--no-records", "-") == 0
    assert capsys.readouterr().out.splitlines()[:9] == PUBLISHED_LINES[:9]


def test_an_object_in_a_bucket_is_read_by_ranges(
    published: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryObjectStore()
    opened: list[str] = []
    asked: list[int] = []
    store.put("e4000000/a b/78", published)
    get_range = store.get_range

    def recorded(key: str, start: int = 0, end: int | None = None) -> bytes:
        assert end is not None
        asked.append(end - start)
        return get_range(key, start, end)

    def open_store(uri: str) -> MemoryObjectStore:
        opened.append(uri)
        return store

    monkeypatch.setattr(store, "get_range", recorded)
    monkeypatch.setattr(opening, "open_object_store", open_store)
    address = "s3://data/e4000000/a%20b/78?endpoint=http://127.0.0.1:1&region=r"
    assert dump("--stream", "3", address) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(PUBLISHED_LINES)] == PUBLISHED_LINES
    assert sum(line.startswith("=====") for line in lines) == 2
    assert opened == ["s3://data?endpoint=http://127.0.0.1:1&region=r"]
    assert asked == [48, 8336, 262]
    assert dump("s3://data/absent?region=r") == 1
    assert "object 'absent' does not exist" in capsys.readouterr().err


def test_a_composite_shows_its_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "7"
    path.write_bytes(encode_composite([LinkedObject(101, 3, (IndexEntry(9, 0, 10, 1, 0, 53),))]))
    assert dump(path) == 0
    assert capsys.readouterr().out.splitlines() == [
        "indexStartPosition: 19",
        "indexBlockLength: 36",
        "linkedObjectId=101, bucketId=3, firstIndexEntry=0, indexEntryCount=1",
        "streamId=9, startOffset=0, endOffset=10, recordCount=1, startPosition=0, size=53",
        "objectId=7, ranges=[9:0-10, ]",
    ]
    found = document(path)
    assert found["kind"] == "composite"
    assert found["links"] == [{"object_id": 101, "bucket_id": 3, "index_entries": 1}]


def test_a_relative_object_says_that_its_offsets_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "7"
    records = [RecordBatch(9, 0, 700, 10, b"x" * 7), RecordBatch(9, 0, 710, 1, b"")]
    path.write_bytes(built_object([records], relative=True).data)
    assert dump(path) == 0
    assert capsys.readouterr().out.splitlines() == [
        "indexStartPosition: 83",
        "indexBlockLength: 36",
        "relative: true, to offsets add the start of the stream's range in the metadata",
        "streamId=9, startOffset=0, endOffset=11, recordCount=2, startPosition=0, size=83",
        "objectId=7, ranges=[9:0-11, ]",
        "===========StreamRecordBatch{streamId=9, epoch=0, baseOffset=0, count=10, size=7}",
        "===========StreamRecordBatch{streamId=9, epoch=0, baseOffset=10, count=1, size=0}",
    ]
    found = document(path)
    assert (found["kind"], found["relative"]) == ("normal", True)
    assert found["footer"] == {"index_position": 83, "index_size": 36}
    assert [record["base_offset"] for record in found["records"]] == [0, 10]
    path.write_bytes(built_object([records]).data)
    assert document(path)["relative"] is False


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("absent-file",), 1, "No such file"),
        (("s3://bucket",), 2, "is not an object, expected a file"),
        (("s3://bucket/key?colour=red",), 2, "colour"),
        (("http://host/key",), 2, "is not an object, expected a file"),
        (("--records", "3", "--no-records", "x"), 2, "not both"),
        (("--decode", "morse", "x"), 2, "morse"),
    ],
)
def test_what_can_not_be_dumped_is_said(
    words: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dump(*words) == code
    assert said in capsys.readouterr().err
    found = document(*words)
    assert (found["exit_code"], found["ok"]) == (code, False)
    assert said in found["error"]["message"]


def run_json(*words: str) -> tuple[int, dict[str, Any]]:
    answer = streammeta("s3", *words)
    return answer.pop("exit_code"), answer


@pytest.mark.s3
def test_a_good_server_passes_all_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with running_ministack() as endpoint:
        endpoint.create_bucket("data")
        assert run_cli(cli, ["s3", "check", endpoint.uri("data")]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        lines = out.splitlines()
        assert [line[:7] for line in lines[:8]] == ["[ OK ] "] * 8
        assert lines[8].startswith("checksums with which this server rejects damaged bytes: md5")
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
    monkeypatch.setattr(opening, "open_object_store", lambda _: store)
    assert run_cli(cli, ["s3", "check", "s3://data"]) == 1
    out, err = capsys.readouterr()
    assert "[FAILED] Upload multipart object: no copies here" in out
    assert "[ OK ] Create an object once" in out
    assert "3 of 8 steps failed" in err


def test_a_server_that_is_not_there_is_told() -> None:
    (port,) = free_ports(1)
    address = f"s3://b?endpoint=http://127.0.0.1:{port}&accessKey=i&secretKey=hidden"
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
