"""`streammeta object`: inspect an object in a file, on standard input or in a bucket.

It connects to no controller. `storage.inspection` reads and renders. This module opens and prints.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import click

from streammeta.cli.framework.output import CommandError, Output, OutputFormat, with_output
from streammeta.storage.errors import CorruptObjectError, Deviation, PayloadError
from streammeta.storage.inspection import kafka_batch, meta_stream, object_report, rendering
from streammeta.storage.object_format.record import RECORD_HEADER_SIZE

STANDARD_INPUT = "-"


@dataclass(frozen=True, slots=True)
class OpenedObject:
    """Object to inspect: its name, size in bytes, and a reader of `[start, end)`.

    `object_id` is parsed from the last part of the name, None if that is not an object id.
    """

    name: str
    size: int
    fetch: object_report.Fetch

    @property
    def object_id(self) -> int | None:
        """Object id in a key or file name of the product's own form."""
        last = self.name.rpartition("/")[2]
        # Only the exact decimal form is a key of the product. int() would accept more.
        is_canonical = last.isascii() and last.isdigit() and str(int(last)) == last
        return int(last) if is_canonical else None


@contextmanager
def open_object(address: str) -> Iterator[OpenedObject]:
    """Open `address`: a path, `-`, or `s3://bucket/key?options`. Only streams are read now.

    Raises `click.BadParameter` on an address of another form, `OSError` and `StorageError` if the
    object does not exist or is unreadable.
    """
    # The footer is at the end of an object, so a stream has to be read completely.
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
    from streammeta.storage.object_store.opening import open_with_path  # boto3 is slow to import

    parts = urlsplit(address)
    # An unencoded # would start a fragment, and the key would silently end before it.
    if parts.scheme != "s3" or not parts.path[1:] or parts.fragment:
        raise click.BadParameter(
            f"{address.partition('?')[0]!r} is not an object, expected a file, - for standard"
            " input, or s3://bucket/key?options with # and ? in the key percent-encoded"
        )
    try:
        store, key = open_with_path(address)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    with closing(store):
        # Reads begin at the footer, so the size comes first.
        size = store.head(key).size
        yield OpenedObject(key, size, lambda start, end: store.get_range(key, start, end))


KAFKA, METASTREAM = "kafka", "metastream"


@click.group("object")
def object_group() -> None:
    """Inspect objects of the store."""


@object_group.command("dump")
@click.argument("address", metavar="FILE|s3://BUCKET/KEY|-")
@click.option(
    "--records",
    "limit",
    type=click.IntRange(min=0),
    metavar="N",
    help="Maximum number of records to read and show. [default: all]",
)
@click.option("--no-records", is_flag=True, help="Show only footer and index, the same as 0.")
@click.option("--stream", "stream_id", type=int, metavar="ID", help="Show only records.")
@click.option(
    "--decode",
    type=click.Choice([KAFKA, METASTREAM]),
    help="Show payloads as Kafka record batches of version 2, or as key-values of a MetaStream.",
)
@click.option(
    "--tolerant",
    is_flag=True,
    help="Accept deviations that AutoMQ's reader accepts too, and list them.",
)
@with_output
def dump_command(
    *,
    address: str,
    limit: int | None,
    no_records: bool,
    stream_id: int | None,
    decode: str | None,
    tolerant: bool,
    output: Output,
) -> None:
    """Show footer, index and records of an object.

    The object is a file, standard input, or in a bucket: s3://BUCKET/KEY followed by the options of
    the bucket's address (see `streammeta s3 url --help`). A composite shows its links. Its records
    are in the linked objects. A relative object, of shared streams, shows offsets from 0 on. In
    the metadata, each stream's range in the object starts at the offset to add. Violations of the
    format are shown with their position, and all readable data is read: without a valid index, all
    blocks from the first on. Exit code 0: the parts read are valid. 1: the object is corrupt or
    unreadable. 2: usage error. In json all records are in one object, decoded payloads in base64.
    Objects of other writers may deviate from the format without affecting records: see --tolerant,
    and docs/format.md for the list.

    \b
    Examples:
      streammeta object dump --no-records ./78
      streammeta object dump --stream 4 --decode kafka --records 10 \\
          's3://data/e4000000/_streammeta_demo/78?endpoint=http://127.0.0.1:9000'
    """
    if no_records:
        if limit is not None:
            raise click.UsageError("use --records or --no-records, not both")
        limit = 0
    with open_object(address) as opened:
        outline = object_report.read_outline(
            opened.name, opened.size, opened.fetch, is_tolerant=tolerant
        )
        dump = _Dump(output, outline, decode)
        dump.show_outline(opened.object_id)
        # With a limit of 0 no block must be fetched, not even the first.
        if limit != 0:
            wanted = object_report.read_records(outline, opened.fetch, stream_id)
            dump.show_records(wanted, limit)
        dump.end(stream_id)


class _Dump:
    """Shows an object while reading it, and collects its faults."""

    def __init__(
        self, output: Output, outline: object_report.ObjectOutline, decode: str | None
    ) -> None:
        self._output = output
        self._outline = outline
        self._decode = decode
        self._faults = list(outline.faults)
        self._deviations = list(outline.deviations or ())
        self._records: list[dict[str, Any]] = []
        self._shown = 0

    def show_outline(self, object_id: int | None) -> None:
        """Show footer, links and index."""
        self._output.collected |= rendering.outline_document(self._outline, object_id)
        self._say(rendering.outline_lines(self._outline, object_id))

    def show_records(self, findings: Iterator[object_report.Finding], limit: int | None) -> None:
        """Show records, at most `limit`, and the faults and deviations among them."""
        for finding in findings:
            match finding:
                case CorruptObjectError():
                    self._add_fault(finding)
                case Deviation():
                    self._deviations.append(finding)
                    self._output.note(rendering.deviation_line(finding))
                case object_report.PlacedRecord():
                    self._show(finding)
                    self._shown += 1
                    # Return before the generator fetches another block.
                    if self._shown == limit:
                        return

    def end(self, stream_id: int | None) -> None:
        """Report omitted records, and fail if anything is wrong."""
        # A broken index has no reliable number of records. A composite has its records elsewhere.
        if self._outline.is_sound and not self._outline.is_composite:
            entries = self._outline.entries
            wanted = [e for e in entries if stream_id is None or e.stream_id == stream_id]
            left = sum(entry.record_count for entry in wanted) - self._shown
            if left and not self._faults:
                self._output.note(f"records not shown: {left}")
        # Collected before the failure, so that json has these results together with the error.
        self._output.collected |= {
            "records": self._records,
            "faults": [rendering.problem_document(fault) for fault in self._faults],
            "deviations": [rendering.problem_document(deviation) for deviation in self._deviations],
        }
        if self._faults:
            raise _corrupt(self._outline.source, self._faults)

    def _add_fault(self, fault: CorruptObjectError) -> None:
        self._faults.append(fault)
        self._output.note(rendering.fault_line(fault))

    def _say(self, lines: Iterator[str]) -> None:
        for line in lines:
            self._output.note(line)

    def _show(self, placed: object_report.PlacedRecord) -> None:
        document = rendering.record_document(placed)
        self._output.note(rendering.record_line(placed.record))

        # A payload of another format is not a fault of the object. Note it and continue.
        try:
            if self._decode == KAFKA:
                self._show_kafka(placed, document)
            elif self._decode == METASTREAM:
                entry = meta_stream.decode_meta_entry(placed.record.payload)
                document["meta"] = rendering.meta_document(entry)
                self._say(rendering.meta_lines(entry))
        except PayloadError as error:
            document["not_decoded"] = rendering.payload_error_document(error)
            self._output.note(rendering.payload_error_line(error))
        # People see each record at once. json needs all of them in its single object.
        if self._output.format is OutputFormat.JSON:
            self._records.append(document)

    def _show_kafka(self, placed: object_report.PlacedRecord, document: dict[str, Any]) -> None:
        # Assigned before decoding, so that batches before an undecodable one are kept.
        batches = document["batches"] = []
        for batch in kafka_batch.decode_kafka_batches(placed.record.payload):
            records, error = _records_of(batch)
            batches.append(rendering.kafka_document(batch, records))
            self._say(rendering.kafka_lines(batch, records))
            # A wrong checksum explains undecodable records. Report the damage instead of its
            # consequence.
            if not batch.is_intact:
                self._add_fault(_find_damage(batch, placed, self._outline.source))
            elif error is not None:
                raise error


def _records_of(
    batch: kafka_batch.KafkaBatch,
) -> tuple[list[kafka_batch.KafkaRecord], PayloadError | None]:
    try:
        return kafka_batch.decode_kafka_records(batch), None
    except PayloadError as error:
        return [], error


def _find_damage(
    batch: kafka_batch.KafkaBatch, placed: object_report.PlacedRecord, source: str
) -> CorruptObjectError:
    """Return damage that only the payload's own format can detect."""
    return CorruptObjectError(
        source,
        placed.position + RECORD_HEADER_SIZE + batch.position,
        "CRC-32C of a Kafka record batch",
        f"{batch.computed_checksum:#010x}",
        f"{batch.checksum:#010x}",
    )


def _corrupt(source: str, faults: list[CorruptObjectError]) -> CommandError:
    """Name the first fault and the number of faults."""
    first = faults[0]
    return CommandError(
        "CORRUPT_OBJECT",
        f"{source} has {len(faults)} corrupt places. At byte {first.position} {first.problem}",
        "keep the object and compare it with another copy. Find the cause before you compact"
        " or delete it",
    )
