"""Small JSON files that are replaced as a whole and checked when read.

The file is one JSON object on one line. `checksum` is the CRC-32C of the object without it,
written with sorted keys and no spaces.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import google_crc32c

from streammeta.controller.journal.errors import JournalDamagedError
from streammeta.storage.durable_files import FileSystem, replace_file

Fields = dict[str, Any]


def replace_sealed_json(files: FileSystem, path: Path, fields: Fields) -> None:
    """Replace `path` durably and atomically: a crash leaves the old contents or the new.

    Raises DiskFullError with the old contents in place.
    """
    sealed = {**fields, "checksum": _checksum(fields)}
    replace_file(files, path, json.dumps(sealed, sort_keys=True).encode() + b"\n")
    files.sync_directory(path.parent)


def read_sealed_json(files: FileSystem, path: Path) -> Fields:
    """Read what `replace_sealed_json` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        JournalDamagedError: it is not JSON, or its checksum does not match.
    """
    file = files.open(path)
    try:
        data = file.read(0, file.size())
    finally:
        file.close()
    try:
        fields = json.loads(data)
        checksum = fields.pop("checksum")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise JournalDamagedError(path, 0, f"not a JSON object with a checksum ({error})") from None
    if checksum != _checksum(fields):
        raise JournalDamagedError(
            path, 0, f"checksum {checksum} does not match its contents ({_checksum(fields)})"
        )
    return dict(fields)


def _checksum(fields: Fields) -> int:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return int(google_crc32c.value(canonical))
