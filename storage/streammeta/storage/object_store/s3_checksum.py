"""Checksums that travel with objects to and from S3.

Content-MD5 is the default: it is the one checksum that S3-compatible servers of all ages refuse bad
bytes by, while some take the newer headers and ignore them. Amazon and current servers check CRC32
and CRC32C too; these cost a fraction of MD5's time, are stored with the object, and are checked
again when it is read whole. Digests are computed here, not in botocore: it needs a library of its
own for CRC32C, and sends checksums of bodies as trailers, which many servers can't read.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from streammeta.storage.object_format.object_checksum import ObjectChecksum

if TYPE_CHECKING:
    from mypy_boto3_s3.literals import ChecksumAlgorithmType


class Checksum(StrEnum):
    """What uploads are checked by; the value is how an address says it."""

    MD5 = "md5"
    CRC32 = "crc32"
    CRC32C = "crc32c"

    @property
    def is_stored(self) -> bool:
        """Tell whether the server keeps it with the object and gives it back."""
        return self is not Checksum.MD5

    @property
    def algorithm(self) -> ChecksumAlgorithmType:
        """S3's name of it, if it is stored."""
        return "CRC32C" if self is Checksum.CRC32C else "CRC32"

    @property
    def member(self) -> str:
        """The name of the request's and answer's field that holds it."""
        return "ContentMD5" if self is Checksum.MD5 else f"Checksum{self.algorithm}"

    def digest(self, body: bytes | memoryview) -> str:
        """Compute it, in base64 as S3 writes it."""
        match self:
            case Checksum.MD5:
                raw = hashlib.md5(body, usedforsecurity=False).digest()
            case Checksum.CRC32:
                raw = zlib.crc32(body).to_bytes(4, "big")
            case Checksum.CRC32C:
                checksum = ObjectChecksum()
                checksum.update(body)
                raw = checksum.value.to_bytes(4, "big")
        return base64.b64encode(raw).decode()

    def of(self, body: bytes | memoryview) -> dict[str, Any]:
        """Give the fields of a request that sends `body`."""
        named = {"ChecksumAlgorithm": self.algorithm} if self.is_stored else {}
        return {self.member: self.digest(body), **named}

    def told(self, answer: Any) -> str:
        """Give what the server says it stored, empty if it is silent."""
        return str(answer.get(self.member, "")) if self.is_stored else ""

    def contradicts(self, answer: Any, body: bytes) -> bool:
        """Tell whether the server says that the whole object is other than `body`.

        The checksum of an object uploaded in parts is one of checksums, told by its dash.
        """
        told = self.told(answer)
        return bool(told) and "-" not in told and told != self.digest(body)
