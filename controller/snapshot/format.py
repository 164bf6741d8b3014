"""The checkpoint file: a consistent copy of the map, complete or refused.

A file `<end offset, 20 digits>-<epoch, 10 digits>.checkpoint` holds everything the log says below
the end offset; the epoch is that of the last entry below it. All integers are little-endian.

    header    8  magic "SMCHKPT1"
              4  u32 format version, 1
              8  u64 end offset
              8  u64 epoch
              2  u16 length of the cluster id, then the cluster id, UTF-8
              4  u32 CRC32C of the header so far
    sections     one Arrow IPC stream each, one after the other
    index        JSON: {"sections": [{"name", "position", "length", "rows", "crc32c"}, ...]}
    footer   32  SHA-256 of every byte before the footer
              4  u32 CRC32C of the index
              4  u32 length of the index
              8  magic "1TPKHCMS"

The footer is written last: a file that was cut off has none, and is refused. A section's checksum
is checked when it is read, the digest when the whole file is verified.

What a column holds is its writer's matter; columns are int64 or narrower integers, booleans, text
or bytes.
"""

import re
import struct
from dataclasses import dataclass

MAGIC = b"SMCHKPT1"
END_MAGIC = b"1TPKHCMS"
VERSION = 1
HEADER = struct.Struct("<8sIQQH")
CHECKSUM = struct.Struct("<I")
FOOTER = struct.Struct("<32sII8s")

BINARY_COLUMNS = frozenset({("kvs", "value")})
"""(section, column) of bytes; an empty column can't tell, and text is the rule."""

_FILE_NAME = re.compile(r"(\d{20})-(\d{10})\.checkpoint")


class CheckpointError(Exception):
    """A file that is no complete checkpoint; the message names what is wrong with it."""


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """Which checkpoint: everything below `end_offset`, whose last entry is of `epoch`."""

    end_offset: int
    epoch: int

    @property
    def file_name(self) -> str:
        """Return the file's name."""
        return f"{self.end_offset:020}-{self.epoch:010}.checkpoint"


def parse_file_name(name: str) -> CheckpointId | None:
    """Return what a file name says, or None if it is not a checkpoint's."""
    match = _FILE_NAME.fullmatch(name)
    return CheckpointId(int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True, slots=True)
class SectionEntry:
    """Where a section is in the file."""

    name: str
    position: int
    length: int
    rows: int
    crc32c: int
