"""S3 stores: addresses in two forms, and trouble, told byte for byte by a server in the test."""

from __future__ import annotations

import email.utils
import io
import mmap
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, CredentialRetrievalError, TokenRetrievalError

from streammeta.cli.local.local_cluster import free_ports
from streammeta.storage import errors
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.address import Checksum, S3Config
from streammeta.storage.object_store.protocol.base import MultipartUpload, UploadedPart
from streammeta.storage.object_store.protocol.retry import RetryPolicy
from streammeta.storage.object_store.s3 import s3_client
from streammeta.storage.object_store.s3.s3 import S3ObjectStore
from streammeta.storage.object_store.s3.s3_client import as_view, sendable

FAST = RetryPolicy(attempts=3, first_delay_s=0.001, longest_delay_s=0.002)


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer; `length` is the Content-Length told, when it is not that of the body."""

    status: int
    body: bytes = b""
    length: int | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def error(status: int, code: str) -> Answer:
        text = f"<Error><Code>{code}</Code><Message>because</Message></Error>"
        return Answer(status, text.encode())


@dataclass
class Script:
    """Answers in order, the last one again and again; `seen` holds the requests."""

    answers: list[Answer]
    seen: list[str] = field(default_factory=list)
    signatures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, request: str, signature: str) -> Answer:
        with self.lock:
            self.seen.append(request)
            self.signatures.append(signature)
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def scripted(
    *answers: Answer, keys: bool = True, checksum: Checksum = Checksum.MD5
) -> Iterator[tuple[S3ObjectStore, Script]]:
    script = Script(list(answers))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = script.next(
                f"{self.command} {self.path}", self.headers.get("Authorization", "")
            )
            self.send_response(answer.status)
            length = len(answer.body) if answer.length is None else answer.length
            self.send_header("Content-Length", str(length))
            self.send_header("Last-Modified", "Sat, 21 Nov 2026 00:00:00 GMT")
            self.send_header("ETag", '"e"')
            for name, value in answer.headers:
                self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Keep the test output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    store = S3ObjectStore(
        S3Config(
            "bucket",
            f"http://127.0.0.1:{server.server_port}",
            "r",
            "id" if keys else None,
            "secret" if keys else None,
            path_style=True,
            checksum=checksum,
        ),
        FAST,
    )
    try:
        yield store, script
    finally:
        store.close()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "InvalidAccessKeyId"), (403, "SignatureDoesNotMatch"), (400, "ExpiredToken")],
)
def test_wrong_credentials_are_told_and_not_tried_again(status: int, code: str) -> None:
    with scripted(Answer.error(status, code)) as (store, script):
        with pytest.raises(errors.AccessDeniedError, match=f"{code}.*check AWS_ACCESS_KEY_ID"):
            store.check()
        assert len(script.seen) == 1


def test_credentials_that_were_refused_are_read_again_from_their_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setattr(s3_client, "_LOOKED_AGAIN_S", 0.0)

    def rotate(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key=s\n")

    rotate("FIRST")
    refused = Answer.error(403, "InvalidAccessKeyId")
    page = Answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
    with scripted(refused, refused, page, keys=False) as (store, script):
        view = store.until(time.monotonic() + 60)
        with pytest.raises(errors.AccessDeniedError):
            store.check()
        rotate("SECOND")
        with pytest.raises(errors.AccessDeniedError):
            store.check()
        view.check()
        used = [signature.split("/")[0].rpartition("=")[2] for signature in script.signatures]
        assert used == ["FIRST", "FIRST", "SECOND"]


@pytest.mark.parametrize(
    "error",
    [
        CredentialRetrievalError(provider="custom-process", error_msg="the process failed"),
        TokenRetrievalError(provider="sso", error_msg="no connection"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_credentials_that_could_not_be_fetched_may_come_later(error: BotoCoreError) -> None:
    translated = s3_client.translate(error, bucket="bucket", endpoint="here")
    assert isinstance(translated, errors.AccessDeniedError)
    assert translated.may_pass


def test_a_denied_head_has_no_words_and_is_still_understood() -> None:
    with (
        scripted(Answer(403)) as (store, _),
        pytest.raises(errors.AccessDeniedError, match="check AWS_ACCESS_KEY_ID"),
    ):
        store.head("key")


def test_missing_credentials_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    store = open_object_store("s3://bucket?endpoint=http://127.0.0.1:9")
    with pytest.raises(errors.AccessDeniedError, match="AWS_ACCESS_KEY_ID"):
        store.check()
    store.close()


def test_credentials_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-env")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with scripted(Answer(200, b"data"), keys=False) as (store, script):
        assert store.get_range("key") == b"data"
        assert "Credential=from-env/" in script.signatures[0]
    with scripted(Answer(200, b"data")) as (store, script):
        assert store.get_range("key") == b"data"
        assert "Credential=id/" in script.signatures[0]


def test_connection_refused_names_the_endpoint() -> None:
    (port,) = free_ports(1)
    store = S3ObjectStore(S3Config("b", f"http://127.0.0.1:{port}", "r", "id", "secret"), FAST)
    with pytest.raises(errors.StoreUnavailableError, match=f"127.0.0.1:{port}"):
        store.put("key", b"x")
    store.close()


@pytest.mark.parametrize(
    ("status", "code"),
    [(500, "InternalError"), (502, "x"), (503, "SlowDown"), (429, "x"), (408, "RequestTimeout")],
)
def test_what_may_pass_is_tried_again(status: int, code: str) -> None:
    with scripted(Answer.error(status, code), Answer(200, b"data")) as (store, script):
        assert store.get_range("key") == b"data"
        assert len(script.seen) == 2
    with scripted(Answer.error(status, code)) as (store, script):
        with pytest.raises(errors.StoreUnavailableError) as caught:
            store.get_range("key")
        assert len(script.seen) == FAST.attempts
        assert caught.value.throttled is (status in (429, 503))


LISTINGS: tuple[tuple[Callable[[S3ObjectStore], Iterator[Any]], str, str, str], ...] = (
    (lambda s: s.list_objects(), "ListBucketResult", "NextContinuationToken", "continuation-token"),
    (lambda s: s.list_old_versions(), "ListVersionsResult", "NextKeyMarker", "key-marker"),
    (
        lambda s: s.list_multipart_uploads(),
        "ListMultipartUploadsResult",
        "NextKeyMarker",
        "key-marker",
    ),
)


@pytest.mark.parametrize(("listed", "document", "field", "option"), LISTINGS)
def test_a_listing_follows_its_pages_to_the_end(
    listed: Callable[[S3ObjectStore], Iterator[Any]], document: str, field: str, option: str
) -> None:
    pages = [
        f"<{document}><IsTruncated>true</IsTruncated><{field}>{n}</{field}></{document}>"
        for n in (1, 2)
    ] + [f"<{document}><IsTruncated>false</IsTruncated></{document}>"]
    with scripted(*(Answer(200, body.encode()) for body in pages)) as (store, script):
        assert list(listed(store)) == []
        found = [re.findall(rf"[?&]{option}=([^&]*)", request) for request in script.seen]
        assert found == [[], ["1"], ["2"]]
        assert all("encoding-type=url" in request for request in script.seen)


@pytest.mark.parametrize(("listed", "document", "field", "option"), LISTINGS)
def test_a_page_that_names_itself_as_the_next_one_ends_the_listing(
    listed: Callable[[S3ObjectStore], Iterator[Any]], document: str, field: str, option: str
) -> None:
    body = f"<{document}><IsTruncated>true</IsTruncated><{field}>1</{field}></{document}>"
    with (
        scripted(Answer(200, body.encode())) as (store, script),
        pytest.raises(errors.StoreRejectedError, match="next"),
    ):
        list(listed(store))
    assert len(script.seen) == 2


PROLOGUE = b'<?xml version="1.0" encoding="UTF-8"?>\n'


@pytest.mark.parametrize(
    ("body", "throttled"),
    [
        (PROLOGUE + Answer.error(200, "SlowDown").body, 1),
        (PROLOGUE + Answer.error(200, "InternalError").body, 0),
        (PROLOGUE + b"<ListBucketResult><IsTruncated>false</IsTruncated>", 0),
        (b"", 0),
    ],
)
def test_what_is_no_page_is_asked_for_again_though_its_status_is_of_success(
    body: bytes, throttled: int
) -> None:
    page = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    with scripted(Answer(200, body), Answer(200, page)) as (store, script):
        assert list(store.list_objects()) == []
        assert len(script.seen) == 2
        assert store.metrics().of("list_objects").throttled == throttled


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [
        (400, "InvalidRequest", "check endpoint, region"),
        (409, "x", "check endpoint, region"),
        (405, "x", "check endpoint, region"),
        (501, "NotImplemented", "check endpoint, region"),
        (400, "BadDigest", "damaged on the way to bucket 'bucket'"),
    ],
)
def test_what_will_never_pass_is_not_tried_again(status: int, code: str, advice: str) -> None:
    with scripted(Answer.error(status, code)) as (store, script):
        with pytest.raises(errors.StoreRejectedError, match=advice):
            store.put("key", b"x")
        assert len(script.seen) == 1


def test_a_conditional_put_that_meets_another_one_asks_again_who_won() -> None:
    conflict = Answer.error(409, "ConditionalRequestConflict")
    with scripted(conflict, Answer(200)) as (store, script):
        store.put("key", b"x", if_absent=True)
        assert len(script.seen) == 2
    with scripted(Answer.error(412, "PreconditionFailed")) as (store, script):
        with pytest.raises(errors.ObjectExistsError, match="'key'"):
            store.put("key", b"x", if_absent=True)
        assert [line.split()[0] for line in script.seen] == ["PUT"]


def test_the_server_says_when_to_ask_again() -> None:
    in_an_hour = email.utils.formatdate(time.time() + 3600, usegmt=True)
    for told, least, most in (("0.01", 0.01, 0.01), (in_an_hour, 3000, 3600), ("soon", 0, 0)):
        busy = Answer(503, Answer.error(503, "SlowDown").body, headers=(("Retry-After", told),))
        with scripted(busy) as (store, _), pytest.raises(errors.StoreUnavailableError) as caught:
            store.until(time.monotonic() + 2).check()
        assert least <= (caught.value.retry_after_s or 0) <= most


@pytest.mark.parametrize(
    ("told", "body"),
    [
        ("", b"0123456789"),
        ("bytes 0-9/10", b"0123456789"),
        ("bytes 0-3/10", b"0123"),
        ("bytes 2-3/10", b"23"),
        ("bytes 2-5/10", b"23"),
        ("bytes 2-5/*", b"2345"),
    ],
)
def test_a_server_that_answers_another_range_is_refused(told: str, body: bytes) -> None:
    wrong = Answer(206 if told else 200, body, headers=(("Content-Range", told),) if told else ())
    with scripted(wrong) as (store, script):
        with pytest.raises(errors.StoreRejectedError, match=r"\[2, 6\).*'key'"):
            store.get_range("key", 2, 6)
        assert len(script.seen) == 1


def test_a_whole_object_is_held_against_its_stored_checksum() -> None:
    header = ("x-amz-checksum-crc32c", Checksum.CRC32C.digest(b"right"))
    with scripted(
        Answer(200, b"wrong", headers=(header,)),
        Answer(200, b"right", headers=(header,)),
        checksum=Checksum.CRC32C,
    ) as (store, script):
        assert store.get_range("key") == b"right"
        assert len(script.seen) == 2


def test_a_body_that_breaks_off_is_read_again() -> None:
    with scripted(Answer(200, b"half", length=8), Answer(200, b"complete")) as (store, script):
        assert store.get_range("key") == b"complete"
        assert len(script.seen) == 2


def test_a_completed_upload_whose_answer_was_lost_counts_as_completed() -> None:
    parts = [UploadedPart(1, "e", 3)]
    lost = (Answer.error(500, "InternalError"), Answer.error(404, "NoSuchUpload"))
    with scripted(*lost, Answer(200, b"abc")) as (store, script):
        store.complete_multipart(MultipartUpload("key", "id", 0), parts)
        assert [line.split()[0] for line in script.seen] == ["POST", "POST", "HEAD"]
    for proof in (Answer(200, b"other size"), Answer(404)):
        with scripted(*lost, proof) as (store, _), pytest.raises(errors.UploadNotFoundError):
            store.complete_multipart(MultipartUpload("key", "id", 0), parts)


def test_keys_that_could_not_be_deleted_are_reported_with_the_reason() -> None:
    body = (
        b"<DeleteResult><Error><Key>b</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
        b"<Error><Key>c</Key><Code>NoSuchKey</Code></Error>"
        b"<Error><Key>d</Key><Code>SlowDown</Code><Message>wait</Message></Error></DeleteResult>"
    )
    with scripted(Answer(200, body)) as (store, _):
        result = store.delete_many(["a", "b", "c", "d"])
    assert result.deleted == ("a", "c")
    denied = "AccessDenied: no; these credentials need the permission s3:DeleteObject"
    assert result.failed == {"b": denied, "d": "SlowDown: wait"}
    assert result.throttled == {"d"}


# Bodies in the caller's memory


def test_bytes_are_sent_as_they_are() -> None:
    data = b"abc"
    assert as_view(data) is data
    assert sendable(data) is data


def test_a_view_reads_like_a_file_over_its_bytes() -> None:
    seed = 11
    rng = random.Random(seed)
    data = rng.randbytes(100_000)
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    body, like = sendable(as_view(memoryview(memory))), io.BytesIO(data)
    assert not isinstance(body, bytes)
    for _ in range(300):
        size, offset, whence = rng.randrange(4_000), rng.randrange(110_000), rng.randrange(3)
        if rng.random() < 0.5:
            offset = -offset if whence == io.SEEK_END else offset
            assert body.seek(offset, whence) == like.seek(offset, whence), f"seed {seed}"
        assert body.read(size) == like.read(size), f"seed {seed}"
        assert body.tell() == like.tell(), f"seed {seed}"
    body.seek(0)
    assert body.read() == data
    body.seek(0)
    pieces = list(iter(lambda: body.read(1 << 20), b""))
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) < len(data), "a copy of all of it was made"


FULL = S3Config(
    "automq", "http://192.0.2.1:9000", "ignore-here", "id", "a+b/c=d e&f", True, Checksum.CRC32C
)


def test_the_server_form_is_understood() -> None:
    config = S3Config.from_uri(
        "s3://192.0.2.1:9000?s3-access-key=minioadmin&s3-secret-key=a+b/c&s3-region=ignore-here"
        "&s3-endpoint-protocol=http&s3-data-bucket=automq&s3-path-style=true&s3-ops-bucket=ops"
        "&cluster-id=5kilSYquT962mUNQ8dL7qA"
    )
    assert config == S3Config(
        "automq", "http://192.0.2.1:9000", "ignore-here", "minioadmin", "a+b/c", True
    )
    assert S3Config.from_uri("s3://host?s3-data-bucket=b") == S3Config(
        "b", "https://host", path_style=True
    )


@pytest.mark.parametrize(
    "config",
    [
        FULL,
        S3Config("b"),
        S3Config("b", "https://[::1]:9000", path_style=False),
        S3Config("b", "http://h:1", "r", path_style=True, checksum=Checksum.CRC32),
    ],
)
def test_what_is_written_is_read_again(config: S3Config) -> None:
    assert S3Config.from_uri(config.to_uri()) == config


def test_the_server_form_holds_all_but_the_checksum() -> None:
    read = S3Config.from_uri(FULL.to_server_uri())
    assert read == S3Config(
        FULL.bucket, FULL.endpoint_url, FULL.region, FULL.access_key, FULL.secret_key, True
    )
    with pytest.raises(ValueError, match="endpoint"):
        S3Config("b").to_server_uri()


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("s3://h:1?s3-region=r", "no bucket, expected s3-data-bucket"),
        ("s3://h:1?s3-data-bucket=b&endpoint=http://x", "option 'endpoint'"),
        ("s3://h:1?s3-data-bucket=b&s3-data-bucket=c", "'s3-data-bucket' 2 times"),
        ("s3://h:1?s3-data-bucket=b&s3-endpoint-protocol=ftp", "expected http://"),
        ("s3://h:1?s3-data-bucket=b&s3-path-style=1", "expected true or false"),
        ("s3://h:1?s3-data-bucket=b&s3-secret-key=hidden", "expected both or none"),
        ("s3://b?checksum=sha1&accessKey=i&secretKey=hidden", "expected one of md5, crc32, crc32c"),
        ("s3://b?cluster-id=x", "option 'cluster-id'"),
        ("s3://", "expected s3://bucket"),
        ("s3://b/path", "without a path"),
        ("s3://b?bucket=c", "option 'bucket'"),
        ("s3://b?region=a&region=b", "option 'region' 2 times"),
        ("s3://b?region=", "option 'region'"),
        ("s3://b?pathStyle=yes", "expected true or false"),
        ("s3://b?endpoint=host:9000", "expected http://"),
        ("s3://b?accessKey=a", "expected both or none"),
        ("s3://b?secretKey=hidden", "expected both or none"),
        ("file://relative/path", "expected file:///absolute"),
        ("file:///a?b=c", "expected file:///absolute"),
        ("gs://b?secretKey=hidden", "expected s3://bucket"),
        ("/a/b", "expected s3://bucket"),
    ],
)
def test_a_wrong_address_is_told_without_showing_a_secret(uri: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        open_object_store(uri)
    assert "hidden" not in str(caught.value)


def test_an_s3_address_is_read_whole() -> None:
    config = S3Config.from_uri(
        "s3://data?endpoint=http%3A%2F%2F127.0.0.1:5590&region=eu-1&pathStyle=false"
        "&accessKey=id&secretKey=top%2Bsecret"
    )
    assert config == S3Config("data", "http://127.0.0.1:5590", "eu-1", "id", "top+secret", False)
    assert "top+secret" not in repr(config)
    assert S3Config.from_uri("s3://data") == S3Config("data")
    assert S3Config.from_uri("s3://data?endpoint=http://h:1").path_style is True


def test_the_address_says_which_store_it_is(tmp_path: Path) -> None:
    spaced = tmp_path / "with space"
    spaced.mkdir()
    store = open_object_store(f"file://{str(spaced).replace(' ', '%20')}")
    assert isinstance(store, LocalObjectStore)
    store.put("key", b"x")
    assert (spaced / "objects/key").read_bytes() == b"x"
    assert isinstance(open_object_store("s3://b?region=r"), S3ObjectStore)
