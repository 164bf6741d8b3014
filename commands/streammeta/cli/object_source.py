"""Where `streammeta object` takes the bytes of an object from: a file, standard input, a bucket."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import click

from streammeta.storage.inspection.object_report import Fetch

STANDARD_INPUT = "-"


@dataclass(frozen=True, slots=True)
class OpenedObject:
    """An object to look into: its name, size in bytes, and how to get bytes `[start, end)`.

    `object_id` is what the last part of the name says, None if that is no object id.
    """

    name: str
    size: int
    fetch: Fetch

    @property
    def object_id(self) -> int | None:
        """The id in a key or file name of the product's own form."""
        last = self.name.rpartition("/")[2]
        is_canonical = last.isascii() and last.isdigit() and str(int(last)) == last
        return int(last) if is_canonical else None


@contextmanager
def opened_object(address: str) -> Iterator[OpenedObject]:
    """Open `address`: a path, `-`, or `s3://bucket/key?options`. Reads nothing yet but a stream.

    Raises `click.BadParameter` on an address of another form, `OSError` and `StorageError` when
    there is no such object or it can't be read.
    """
    if address == STANDARD_INPUT:
        yield _in_memory("standard input", sys.stdin.buffer.read())
    elif "://" in address:
        with _in_bucket(address) as found:
            yield found
    else:
        with Path(address).open("rb") as file:
            yield _in_file(address, file)


def _in_memory(name: str, data: bytes) -> OpenedObject:
    return OpenedObject(name, len(data), lambda start, end: data[start:end])


def _in_file(path: str, file: BinaryIO) -> OpenedObject:
    if not stat.S_ISREG(Path(path).stat().st_mode):
        return _in_memory(path, file.read())  # a pipe: it has no end before it is read

    def fetch(start: int, end: int) -> bytes:
        file.seek(start)
        return file.read(end - start)

    return OpenedObject(path, file.seek(0, 2), fetch)


@contextmanager
def _in_bucket(address: str) -> Iterator[OpenedObject]:
    from streammeta.storage.object_store.address import open_object_store  # boto3 is slow to import

    parts = urlsplit(address)
    key = unquote(parts.path[1:])
    if parts.scheme != "s3" or not key or parts.fragment:
        raise click.BadParameter(
            f"{address.partition('?')[0]!r} is no object; wanted a file, - for standard input, or"
            " s3://bucket/key?options with # and ? in the key percent-encoded"
        )
    query = f"?{parts.query}" if parts.query else ""
    try:
        store = open_object_store(f"s3://{parts.netloc}{query}")
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    with closing(store):
        size = store.head(key).size
        yield OpenedObject(key, size, lambda start, end: store.get_range(key, start, end))
