"""Conversion of inventory rows to listing rows, for both engines.

A damaged row, or a row of another bucket, is an error that names the column. Noncurrent versions
and delete markers become rows with separate owners, so they are counted and never compared with the
metadata.
"""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote_plus

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.orc as pa_orc

from streammeta.reconcile.listing.inventory import (
    Inventory,
    InventoryFile,
    check_columns,
    column_name,
    fetch,
)
from streammeta.reconcile.listing.key_owners import owner_columns
from streammeta.reconcile.vocabulary import errors, tables, verdicts

_ROWS_A_BATCH = 20_000
# A block becomes a batch, and a row may not be longer.
_CSV_BLOCK = 4 * 1024 * 1024
_Columns: TypeAlias = Mapping[str, Any]

# Column names of other jobs: Iceberg's file_list_view, Delta's USING INVENTORY.
_OTHER_NAMES = {
    "path": "key",
    "filepath": "key",
    "length": "size",
    "modified": "lastmodifieddate",
    "lastmodified": "lastmodifieddate",
    "modificationtime": "lastmodifieddate",
    "modifiedms": "lastmodifieddate",
}


def inventory_rows(
    inventory: Inventory,
    file: InventoryFile,
    namespace: str,
    go_on: Callable[[], None] = lambda: None,
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the rows of a file, with `LISTING_COLUMNS`, in the file's order.

    `go_on` is called before each piece of the file, and may raise to abort the work.

    Raises:
        InventoryError: the file is missing or damaged, or a row is invalid.
        StorageError: the inventory's bucket does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="streammeta-inventory-") as folder:
        path = fetch(inventory, file, Path(folder), go_on)
        try:
            for batch in _batches(inventory, path):
                yield from _convert(inventory, file, _rename_columns(inventory, batch), namespace)
        except (pa.ArrowException, OSError) as error:
            raise errors.InventoryError(
                f"{file.name} can't be read as {inventory.format} ({error}). Name another inventory"
                f" than {inventory.place}, which is damaged"
            ) from error


def _batches(inventory: Inventory, path: Path) -> Iterator[pa.RecordBatch]:
    if inventory.format == "parquet":
        with tables.open_table_file(path) as parquet:
            yield from parquet.iter_batches(batch_size=_ROWS_A_BATCH)
    elif inventory.format == "orc":
        # pyarrow reads ORC by stripes, which may be large, so they are cut into batches.
        orc = pa_orc.ORCFile(path)
        for stripe in range(orc.nstripes):
            table = pa.Table.from_batches([orc.read_stripe(stripe)])
            yield from table.to_batches(max_chunksize=_ROWS_A_BATCH)
    else:
        yield from _csv_batches(inventory, path)


def _csv_batches(inventory: Inventory, path: Path) -> Iterator[pa.RecordBatch]:
    """Yield rows of a CSV file, all columns text. Only a table's file has a header line."""
    compression = "gzip" if _is_gzip(path) else None
    names = list(inventory.columns)
    with pa.input_stream(path, compression=compression) as stream:
        # Read separately: pyarrow needs all names before it opens a file with fixed types.
        first = next(csv.reader(io.TextIOWrapper(stream, "utf-8", newline="")), None)

    if first is None:
        return

    names = names or first
    with pa.input_stream(path, compression=compression) as stream:
        yield from pa_csv.open_csv(
            stream,
            read_options=pa_csv.ReadOptions(
                column_names=names,
                skip_rows=0 if inventory.columns else 1,
                block_size=_CSV_BLOCK,
                use_threads=False,
            ),
            parse_options=pa_csv.ParseOptions(newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
            ),
        )


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _rename_columns(inventory: Inventory, batch: pa.RecordBatch) -> _Columns:
    """Return the columns by their normalized names. The first of two equivalent columns counts."""
    found: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        common = column_name(name)
        found.setdefault(
            common if inventory.is_manifest else _OTHER_NAMES.get(common, common), column
        )
    check_columns(tuple(found), "the inventory's file")
    return found


def _convert(
    inventory: Inventory, file: InventoryFile, columns: _Columns, namespace: str
) -> Iterator[pa.RecordBatch]:
    where = f"{file.name} of the inventory {inventory.place}"
    columns = _without_folders(columns)
    _check_bucket(inventory, columns, where)
    keys = _keys(inventory, columns, where)
    markers, is_old = _versions(columns, where)
    sizes = _numbers(columns["size"], "size", where)
    # S3 leaves the size of a delete marker empty.
    sizes = pc.if_else(markers, 0, sizes)
    modified = _moments(columns["lastmodifieddate"], where)

    for name, values in (("key", keys), ("size", sizes), ("lastmodifieddate", modified)):
        if values.null_count:
            raise errors.InventoryError(f"{where}: {name} is empty in {values.null_count} rows")

    if len(sizes) and pc.min(sizes).as_py() < 0:
        raise errors.InventoryError(f"{where}: size is {pc.min(sizes)}, expected a number of bytes")

    # Noncurrent versions keep the id of their key, but not its owner, so the join ignores them.
    owners, object_ids, notes = owner_columns(keys, namespace)
    owners = pc.if_else(is_old, int(verdicts.Owner.OLD_VERSION), owners)
    owners = pc.if_else(markers, int(verdicts.Owner.DELETE_MARKER), owners)
    versions = columns.get("versionid")
    if versions is not None:
        notes = pc.if_else(pc.or_(is_old, markers), _text(versions), notes)

    etags = columns.get("etag")
    values = {
        "key": keys,
        "size": sizes,
        "modified_ms": modified,
        "etag": pa.nulls(len(keys), pa.string()) if etags is None else _etags(etags),
        "owner": owners,
        "object_id": object_ids,
        "note": notes,
    }
    yield tables.record_batch(tables.LISTING_COLUMNS, values)


def _without_folders(columns: _Columns) -> _Columns:
    """Drop rows that the column `isDir` marks as folders."""
    if "isdir" not in columns:
        return columns
    kept = pc.invert(_flags(columns["isdir"], "isDir", "the inventory's file"))
    return {name: column.filter(kept) for name, column in columns.items()}


def _check_bucket(inventory: Inventory, columns: _Columns, where: str) -> None:
    if "bucket" not in columns:
        return
    for found in pc.unique(_text(columns["bucket"])).to_pylist():
        if found != inventory.bucket:
            raise errors.InventoryError(
                f"{where}: bucket is {found!r}, but --store is the bucket {inventory.bucket!r}."
                " Name an inventory of that bucket"
            )


_SCHEMES = ("s3://", "s3a://", "s3n://")


def _keys(inventory: Inventory, columns: _Columns, where: str) -> Any:
    keys = _text(columns["key"])
    if inventory.is_manifest:
        return _decode_keys(keys) if inventory.format == "csv" else keys
    # Tables contain paths or keys, nearly always one kind.
    if not pc.any(pc.match_substring(keys, "://")).as_py():
        return keys
    return pa.array(
        [_key_of_path(key, inventory.bucket, where) for key in keys.to_pylist()], pa.string()
    )


def _key_of_path(path: str, bucket: str, where: str) -> str:
    """Return the key of a path. Raises `InventoryError` for another bucket."""
    # A key may contain `://` itself.
    if not path.startswith(_SCHEMES):
        return path
    found, _, key = path.partition("://")[2].partition("/")
    if found != bucket:
        raise errors.InventoryError(
            f"{where}: path is {path!r}, but --store is the bucket {bucket!r}. Name an inventory of"
            " that bucket"
        )
    return key


def _decode_keys(keys: Any) -> Any:
    """Decode the URL-encoded keys of a CSV file."""
    # Decoding happens in Python, row by row, so rows that do not need it are left out.
    encoded = pc.match_substring_regex(keys, "[%+]")
    if not pc.any(encoded).as_py():
        return keys
    decoded = [unquote_plus(key) for key in keys.filter(encoded).to_pylist()]
    return pc.replace_with_mask(keys, encoded, pa.array(decoded, pa.string()))


def _versions(columns: _Columns, where: str) -> tuple[Any, Any]:
    """Return masks of the delete markers and the noncurrent versions."""
    rows = len(columns["key"])
    nothing = pa.array(np.zeros(rows, dtype=np.bool_))
    if "islatest" not in columns:
        return nothing, nothing
    latest = _flags(columns["islatest"], "IsLatest", where)
    if "isdeletemarker" not in columns:
        return nothing, pc.invert(latest)
    markers = _flags(columns["isdeletemarker"], "IsDeleteMarker", where)
    return markers, pc.invert(pc.or_(latest, markers))


def _flags(column: Any, name: str, where: str) -> Any:
    if not pa.types.is_boolean(column.type):
        lower = pc.utf8_lower(_text(column))
        # A current object taken for a noncurrent version would look missing.
        if not pc.all(pc.is_in(lower, pa.array(["true", "false"]))).as_py() and len(lower):
            raise errors.InventoryError(f"{where}: {name} is neither true nor false in each row")
        column = pc.equal(lower, "true")
    if column.null_count:
        raise errors.InventoryError(f"{where}: {name} is empty in {column.null_count} rows")
    return column


def _text(column: Any) -> Any:
    """Return a column as text, null for empty text. Parquet text may be bytes without a type."""
    if not pa.types.is_string(column.type):
        column = column.cast(pa.string())
    return pc.if_else(pc.equal(column, ""), None, column)


def _etags(column: Any) -> Any:
    return pc.utf8_trim(pc.fill_null(_text(column), ""), '"')


def _numbers(column: Any, name: str, where: str) -> Any:
    try:
        text = _text(column) if not pa.types.is_integer(column.type) else column
        return text.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise errors.InventoryError(f"{where}: {name} is not an integer ({error})") from error


def _moments(column: Any, where: str) -> Any:
    """Return times in Unix milliseconds. The default zone is UTC, a number is milliseconds."""
    if pa.types.is_integer(column.type):
        return column.cast(pa.int64())

    try:
        if pa.types.is_timestamp(column.type):
            # Spark and Iceberg write times without a zone in UTC.
            zoned = column if column.type.tz else column.cast(pa.timestamp(column.type.unit, "UTC"))
            return zoned.cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
        text = _text(column)
        # Eleven digits: a year is never that long, and milliseconds since 1973 always are.
        if pc.all(pc.match_substring_regex(text, r"^\d{11,}$")).as_py():
            return text.cast(pa.int64())
        return _parse_times(text)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise errors.InventoryError(
            f"{where}: lastmodifieddate is not a time ({error}), expected"
            " 2026-05-01T12:00:00.000Z, a timestamp, or Unix milliseconds"
        ) from error


def _parse_times(text: Any) -> Any:
    zoned = pc.match_substring_regex(text, r"(Z|[+-]\d\d:?\d\d)$")
    full = pc.if_else(zoned, text, pc.binary_join_element_wise(text, "Z", ""))
    return full.cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
