"""Shapes of the values of offloaded ledgers, and of the names and metadata of their objects."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from streammeta.brokers.pulsar.formats import ledger_values, object_names
from tests.conformance.pulsar_formats import UUID
from tests.conformance.shape_facts import AnyOf, Data, Keyed, Words
from tests.conformance.shape_vocabulary import Given, Shape


def metadata_of(given: Given) -> ledger_values.LedgerMetadata:
    segments = given.first("ensembles", "segments")
    bookies = given.take("bookies", [])
    ensembles = (
        {int(first): tuple(names) for first, names in segments.items()}
        if segments
        else {0: tuple(bookies)}
        if bookies
        else {}
    )
    metadata = ledger_values.LedgerMetadata(
        given.take("length"),
        given.take("last_entry"),
        given.first("ensemble", "ensemble_size", default=3),
        given.first("write_quorum", "quorum", default=3),
        given.first("ack_quorum", default=2),
        ledger_values.Digest[given.first("digest", default="CRC32C")],
        ensembles,
        dict(given.first("custom", "custom_metadata", default={})),
    )
    created = given.first("created", "created_ms", "ctime")
    return metadata if created is None else replace(metadata, created_ms=created)


# ---- values and names ----


def _segments_key(given: Given) -> str:
    names = ("segments", "offload_segments", "offload_segment")
    return next((name for name in names if given.has(name)), "segments")


def _context_of(given: Given) -> ledger_values.OffloadContext:
    segments = tuple(
        ledger_values.OffloadSegment(
            clause.take("uuid"),
            complete=clause.take("complete", None),
            **{
                field: clause.take(name)
                for name, field in (
                    ("assigned_timestamp", "assigned_ms"),
                    ("offloaded_timestamp", "offloaded_ms"),
                    ("end_entry", "end_entry"),
                    ("end_entry_id", "end_entry"),
                )
                if clause.has(name)
            },
        )
        for clause in given.each(_segments_key(given), [])
    )
    return ledger_values.OffloadContext(
        given.take("uuid", ""),
        given.take("complete", None) or False,
        given.first("bookkeeper_deleted", "source_deleted"),
        given.take("timestamp", None),
        given.take("driver", ""),
        dict(given.take("driver_metadata", {})),
        **({"segments": segments} if segments else {}),
    )


def _context(given: Given) -> Any:
    context = _context_of(given)
    facts: dict[str, Any] = {
        "context_hex": context.encode().hex(),
        "hex": context.encode().hex(),
        "size": len(context.encode()),
    }
    facts["round_trip"] = ledger_values.OffloadContext.decode(context.encode()) == context
    if given.has("ledger_info"):
        one = given.within("ledger_info")
        facts |= _info_facts(
            ledger_values.LedgerInfo(
                one.first("ledger_id", "ledger"),
                one.take("entries", 0),
                one.take("size", 0),
                one.take("timestamp", None),
                context,
            )
        )
    return facts


def _info_facts(info: ledger_values.LedgerInfo) -> dict[str, Any]:
    data = info.encode()
    same = ledger_values.LedgerInfo.decode(data) == info
    return {
        "ledger_info_hex": data.hex() if same else "another when read again",
        "info_size": len(data),
    }


def _info(given: Given) -> Any:
    context = _context_of(given.within("context")) if given.has("context") else None
    info = ledger_values.LedgerInfo(
        given.take("ledger_id"),
        given.take("entries", 0),
        given.take("size", 0),
        given.take("timestamp", None),
        context,
    )
    facts = _info_facts(info)
    return {
        **facts,
        "hex": facts["ledger_info_hex"],
        "size": facts["info_size"],
        "round_trip": ledger_values.LedgerInfo.decode(info.encode()) == info,
    }


def _ledger_metadata(given: Given) -> Any:
    metadata = metadata_of(given)
    data = metadata.encode()
    same = ledger_values.LedgerMetadata.decode(data) == metadata
    return {
        "hex": data.hex(),
        "metadata_hex": data.hex(),
        "size": len(data),
        "metadata_length": len(data),
        "round_trip": AnyOf(same, Words({"equal|same": same})),
    }


def _names(given: Given) -> Any:
    uuid = str(given.first("uuid", default=UUID))
    is_letter = not re.fullmatch(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid)
    letter, uuid = uuid.split(maxsplit=1)[0], UUID if is_letter else uuid
    ledger_id = given.first("ledger_id", default=0)
    made = [object_names.data_name(uuid, ledger_id), object_names.index_name(uuid, ledger_id)]
    said = {"data name": made[0], "index name": made[1]}
    segments = list(object_names.segment_names(uuid))
    ledgers = given.first("parse_ledger_of", default=[])
    pairs = given.first("parse_uuid_of", default=[])
    uuids = [object_names.uuid_of(said.get(name, name), number) for name, number in pairs]

    def short(name: str) -> Any:
        return AnyOf(name, name.replace(uuid, f"<{letter}>"), name.replace(uuid, letter))

    return {
        "ledger": [object_names.ledger_id_of(said.get(name, name)) for name in ledgers],
        "uuid": [AnyOf(text, letter if is_letter and text == uuid else text) for text in uuids],
        "names": [short(name) for name in made],
        "data": short(made[0]),
        "index": short(made[1]),
        "data_name": short(made[0]),
        "index_name": short(made[1]),
        "streaming_names": [short(segment) for segment in segments],
    }


def _object_metadata(given: Given) -> Any:
    made = object_names.object_metadata(
        given.take("role"), dict(given.first("extra", "extra_metadata", default={}))
    )
    known = object_names.is_known_version(made)
    return Keyed({**made, "known_version": known, "keys": sorted(made), "data": Data(b"")})


SHAPES = (
    Shape(
        "pulsar offload context",
        _context,
        "uuid complete | uuid driver | segments driver | uuid timestamp",
        "context_hex|ledger_info_hex|hex|size|round_trip|info_size",
        "OffloadUtils",
        keys="bookkeeper_deleted source_deleted driver_metadata offload_segments "
        "offload_segment ledger_info",
    ),
    Shape(
        "pulsar ledger info",
        _info,
        "ledger_id entries size | ledger_id context",
        "ledger_info_hex|hex|size|round_trip",
        keys="timestamp",
    ),
    Shape(
        "pulsar ledger metadata",
        _ledger_metadata,
        "length last_entry ensemble | length last_entry digest | length last_entry bookies",
        "hex|metadata_.*|size|round_trip",
        keys="ensemble_size write_quorum quorum ack_quorum ensembles segments custom "
        "custom_metadata created created_ms ctime",
    ),
    Shape(
        "pulsar object names",
        _names,
        "parse_ledger_of | parse_uuid_of | uuid ledger_id",
        "ledger|uuid|names|.*_names?|data|index",
        "DataBlockUtilsTest",
    ),
    Shape(
        "pulsar object metadata",
        _object_metadata,
        "role",
        "role|keys|known_version|.*ormatversion|ManagedLedgerName",
        "DataBlockUtilsTest",
        keys="extra extra_metadata",
    ),
)
