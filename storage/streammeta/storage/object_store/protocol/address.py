"""Addresses of object stores: `s3://` and `file://`, parsed and written.

S3 addresses have two forms. The bucket form is `s3://bucket?endpoint=..&region=..`. The server
form, `s3://host:port?s3-data-bucket=..`, comes from tools that put the server first. No error
message shows a key.

Content-MD5 is the default checksum of uploads, because S3-compatible servers of all ages reject
damaged bytes by it, while some accept the newer headers and ignore them. Amazon and current servers
check CRC32 and CRC32C too. These take a fraction of MD5's time, are stored with the object, and are
checked again when the whole object is read. Digests are computed here, not in botocore, which needs
another library for CRC32C and sends checksums of bodies as trailers, which many servers can't read.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from streammeta.storage.object_format.checksum import ObjectChecksum

if TYPE_CHECKING:
    from mypy_boto3_s3.literals import ChecksumAlgorithmType


class Checksum(StrEnum):
    """Checksum of uploads. The value is its name in an address."""

    MD5 = "md5"
    CRC32 = "crc32"
    CRC32C = "crc32c"

    @property
    def is_stored(self) -> bool:
        """Whether the server stores it with the object and returns it."""
        return self is not Checksum.MD5

    @property
    def algorithm(self) -> ChecksumAlgorithmType:
        """S3's name of a stored checksum."""
        return "CRC32C" if self is Checksum.CRC32C else "CRC32"

    @property
    def member(self) -> str:
        """Name of the field in requests and responses."""
        return "ContentMD5" if self is Checksum.MD5 else f"Checksum{self.algorithm}"

    def digest(self, body: bytes | memoryview) -> str:
        """Return the checksum of `body` in base64, as S3 writes it."""
        match self:
            case Checksum.MD5:
                raw = hashlib.md5(body, usedforsecurity=False).digest()
            case Checksum.CRC32:
                raw = zlib.crc32(body).to_bytes(4, "big")
            case Checksum.CRC32C:
                raw = ObjectChecksum.of(body).value.to_bytes(4, "big")
        return base64.b64encode(raw).decode()

    def of(self, body: bytes | memoryview) -> dict[str, Any]:
        """Return the checksum fields of a request that sends `body`."""
        named = {"ChecksumAlgorithm": self.algorithm} if self.is_stored else {}
        return {self.member: self.digest(body), **named}

    def stored_in(self, answer: Any) -> str:
        """Return the stored checksum in a response, or an empty string."""
        return str(answer.get(self.member, "")) if self.is_stored else ""

    def contradicts(self, answer: Any, body: bytes) -> bool:
        """Return whether the response's checksum of the whole object contradicts `body`.

        The checksum of a multipart object covers the parts' checksums and contains a dash, so it is
        not compared.
        """
        stored = self.stored_in(answer)
        return bool(stored) and "-" not in stored and stored != self.digest(body)


DEFAULT_REGION = "us-east-1"

_SERVER_PREFIX = "s3-"
_BUCKET_FORM = ("endpoint", "region", "pathStyle", "accessKey", "secretKey", "checksum")
_SERVER_FORM = (
    "s3-data-bucket",
    "s3-endpoint-protocol",
    "s3-region",
    "s3-path-style",
    "s3-access-key",
    "s3-secret-key",
)
_IGNORED = ("s3-ops-bucket", "cluster-id")


@dataclass(frozen=True, slots=True)
class S3Config:
    """A bucket and its connection settings.

    Without `endpoint_url`, the bucket is Amazon's. Without keys, they come from the environment
    (the AWS_* variables and boto3's other sources). `path_style` puts the bucket in the path, not
    the host.
    """

    bucket: str
    endpoint_url: str | None = None
    region: str = DEFAULT_REGION
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)
    path_style: bool = False
    checksum: Checksum = Checksum.MD5

    @classmethod
    def from_uri(cls, uri: str) -> S3Config:
        """Parse either form. All options except `s3-data-bucket` are optional.

        - `s3://bucket?endpoint=..&region=..&pathStyle=..&accessKey=..&secretKey=..&checksum=..`
        - `s3://host:port?s3-data-bucket=..&s3-endpoint-protocol=..&s3-region=..&s3-path-style=..
          &s3-access-key=..&s3-secret-key=..`, whose `s3-ops-bucket` and `cluster-id` are not used.

        The default path style is `true` with an endpoint and `false` without, the default protocol
        `https`. Values are percent-encoded, and a plus is literal. Raises `ValueError`, naming the
        invalid part.
        """
        parts = urlsplit(uri)
        if parts.scheme != "s3" or not parts.netloc or parts.path not in ("", "/"):
            raise ValueError(
                f"S3 address is {uri.partition('?')[0]!r}, expected s3://bucket without a path"
            )

        pairs = [pair.partition("=") for pair in parts.query.split("&") if pair]
        names = [unquote(name) for name, _, _ in pairs]
        is_server_form = any(name.startswith(_SERVER_PREFIX) for name in names)
        known = (*_SERVER_FORM, *_IGNORED) if is_server_form else _BUCKET_FORM
        values = {unquote(name): unquote(value) for name, _, value in pairs}

        for name in names:
            if name not in known or names.count(name) != 1 or not values[name]:
                raise ValueError(
                    f"S3 address has the option {name!r} {names.count(name)} times or empty,"
                    f" expected each of {', '.join(sorted(known))} at most once, with a value"
                )

        return cls._from_server_form(parts, values) if is_server_form else cls._of(parts, values)

    @classmethod
    def _from_server_form(cls, parts: SplitResult, values: Mapping[str, str]) -> S3Config:
        if "s3-data-bucket" not in values:
            raise ValueError(
                f"S3 address names the server {parts.netloc!r} but no bucket, expected"
                " s3-data-bucket"
            )
        protocol = values.get("s3-endpoint-protocol", "https")
        bucket_form = {
            "endpoint": f"{protocol}://{parts.netloc}",
            **{
                ours: values[theirs]
                for ours, theirs in zip(_BUCKET_FORM[1:5], _SERVER_FORM[2:], strict=True)
                if theirs in values
            },
        }
        return cls._of(urlsplit(f"s3://{values['s3-data-bucket']}"), bucket_form)

    @classmethod
    def _of(cls, parts: SplitResult, values: Mapping[str, str]) -> S3Config:
        if ("accessKey" in values) != ("secretKey" in values):
            raise ValueError(
                "S3 address has one of access key and secret key, expected both or none"
            )

        endpoint = values.get("endpoint")
        # Of an impossible port, `port` raises ValueError itself.
        server = urlsplit(endpoint or "https:")
        if server.scheme not in ("http", "https") or server.port == 0:
            raise ValueError(f"S3 endpoint is {endpoint!r}, expected http://host:port or https://")

        path_style = values.get("pathStyle", "true" if endpoint else "false")
        if path_style not in ("true", "false"):
            raise ValueError(f"S3 path style is {path_style!r}, expected true or false")

        checksum = values.get("checksum", Checksum.MD5.value)
        if checksum not in list(Checksum):
            raise ValueError(
                f"S3 checksum is {checksum!r}, expected one of {', '.join(map(str, Checksum))}"
            )

        return cls(
            bucket=parts.netloc,
            endpoint_url=endpoint,
            region=values.get("region", DEFAULT_REGION),
            access_key=values.get("accessKey"),
            secret_key=values.get("secretKey"),
            path_style=path_style == "true",
            checksum=Checksum(checksum),
        )

    def to_uri(self) -> str:
        """Return the bucket form, with any keys. `from_uri` parses it to an equal value."""
        options = {
            "endpoint": self.endpoint_url,
            "region": self.region,
            "pathStyle": str(self.path_style).lower(),
            "accessKey": self.access_key,
            "secretKey": self.secret_key,
            "checksum": None if self.checksum is Checksum.MD5 else self.checksum.value,
        }
        return f"s3://{self.bucket}?{_query(options)}"

    def to_server_uri(self) -> str:
        """Return the server form, which cannot contain the checksum.

        Raises `ValueError` without an endpoint.
        """
        if self.endpoint_url is None:
            raise ValueError("the bucket is Amazon's. The server form requires an endpoint")
        endpoint = urlsplit(self.endpoint_url)
        options = {
            "s3-access-key": self.access_key,
            "s3-secret-key": self.secret_key,
            "s3-region": self.region,
            "s3-endpoint-protocol": endpoint.scheme,
            "s3-data-bucket": self.bucket,
            "s3-path-style": str(self.path_style).lower(),
        }
        return f"s3://{endpoint.netloc}?{_query(options)}"


def _query(options: Mapping[str, str | None]) -> str:
    given = {name: value for name, value in options.items() if value is not None}
    return urlencode(given, quote_via=quote, safe="")


@dataclass(frozen=True, slots=True, repr=False)
class StoreAddress:
    """A store's address, parsed: the settings of a bucket, or a directory.

    `uri` may contain a secret key. `str` and `repr` show the address without it.
    """

    uri: str
    target: S3Config | Path

    @classmethod
    def parse(cls, uri: str) -> StoreAddress:
        """Parse `s3://bucket?options` or `file:///absolute/directory`. Raises `ValueError`."""
        if not isinstance(uri, str):
            raise TypeError(
                f"uri is {uri!r}, a {type(uri).__name__}, expected a str: s3://bucket?options or"
                " file:///absolute/directory"
            )
        scheme = uri.partition("://")[0] if "://" in uri else ""
        if scheme == "s3":
            return cls(uri, S3Config.from_uri(uri))
        if scheme == "file":
            return cls(uri, _directory_of(uri))
        raise ValueError(
            f"object store address is {uri.partition('?')[0]!r}, expected s3://bucket?options or"
            " file:///absolute/directory"
        )

    @property
    def bucket(self) -> str:
        """Name of the bucket, or of the directory."""
        return self.target.bucket if isinstance(self.target, S3Config) else self.target.name

    def __str__(self) -> str:
        return without_secrets(self.uri)

    def __repr__(self) -> str:
        return f"StoreAddress({str(self)!r})"


def _directory_of(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise ValueError(f"directory address is {uri!r}, expected file:///absolute/directory")
    return Path(unquote(parts.path))


_PUBLIC_PARAMETERS = frozenset({"endpoint", "region", "pathStyle"})


def without_secrets(uri: str) -> str:
    """Return an address with only bucket, endpoint and region, for logs and files."""
    parts = urlsplit(_bucket_form(uri))
    shown = [pair for pair in parse_qsl(parts.query) if pair[0] in _PUBLIC_PARAMETERS]
    query = urlencode(
        [(name, _without_user(value) if name == "endpoint" else value) for name, value in shown],
        safe=":/",
    )
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, query, ""))


def _bucket_form(uri: str) -> str:
    """Return the bucket form of an S3 address, and other addresses unchanged."""
    if "s3-data-bucket" not in urlsplit(uri).query:
        return uri
    try:
        return S3Config.from_uri(uri).to_uri()
    except ValueError:
        return uri


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
