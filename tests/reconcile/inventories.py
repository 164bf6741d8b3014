"""Inventories as S3 writes them, and tables as other jobs do, of objects that a test names."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pyarrow as pa
import pyarrow.orc as pa_orc
import pyarrow.parquet as pq

LONG_AGO_MS = 1_700_000_000_000
_ENDINGS = {"CSV": "csv.gz", "ORC": "orc", "Parquet": "parquet"}
_NAMES = (
    "bucket",
    "key",
    "version_id",
    "is_latest",
    "is_delete_marker",
    "size",
    "last_modified_date",
    "e_tag",
)
_CSV_NAMES = "Bucket, Key, VersionId, IsLatest, IsDeleteMarker, Size, LastModifiedDate, ETag"
_SCHEMA = pa.schema(
    [
        ("bucket", pa.string()),
        ("key", pa.string()),
        ("version_id", pa.string()),
        ("is_latest", pa.bool_()),
        ("is_delete_marker", pa.bool_()),
        ("size", pa.int64()),
        ("last_modified_date", pa.timestamp("ms", "UTC")),
        ("e_tag", pa.string()),
    ]
)
_FILE_SCHEMAS = {
    "CSV": _CSV_NAMES,
    "ORC": "struct<bucket:string,key:string,version_id:string,is_latest:boolean,"
    "is_delete_marker:boolean,size:bigint,last_modified_date:timestamp,e_tag:string>",
    "Parquet": "message s3.inventory { required binary bucket (UTF8); required binary key (UTF8);"
    " optional binary version_id (UTF8); optional boolean is_latest; optional boolean"
    " is_delete_marker; optional int64 size; optional int64 last_modified_date"
    " (TIMESTAMP(MILLIS,true)); optional binary e_tag (UTF8); }",
}


@dataclass(frozen=True, slots=True)
class Listed:
    """A row of an inventory: by default an old, current object."""

    key: str
    size: int | None = 10
    modified_ms: int = LONG_AGO_MS
    version: str = "v1"
    is_latest: bool = True
    is_marker: bool = False
    bucket: str = "bucket"


def write_inventory(
    folder: Path,
    rows: Sequence[Listed],
    kind: str = "CSV",
    *,
    parts: int = 2,
    started_ms: int = LONG_AGO_MS + 1,
    with_versions: bool = True,
    **fields: Any,
) -> Path:
    """Write an inventory in the manner of S3 below `folder`; gives the manifest's path.

    `fields` replace those of the manifest.
    """
    listed = []
    for number in range(parts):
        name = f"lists/bucket/daily/data/{number}.{_ENDINGS[kind]}"
        body = _body(rows[number::parts], kind, with_versions)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        listed.append({"key": name, "size": len(body), "MD5checksum": _md5(body)})
    schema = _FILE_SCHEMAS[kind]
    document = {
        "sourceBucket": "bucket",
        "destinationBucket": "arn:aws:s3:::lists",
        "version": "2016-11-30",
        "creationTimestamp": str(started_ms),
        "fileFormat": kind,
        "fileSchema": schema if with_versions else _without_versions(schema),
        "files": listed,
    } | fields
    return write_manifest(folder, document)


def write_manifest(folder: Path, document: object) -> Path:
    """Write a manifest and its checksum."""
    path = folder / "lists/bucket/daily/2026-05-01T01-00Z/manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    body = json.dumps(document).encode()
    path.write_bytes(body)
    path.with_name("manifest.checksum").write_text(_md5(body))
    return path


def _md5(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def _without_versions(schema: str) -> str:
    assert schema is _CSV_NAMES, "only CSV is written without versions here"
    return "Bucket, Key, Size, LastModifiedDate, ETag"


def _body(rows: Sequence[Listed], kind: str, with_versions: bool) -> bytes:
    if kind == "CSV":
        return gzip.compress(_csv(rows, with_versions).encode())
    values = [
        (
            *(row.bucket, row.key, row.version, row.is_latest, row.is_marker, row.size),
            datetime.fromtimestamp(row.modified_ms / 1000, UTC),
            "e",
        )
        for row in rows
    ]
    columns = list(zip(*values, strict=True)) or [()] * len(_NAMES)
    table = pa.table(dict(zip(_NAMES, columns, strict=True)), schema=_SCHEMA)
    file = io.BytesIO()
    if kind == "ORC":
        pa_orc.write_table(table, file)
    else:
        pq.write_table(table, file)
    return file.getvalue()


def _csv(rows: Sequence[Listed], with_versions: bool) -> str:
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    for row in rows:
        moment = datetime.fromtimestamp(row.modified_ms / 1000, UTC)
        size = "" if row.size is None else row.size
        flags = (str(row.is_latest).lower(), str(row.is_marker).lower())
        versions = (row.version, *flags) if with_versions else ()
        shown = moment.strftime("%Y-%m-%dT%H:%M:%S.000Z")
        writer.writerow([row.bucket, quote_plus(row.key, safe="/"), *versions, size, shown, "e"])
    return text.getvalue()
