"""Copies of objects that are too large for one request, and digests that older servers want."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse

from streammeta.storage import errors
from streammeta.storage.object_store.precheck import run_precheck
from streammeta.storage.object_store.protocol.address import S3Config
from streammeta.storage.object_store.protocol.base import MAX_PARTS, MIN_PART_SIZE, ObjectInfo
from streammeta.storage.object_store.protocol.retry import RetryPolicy
from streammeta.storage.object_store.s3 import s3_calls
from streammeta.storage.object_store.s3.s3 import S3ObjectStore
from streammeta.storage.object_store.s3.s3_calls import COPIED_AT_ONCE, part_ranges
from tests.storage.s3_servers import S3Endpoint, running_moto

MIB = 1 << 20
_numbers = itertools.count()


class _Body(io.BytesIO):
    def stream(self) -> Iterator[bytes]:
        yield self.read()


@dataclass
class Server:
    """A server that refuses some requests; `copied_at_most` bytes are copied in one request."""

    store: S3ObjectStore
    client: Any
    copied_at_most: int = 1 << 40
    wants_md5: bool = False
    ignores_conditions: bool = False
    fails_part: int = 0
    replaces_after: int = 0
    requests: list[str] = field(default_factory=list)
    parts: int = 0

    def answer(self, request: Any, **_event: Any) -> AWSResponse | None:
        headers = {name.lower(): _text(value) for name, value in request.headers.items()}
        source = headers.get("x-amz-copy-source", "")
        is_part = "x-amz-copy-source-range" in headers
        is_whole = bool(source) and not is_part
        self.requests.append(f"{request.method} {'whole' if is_whole else 'other'}")
        self.parts += is_part
        if is_part and self.parts == self.replaces_after:
            self.store.put("a/source", b"of somebody else" * MIB)
        if source and not self.ignores_conditions:
            wanted = headers.get("x-amz-copy-source-if-match")
            if wanted not in (None, self._describe(source)["ETag"]):
                return _refusal(request, "PreconditionFailed", "it has another etag", 412)
        if is_whole and self._describe(source)["ContentLength"] > self.copied_at_most:
            return _refusal(request, "InvalidRequest", "The specified copy source is too large")
        if is_part and self.parts == self.fails_part:
            return _refusal(request, "InvalidArgument", "told to fail")
        has_digest = "?delete" in request.url or "?tagging" in request.url
        if self.wants_md5 and has_digest and request.method in ("POST", "PUT"):
            digest = hashlib.md5(request.body, usedforsecurity=False).digest()
            if headers.get("content-md5") != base64.b64encode(digest).decode():
                message = "Missing required header for this request: Content-MD5"
                return _refusal(request, "MissingContentMD5", message)
        return None

    def _describe(self, source: str) -> Any:
        bucket, _, key = source.lstrip("/").partition("/")
        return self.client.head_object(Bucket=bucket, Key=key)

    def intercept(self, answer: Any) -> None:
        """Let a function answer requests before they are sent."""
        events: Any = self.store._client.meta.events
        events.register_first("before-send.s3", answer)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _refusal(request: Any, code: str, message: str, status: int = 400) -> AWSResponse:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    headers: Any = {"content-length": str(len(body))}
    return AWSResponse(request.url, status, headers, _Body(body))


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Endpoint]:
    with running_moto() as endpoint:
        yield endpoint


@pytest.fixture
def server(moto: S3Endpoint) -> Iterator[Server]:
    bucket = f"copies-{next(_numbers)}"
    moto.create_bucket(bucket)
    config = S3Config.from_uri(moto.uri(bucket))
    policy = RetryPolicy(attempts=2, first_delay_s=0.001, longest_delay_s=0.002)
    store, plain = S3ObjectStore(config, policy), S3ObjectStore(config, policy)
    found = Server(store, plain._client)
    found.intercept(found.answer)
    yield found
    store.close()
    plain.close()


def _put(server: Server, size: int) -> ObjectInfo:
    """Put an object with everything that a copy keeps."""
    server.client.put_object(
        Bucket=server.store._bucket,
        Key="a/source",
        Body=(b"0123456789abcdef" * (size // 16 + 1))[:size],
        Metadata={"put-id": "7", "role": "data"},
        ContentType="application/x-own",
        ContentEncoding="identity",
        CacheControl="no-store",
        ContentDisposition="attachment",
        ContentLanguage="en",
        Expires=datetime(2031, 1, 1, tzinfo=UTC),
        Tagging="topic=a%20b&kind=x",
    )
    return server.store.head("a/source")


def _facts(server: Server, key: str) -> dict[str, Any]:
    names = ["Metadata", "ContentType", "ContentEncoding", "CacheControl", "ContentDisposition"]
    names += ["ContentLanguage", "ExpiresString", "ContentLength"]
    bucket = server.store._bucket
    found = server.client.head_object(Bucket=bucket, Key=key)
    tags = server.client.get_object_tagging(Bucket=bucket, Key=key)["TagSet"]
    return {name: found.get(name) for name in names} | {
        "tags": sorted((tag["Key"], tag["Value"]) for tag in tags),
        "bytes": hashlib.sha256(server.store.get_range(key)).hexdigest(),
    }


def _no_uploads(server: Server) -> bool:
    return not list(server.store.list_multipart_uploads())


# ---- copies ----


@pytest.mark.s3
@pytest.mark.parametrize("size", [5 * MIB + 1, 12 * MIB])
def test_a_large_object_is_copied_by_parts_with_all_that_it_has(
    server: Server, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(s3_calls, "COPIED_AT_ONCE", 5 * MIB)
    found = _put(server, size)
    for source in (None, found):
        server.store.copy("a/source", "b/target", source)
        assert _facts(server, "b/target") == _facts(server, "a/source")
        assert _no_uploads(server)
    assert "PUT whole" not in server.requests
    assert server.parts == 2 * -(-size // (5 * MIB))


@pytest.mark.s3
@pytest.mark.parametrize("size", [1000, 7 * MIB])
def test_what_a_server_copies_only_by_parts_is_copied_by_parts(server: Server, size: int) -> None:
    server.copied_at_most = 999
    found = _put(server, size)
    server.store.copy("a/source", "b/target", found)
    assert _facts(server, "b/target") == _facts(server, "a/source")
    assert server.parts == 1


@pytest.mark.s3
@pytest.mark.parametrize("limit", [5 * MIB, COPIED_AT_ONCE])
def test_another_object_than_the_one_that_is_meant_is_not_copied(
    server: Server, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(s3_calls, "COPIED_AT_ONCE", limit)
    meant = _put(server, 6 * MIB)
    server.store.put("a/source", b"another" * MIB)
    with pytest.raises(errors.ObjectChangedError, match="'a/source'"):
        server.store.copy("a/source", "b/target", meant)
    assert [info.key for info in server.store.list_objects()] == ["a/source"]
    assert _no_uploads(server)


@pytest.mark.s3
@pytest.mark.parametrize("ignores", [False, True])
def test_an_object_that_is_replaced_between_two_parts_is_not_copied(
    server: Server, monkeypatch: pytest.MonkeyPatch, ignores: bool
) -> None:
    server.ignores_conditions = ignores
    monkeypatch.setattr(s3_calls, "COPIED_AT_ONCE", 5 * MIB)
    _put(server, 12 * MIB)
    server.replaces_after = 2
    with pytest.raises(errors.ObjectChangedError):
        server.store.copy("a/source", "b/target")
    assert [info.key for info in server.store.list_objects()] == ["a/source"]
    assert _no_uploads(server)


@pytest.mark.s3
def test_a_copy_that_fails_leaves_nothing_and_may_be_repeated(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_calls, "COPIED_AT_ONCE", 5 * MIB)
    found = _put(server, 12 * MIB)
    server.fails_part = 2
    with pytest.raises(errors.StoreRejectedError, match="told to fail"):
        server.store.copy("a/source", "b/target", found)
    assert [info.key for info in server.store.list_objects()] == ["a/source"]
    assert _no_uploads(server)

    server.store.start_multipart("b/target")  # of a copy that was killed
    other = server.store.start_multipart("b/target-of-another")
    server.store.copy("a/source", "b/target", found)
    assert _facts(server, "b/target") == _facts(server, "a/source")
    assert [upload.key for upload in server.store.list_multipart_uploads()] == [other.key]


@pytest.mark.parametrize("size", [1, COPIED_AT_ONCE, COPIED_AT_ONCE + 1, 6 << 30, 5 << 40])
def test_parts_are_of_sizes_that_every_store_takes(size: int) -> None:
    ranges = list(part_ranges(size, COPIED_AT_ONCE))
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(ranges))
    assert all(MIN_PART_SIZE <= end - start <= 5 << 30 for start, end in ranges[:-1])
    assert len(ranges) <= MAX_PARTS


# ---- digests ----


@pytest.mark.s3
def test_a_server_that_wants_md5_gets_it(server: Server) -> None:
    server.wants_md5 = True
    for number in range(3):
        server.store.put(f"c/{number}", b"x")
    server.store.add_tags("c/0", {"a": "b"})
    assert server.store.delete_many(["c/0", "c/1", "absent"]).failed == {}
    assert [info.key for info in server.store.list_objects()] == ["c/2"]
    # Only the first request was refused: the server is known from then on.
    server.requests.clear()
    assert server.store.delete_many(["c/2"]).failed == {}
    assert len(server.requests) == 1


@pytest.mark.s3
def test_a_request_repeats_with_md5_though_another_thread_found_out_first(server: Server) -> None:
    server.wants_md5 = True
    server.store.put("c/0", b"x")

    def find_out(request: Any, **_event: Any) -> None:
        if request.method == "PUT":
            server.store._connection.digests.are_md5 = True

    server.intercept(find_out)
    server.store.add_tags("c/0", {"a": "b"})
    assert server.store.delete_many(["c/0"]).failed == {}


@pytest.mark.s3
def test_an_object_without_tags_is_tagged_where_the_server_answers_404_for_it(
    server: Server,
) -> None:
    def refuse(request: Any, **_event: Any) -> AWSResponse | None:
        if "?tagging" in request.url and request.method == "GET":
            return _refusal(request, "NoSuchTagSet", "The TagSet does not exist", 404)
        return None

    server.store.put("c/0", b"x")
    server.intercept(refuse)
    server.store.add_tags("c/0", {"a": "b"})
    found = server.client.get_object_tagging(Bucket=server.store._bucket, Key="c/0")["TagSet"]
    assert found == [{"Key": "a", "Value": "b"}]


@pytest.mark.s3
def test_a_check_of_a_server_that_wants_md5_passes(server: Server) -> None:
    server.wants_md5 = True
    assert run_precheck(server.store).failures == ()
    assert list(server.store.list_objects()) == []


@pytest.mark.s3
def test_a_check_names_the_reason_of_a_server_that_deletes_nothing(server: Server) -> None:
    def refuse(request: Any, **_event: Any) -> AWSResponse | None:
        if "?delete" in request.url:
            return _refusal(request, "InvalidRequest", "DeleteObjects is not enabled here")
        return None

    server.intercept(refuse)
    failures = {step.name: step.reason for step in run_precheck(server.store).failures}
    reason = failures["Delete object"]
    assert "rejects DeleteObjects (400 InvalidRequest: DeleteObjects is not enabled here)" in reason
    assert "that this server supports the request" in reason


@pytest.mark.s3
def test_a_server_that_takes_no_digest_is_named_for_it(server: Server) -> None:
    def refuse(request: Any, **_event: Any) -> AWSResponse | None:
        if "?delete" in request.url:
            return _refusal(request, "MissingContentMD5", "Content-MD5 is missing")
        return None

    server.intercept(refuse)
    with pytest.raises(errors.StoreRejectedError, match="digest"):
        server.store.delete_many(["a"])


# ---- tags ----


@pytest.mark.s3
def test_tags_that_are_there_are_not_written_again(server: Server) -> None:
    server.store.put("t/1", b"x", tags={"kind": "a"})
    server.store.add_tags("t/1", {"state": "orphan"})
    server.requests.clear()
    server.store.add_tags("t/1", {"state": "orphan"})
    server.store.add_tags("t/1", {"state": "orphan", "kind": "a"})
    assert set(server.requests) == {"GET other"}
    server.store.add_tags("t/1", {"state": "live"})
    assert "PUT other" in server.requests


@pytest.mark.s3
@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"<Tagging/>", errors.StoreRejectedError),
        (b"<a><b>of an object</b></a>", errors.StoreRejectedError),
        (b"", errors.StoreRejectedError),
        (b"bytes of the object", errors.StoreUnavailableError),  # no XML: read as a broken answer
    ],
    ids=["no set", "another document", "nothing", "an object"],
)
def test_a_server_without_tags_is_never_sent_any(
    server: Server, body: bytes, error: type[errors.StorageError]
) -> None:
    server.store.put("t/1", b"bytes of the object")

    def overlook(request: Any, **_event: Any) -> AWSResponse | None:
        if request.method != "GET" or "tagging" not in request.url:
            return None
        headers: Any = {"content-length": str(len(body))}
        return AWSResponse(request.url, 200, headers, _Body(body))

    server.intercept(overlook)
    server.requests.clear()
    with pytest.raises(error):
        server.store.add_tags("t/1", {"state": "orphan"})
    assert not any(request.startswith("PUT") for request in server.requests)
