"""The checkpoint file: a consistent copy of the map, complete or refused.

A file `<end offset, 20 digits>-<epoch, 10 digits>.checkpoint` holds everything the log says below
the end offset; the epoch is that of the last entry below it. All integers are little-endian.

    header    8  magic "SMCHKPT1"
              4  u32 format version, 2
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

The section `voters`, the first, names who votes as of the end offset: node_id (int64),
directory_id (text, empty if not known) and endpoint (text). What the columns of the others hold is
the map's matter; columns are int64 or narrower integers, booleans, text or bytes.
"""

import struct
from dataclasses import dataclass

MAGIC = b"SMCHKPT1"
END_MAGIC = b"1TPKHCMS"
VERSION = 2
HEADER = struct.Struct("<8sIQQH")
CHECKSUM = struct.Struct("<I")
FOOTER = struct.Struct("<32sII8s")

BINARY_COLUMNS = frozenset({("kvs", "value")})
"""(section, column) of bytes; an empty column can't tell, and text is the rule."""


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


@dataclass(frozen=True, slots=True)
class SectionEntry:
    """Where a section is in the file."""

    name: str
    position: int
    length: int
    rows: int
    crc32c: int
