"""The bytes on disk: other programs, and releases to come, read them by this layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import google_crc32c
import pytest

from streammeta.client.write_ahead_log.errors import WrongLogError
from streammeta.client.write_ahead_log.files import (
    SEGMENT_MAGIC,
    BadHeaderError,
    FileHeader,
    FrameKind,
    decode_file_header,
    frame_codec,
    records_in,
)
from streammeta.storage.segmented_log import BadFrameError
from tests.broker_client.wal_tools import LOG, encoded, group_of, open_disk, record_at
from tests.kit.crash_disk import CrashDisk, flipped

LOG_ID = bytes(range(16))
PATH = Path("log/x.wal")
CODEC = frame_codec(LOG_ID)


def encode(body: bytes, count: int) -> bytes:
    return CODEC.encode(
        body, base_offset=4, epoch=9, flushed_end=3, kind=FrameKind.RECORDS, count=count
    )


def number(value: int, size: int) -> bytes:
    return value.to_bytes(size)


def checksum(data: bytes) -> bytes:
    return number(google_crc32c.value(data), 4)


def test_the_header_of_a_file_is_laid_out_as_documented() -> None:
    header = FileHeader(SEGMENT_MAGIC, "näme", 1000, LOG_ID, 77)
    name = "näme".encode()
    rest = b"\0\1" + number(len(name), 2) + number(1000, 4) + LOG_ID + number(77, 8) + name
    data = b"SMWL" + checksum(rest) + rest
    assert header.encode() == data
    assert header.size == len(data) == 40 + len(name)
    assert decode_file_header(data + b"what follows", SEGMENT_MAGIC, PATH) == header


def test_a_frame_is_laid_out_as_documented() -> None:
    body = b"".join((*encoded(record_at(4)), *encoded(record_at(5))))
    fields = checksum(body) + number(len(body), 4) + number(4, 8) + number(3, 8) + number(9, 8)
    fields += number(1, 1) + number(2, 4)
    data = b"SMWF" + checksum(LOG_ID + fields) + fields + body
    assert encode(body, 2) == data
    header = CODEC.decode_header(data[:45])
    assert (header.base_offset, header.end_offset, header.flushed_end) == (4, 6, 3)
    assert (header.epoch, header.size) == (9, len(data))
    header.check_body(body)
    assert list(records_in(header, body)) == [record_at(4), record_at(5)]
    for kind, count in ((4, 2), (1, 1), (1, 3)):
        with pytest.raises(BadFrameError):
            list(records_in(replace(header, kind=kind, count=count), body))


def test_the_state_file_is_laid_out_as_documented() -> None:
    disk = CrashDisk()
    log = open_disk(disk)
    log.write([group_of([0, 1, 2])])
    log.trim(2)
    data = disk.contents()[LOG / "state"]
    log_id = data[16:32]
    slots = [(data[at : at + 4], data[at + 4 : at + 28]) for at in (4096, 8192)]
    assert [crc == checksum(log_id + body) for crc, body in slots] == [True, True]
    newest = max(body for _, body in slots)
    assert newest[8:] == number(2, 8) + number(3, 8)


def test_every_changed_bit_of_a_header_or_frame_is_noticed() -> None:
    header = FileHeader(SEGMENT_MAGIC, "ns", 1000, LOG_ID, 77).encode()
    body = b"".join(encoded(record_at(4)))
    frame = encode(body, 1)
    for bit in range(8 * len(header)):
        with pytest.raises(BadHeaderError):
            decode_file_header(flipped(header, *divmod(bit, 8)), SEGMENT_MAGIC, PATH)
    for bit in range(8 * len(frame)):
        changed = flipped(frame, *divmod(bit, 8))
        with pytest.raises(BadFrameError):
            CODEC.decode_header(changed[:45]).check_body(changed[45:])
    with pytest.raises(BadFrameError, match="header's checksum"):
        frame_codec(LOG_ID[::-1]).decode_header(frame[:45])


def test_a_file_of_another_version_is_refused_by_name() -> None:
    data = FileHeader(SEGMENT_MAGIC, "ns", 1000, LOG_ID, 77).encode()
    rest = b"\0\2" + data[10:]
    with pytest.raises(WrongLogError, match=r"x\.wal has version 2, this release reads 1"):
        decode_file_header(b"SMWL" + checksum(rest) + rest, SEGMENT_MAGIC, PATH)
