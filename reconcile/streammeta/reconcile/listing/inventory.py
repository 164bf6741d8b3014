"""Inventories: listings of a bucket made earlier by other programs, as a manifest or a table.

A manifest is an S3 Inventory's `manifest.json` with its `manifest.checksum`, in a bucket or copied
to a folder. A table is a file, or a folder of files, with a path, a size and a modification time in
each row, as Spark and other jobs write them. Owns the validation: bucket, format, columns, checksum
of each file, and start time. `inventory_rows` reads the rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from streammeta.reconcile.vocabulary.errors import InventoryError
from streammeta.storage import errors, parsing
from streammeta.storage.object_store.opening import open_with_path
from streammeta.storage.object_store.protocol.address import without_secrets
from streammeta.storage.object_store.protocol.base import ObjectStore

MANIFEST = "manifest.json"
CHECKSUM = "manifest.checksum"
FORMATS = ("csv", "orc", "parquet")
_DATED = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}-[0-9]{2}Z")
"""Folder name of an inventory, the time when S3 started it."""

# The only version of the manifest that S3 has published.
_VERSION = "2016-11-30"
# Bounds memory. Between pieces the work can be aborted.
_PIECE = 8 * 1024 * 1024
_MD5 = re.compile(r"[0-9a-f]{32}")
# A manifest's keys begin with the destination prefix, BUCKET/CONFIG. A copied folder may lie as
# deep below the copy of the data.
_ANCESTORS = 4
_NEEDED = ("key", "size", "lastmodifieddate")
_OF_VERSIONS = ("islatest", "isdeletemarker")


@dataclass(frozen=True, slots=True)
class InventoryFile:
    """A file of an inventory by its full name. `md5` is in hex, empty if unknown."""

    name: str
    size: int
    md5: str = ""


@dataclass(frozen=True, slots=True)
class Inventory:
    """An inventory: its address, description and files.

    `started_ms` is its start in Unix milliseconds. `columns` are the columns of a manifest's CSV
    files, in order and normalized by `column_name`. Other files contain their column names.
    """

    address: str = field(repr=False)  # it may contain a secret key
    bucket: str
    started_ms: int
    format: str
    columns: tuple[str, ...]
    files: tuple[InventoryFile, ...]
    is_manifest: bool

    @property
    def place(self) -> str:
        """The address without credentials."""
        return _shown(self.address)


def column_name(name: str) -> str:
    """Normalize a column's name: `LastModifiedDate` and `last_modified_date` are equal."""
    return name.strip().lower().replace("_", "")


def read_inventory(address: str, bucket: str, taken_ms: int | None, now_ms: int) -> Inventory:
    """Read the description of an inventory of a bucket, without its rows.

    An `address` that ends in a slash, with S3's dated folders, stands for the newest complete
    inventory. `taken_ms` is the start of a table, which does not contain it, and None for a
    manifest.

    Raises: InventoryError: `address` has no inventory, or it is damaged, belongs to another bucket,
    or is dated after `now_ms`. Names the field. StorageError: the inventory's bucket does not
    answer.
    """
    address = _newest(address)
    if address.partition("?")[0].rsplit("/", 1)[-1] == MANIFEST:
        if taken_ms is not None:
            raise InventoryError(
                f"--taken-at is set, but {MANIFEST} contains the inventory's start"
                " (creationTimestamp). Leave the option out"
            )
        found = _read_manifest(address, bucket)
    else:
        found = _read_table(address, bucket, taken_ms)

    # An object stored after the export and listed anyway would look like an orphan.
    if found.started_ms > now_ms:
        raise InventoryError(
            f"inventory {found.place} starts {(found.started_ms - now_ms) / 1000:.0f} s in the"
            " future (creationTimestamp or --taken-at), but a listing has to be older than the copy"
            " of the metadata. Correct this machine's clock, or name another inventory"
        )

    return found


def _newest(address: str) -> str:
    """Return the address of the newest manifest below a prefix, and other addresses unchanged.

    Skips inventories without a checksum, which S3 has not finished.
    """
    base, mark, query = address.partition("?")
    if not base.endswith("/"):
        return address

    if "://" not in address:
        found = {f"{path.parent.name}/{path.name}" for path in Path(base).glob("*/manifest.*")}
    else:
        store, prefix = _open(address)
        with closing(store):
            # Lists data files too, but a prefix has few inventories, and one listing shows which
            # are complete.
            found = {info.key.removeprefix(prefix) for info in store.list_objects(prefix)}

    dates = {name.partition("/")[0] for name in found if _DATED.fullmatch(name.partition("/")[0])}
    whole = [date for date in dates if {f"{date}/{MANIFEST}", f"{date}/{CHECKSUM}"} <= found]
    if whole:
        # The names are UTC times of fixed width, so the greatest name is the newest.
        return f"{base}{max(whole)}/{MANIFEST}{mark}{query}"
    if dates or "://" in address:
        raise InventoryError(
            f"{_shown(address)} has no whole inventory, a folder such as 2026-05-01T01-00Z with"
            f" {MANIFEST} and {CHECKSUM}. Wait for S3 to write one, or name another prefix"
        )

    return address


def _open(address: str) -> tuple[ObjectStore, str]:
    """Open the bucket of an inventory's address, and return it and the path."""
    try:
        return open_with_path(address)
    except ValueError as error:
        raise InventoryError(
            f"--inventory {without_secrets(address)!r} names no object or prefix ({error}),"
            f" expected s3://BUCKET/PATH/{MANIFEST}?endpoint=URL, s3://BUCKET/PATH/?endpoint=URL or"
            " a local path"
        ) from error


def _shown(address: str) -> str:
    """Return an address without credentials."""
    return without_secrets(address) if "://" in address else address


def fetch(
    inventory: Inventory,
    file: InventoryFile,
    folder: Path,
    go_on: Callable[[], None] = lambda: None,
) -> Path:
    """Fetch a file of an inventory to `folder`, check its checksum, and return its path.

    `go_on` is called before each piece, and may raise to abort the work.

    Raises:
        InventoryError: the file is missing, or its size or checksum differs from the manifest.
        StorageError: the bucket does not answer.
    """
    if "://" not in inventory.address:
        path = Path(file.name)
        _check_file(inventory, file, path, go_on)
        return path

    # One name for all: the folder contains one file at a time.
    path = folder / "inventory-file"
    store, _ = _open(inventory.address)
    with closing(store), path.open("wb") as copy:
        try:
            for start in range(0, file.size, _PIECE):
                go_on()
                copy.write(store.get_range(file.name, start, min(start + _PIECE, file.size)))
        except errors.ObjectNotFoundError as error:
            raise InventoryError(
                f"{inventory.place}: files[].key {file.name!r} is not in the bucket. Copy the whole"
                " inventory, or name a newer one"
            ) from error

    _check_file(inventory, file, path, go_on)
    return path


def _check_file(
    inventory: Inventory, file: InventoryFile, path: Path, go_on: Callable[[], None]
) -> None:
    # MD5 is what S3 writes into the manifest. It detects damage, not forgery.
    digest = hashlib.md5(usedforsecurity=False)
    size = 0
    try:
        with path.open("rb") as opened:
            while piece := opened.read(_PIECE):
                go_on()
                size += len(piece)
                if file.md5:
                    digest.update(piece)
    except OSError as error:
        raise InventoryError(f"{path} can't be read ({error.strerror})") from error

    if size != file.size:
        raise InventoryError(
            f"{file.name} has {size} bytes, but files[].size is {file.size}. Copy the incomplete"
            f" inventory {inventory.place} again, or name another"
        )
    if file.md5 and digest.hexdigest() != file.md5:
        raise InventoryError(
            f"{file.name} has the MD5 {digest.hexdigest()}, but files[].MD5checksum is {file.md5}."
            f" Copy the damaged inventory {inventory.place} again, or name another"
        )


def _read_manifest(address: str, bucket: str) -> Inventory:
    body, checksum = _documents(address)
    digest = hashlib.md5(body, usedforsecurity=False).hexdigest()
    # S3 writes the checksum file last, so a match also proves that the inventory is complete.
    if checksum.strip().strip('"').lower() != digest:
        raise InventoryError(
            f"{MANIFEST} has the MD5 {digest}, but {CHECKSUM} says {checksum.strip()[:40]!r}. Copy"
            " the damaged or incomplete inventory again, or name another"
        )

    inventory = parse_manifest(body, address, bucket)
    if "://" in address:
        return inventory

    files = tuple(
        InventoryFile(str(_find(Path(address), file.name)), file.size, file.md5)
        for file in inventory.files
    )
    return replace(inventory, files=files)


def _documents(address: str) -> tuple[bytes, str]:
    """Return the manifest and the content of its checksum file."""
    if "://" not in address:
        folder = Path(address).parent
        try:
            return (folder / MANIFEST).read_bytes(), (folder / CHECKSUM).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InventoryError(
                f"{folder} has no whole {MANIFEST} and {CHECKSUM} ({error}). S3 writes the latter"
                " last: wait for it, or copy both"
            ) from error

    store, key = _open(address)
    with closing(store):
        try:
            body = store.get_range(key)
            checksum = store.get_range(key.removesuffix(MANIFEST) + CHECKSUM)
        except errors.ObjectNotFoundError as error:
            raise InventoryError(
                f"{without_secrets(address)} has no whole {MANIFEST} and {CHECKSUM} ({error}). S3"
                " writes the latter last: wait for it, or name an older inventory"
            ) from error

    return body, checksum.decode(errors="replace")


def parse_manifest(body: bytes, address: str, bucket: str) -> Inventory:
    """Parse a manifest of an S3 Inventory of `bucket`. Does no I/O.

    Raises:
        InventoryError: a field is missing or invalid. Names the field.
    """
    try:
        document = parsing.parse_json(body)
    except ValueError as error:
        raise InventoryError(f"{MANIFEST} is not JSON ({error}). Name another inventory") from error

    if not isinstance(document, dict):
        raise InventoryError(f"{MANIFEST} is not a JSON object. Name another inventory")

    source = _text(document, "sourceBucket")
    # Rows of another bucket have other keys. Every object of the cluster would look missing.
    if source != bucket:
        raise InventoryError(
            f"{MANIFEST}: sourceBucket is {source!r}, but --store is the bucket {bucket!r}. Name an"
            " inventory of that bucket"
        )
    if (version := _text(document, "version")) != _VERSION:
        raise InventoryError(f"{MANIFEST}: version is {version!r}, expected {_VERSION}")

    kind = _text(document, "fileFormat").lower()
    if kind not in FORMATS:
        raise InventoryError(
            f"{MANIFEST}: fileFormat is {document['fileFormat']!r}, expected CSV, ORC or Parquet"
        )

    started = str(document.get("creationTimestamp", ""))
    # `isdigit` alone accepts other scripts' digits.
    if not (started.isascii() and started.isdigit() and int(started) > 0):
        raise InventoryError(
            f"{MANIFEST}: creationTimestamp is {started!r}, expected Unix milliseconds"
        )

    columns = _columns(_text(document, "fileSchema"), kind)
    check_columns(columns, f"{MANIFEST}: fileSchema")
    return Inventory(
        address=address,
        bucket=bucket,
        started_ms=int(started),
        format=kind,
        columns=columns,
        files=_files(document.get("files")),
        is_manifest=True,
    )


def check_columns(columns: Sequence[str], where: str) -> None:
    """Raise `InventoryError` unless the columns identify current objects with size and time."""
    for name in _NEEDED:
        if name not in columns:
            raise InventoryError(
                f"{where} has no column {name!r}, only {', '.join(columns)}. Add Size and"
                " LastModifiedDate to the inventory"
            )
    if "versionid" in columns:
        for name in _OF_VERSIONS:
            if name not in columns:
                raise InventoryError(
                    f"{where} has versions, but no column {name!r} to identify current ones"
                )


def _text(document: Mapping[str, Any], field: str) -> str:
    value = document.get(field)
    if not isinstance(value, str) or not value:
        raise InventoryError(f"{MANIFEST}: {field} is {value!r}, expected a string")
    return value


def _columns(schema: str, kind: str) -> tuple[str, ...]:
    """Return the columns of a manifest's fileSchema, which depends on the format."""
    if kind == "csv":
        names = schema.split(",")
    elif kind == "orc":
        names = re.findall(r"(\w+):", schema)
    else:
        # A Parquet schema, such as `required binary key (UTF8);`.
        names = re.findall(r"(\w+)\s*(?:\([^;]*\))?\s*;", schema)
    return tuple(column_name(name) for name in names)


def _files(listed: Any) -> tuple[InventoryFile, ...]:
    if not isinstance(listed, list):
        raise InventoryError(f"{MANIFEST}: files is {listed!r}, expected a list")

    found: dict[str, InventoryFile] = {}
    for number, entry in enumerate(listed):
        where = f"{MANIFEST}: files[{number}]"
        key, size, md5 = (
            (entry.get(name) for name in ("key", "size", "MD5checksum"))
            if isinstance(entry, dict)
            else (None, None, None)
        )
        if not isinstance(key, str) or not key:
            raise InventoryError(f"{where}.key is {key!r}, expected a key")
        if type(size) is not int or size < 0:
            raise InventoryError(f"{where}.size is {size!r}, expected a number of bytes")
        if not isinstance(md5, str) or not _MD5.fullmatch(md5.lower()):
            raise InventoryError(f"{where}.MD5checksum is {md5!r}, expected 32 hex digits")
        # A file read twice would repeat all of its rows.
        if key in found:
            raise InventoryError(f"{where}.key is {key!r} for the second time")
        found[key] = InventoryFile(key, size, md5.lower())

    return tuple(found.values())


def _find(manifest: Path, key: str) -> Path:
    """Return the copy of a manifest's file in a folder, with or without its key prefix."""
    parts = key.split("/")
    # A manifest from a bucket must not read files outside of its folder.
    if ".." in parts:
        raise InventoryError(f"{MANIFEST}: files[].key is {key!r}, expected one without '..'")
    for folder in list(manifest.absolute().parents)[:_ANCESTORS]:
        # Longest first: the shorter the rest, the sooner it matches a foreign file.
        for at in range(len(parts)):
            path = folder.joinpath(*parts[at:])
            if path.is_file():
                return path
    raise InventoryError(
        f"{manifest}: files[].key {key!r} is not below {manifest.absolute().parent} or beside it."
        " Copy the inventory's folder whole"
    )


_ENDINGS = {".csv": "csv", ".csv.gz": "csv", ".orc": "orc", ".parquet": "parquet"}


def _read_table(address: str, bucket: str, taken_ms: int | None) -> Inventory:
    if "://" in address:
        raise InventoryError(
            f"--inventory {without_secrets(address)} is not a {MANIFEST}. Use a local path for"
            " other tables in Parquet, ORC or CSV"
        )
    if taken_ms is None:
        raise InventoryError(
            f"--taken-at is missing, and {address} does not contain the start of its listing."
            " Set it to the start, such as 2026-05-01T12:00:00Z, because later changes are left"
            " alone"
        )

    path = Path(address)
    if path.is_dir():
        paths = sorted(file for file in path.rglob("*") if _format_of(file) and file.is_file())
        # Other jobs mark temporary and metadata files this way.
        paths = [file for file in paths if not file.name.startswith(("_", "."))]
    else:
        paths = [path] if _format_of(path) and path.is_file() else []

    kinds = {_format_of(file) for file in paths}
    if len(kinds) != 1:
        raise InventoryError(
            f"--inventory {address} has {len(paths)} files of {len(kinds)} formats, expected a"
            f" {MANIFEST}, or one or more files of one format: {', '.join(_ENDINGS)}"
        )

    return Inventory(
        address=address,
        bucket=bucket,
        started_ms=taken_ms,
        format=kinds.pop(),
        columns=(),
        files=tuple(InventoryFile(str(file.absolute()), file.stat().st_size) for file in paths),
        is_manifest=False,
    )


def _format_of(path: Path) -> str:
    """Return the format of a file by its name, empty if unknown."""
    return next((kind for end, kind in _ENDINGS.items() if path.name.endswith(end)), "")
