"""Names of the objects of an offloaded ledger, and their metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping

VERSION_KEY = "s3managedledgeroffloaderformatversion"
VERSION = "1"
MANAGED_LEDGER_KEY = "ManagedLedgerName"
SOFTWARE_KEY = "s3managedledgeroffloadersoftwareversion"
# Length of a uuid as text.
_UUID_SIZE = 36
_NAME = re.compile(r".*-ledger-(\d+)(?:-index)?", re.DOTALL)


def data_name(uuid: str, ledger_id: int) -> str:
    """Return the name of a ledger's data object."""
    return f"{uuid}-ledger-{ledger_id}"


def index_name(uuid: str, ledger_id: int) -> str:
    """Return the name of a ledger's index object."""
    return f"{data_name(uuid, ledger_id)}-index"


def segment_names(uuid: str) -> tuple[str, str]:
    """Return the names of the data and index objects of a streaming segment."""
    return uuid, f"{uuid}-index"


def ledger_id_of(name: str | None) -> int | None:
    """Return the ledger id in an object's name, None for other objects."""
    match = _NAME.fullmatch(name or "")
    return int(match[1]) if match else None


def uuid_of(name: str | None, ledger_id: int | None) -> str | None:
    """Return the uuid in the name of a ledger's object, None for other objects."""
    if name is None or ledger_id is None or ledger_id_of(name) != ledger_id:
        return None
    uuid = name[:_UUID_SIZE]
    return uuid if name[_UUID_SIZE:].startswith("-ledger-") else None


def object_metadata(role: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the user metadata of an object. `role` is data or index."""
    # The fixed keys come last, so that extra metadata can't replace them.
    return {**extra, "role": role, VERSION_KEY: VERSION}


def is_known_version(metadata: Mapping[str, str]) -> bool:
    """Whether an object has the known format version. Keys are compared in lower case."""
    # Object stores return metadata keys in lower case.
    found = {key.lower(): value for key, value in metadata.items()}
    return found.get(VERSION_KEY) == VERSION


def managed_ledger_of(metadata: Mapping[str, str]) -> str | None:
    """Return the managed ledger in an object's metadata, None without one."""
    found = {key.lower(): value for key, value in metadata.items()}
    return found.get(MANAGED_LEDGER_KEY.lower())
