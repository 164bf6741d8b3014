"""Shapes of AutoMQ's write-ahead log in a bucket: reservation, headers, gaps, recovery.

The log is read for inspection only, so what a running one does with its buffers is not offered, and
neither are other products' hand-over, remote segments, transactions and compaction by key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from streammeta.storage.inspection.automq_log import (
    ALIGNMENT,
    Reservation,
    continuous_ranges,
    decode_header,
    decode_reservation,
    recoverable,
)
from tests.conformance.shape_facts import Keyed
from tests.conformance.shape_sentences import number_of, ordinal_of, range_of
from tests.conformance.shape_vocabulary import Answer, Given, Shape


def _reservation(given: Given) -> Answer:
    held, outcomes = b"", list[Any]()
    for call, node_id, node_epoch, failover in given.take("input"):
        asked = Reservation(node_id, node_epoch, failover)
        if call == "acquire":
            held = asked.encode()
            outcomes.append("ok")
        else:
            outcomes.append(bool(held) and decode_reservation(held, "reservation") == asked)

    def encoded(found: re.Match[str]) -> str:
        return Reservation(int(found[1]), int(found[2]), found[3] == "true").encode().hex()

    names = {r"object_hex_of_(\d+)_(\d+)_(true|false)": encoded}
    return Answer(Keyed({"outcomes": outcomes}, names), outcomes)


def _is_reservation(value: Any, _: Any) -> bool:
    return bool(value) and all(
        isinstance(one, list) and len(one) == 4 and one[0] in ("acquire", "verify") for one in value
    )


def _reserved(given: Given) -> Any:
    data = Reservation(
        given.first("node", "node_id"),
        given.first("epoch", "node_epoch"),
        given.take("failover", False),
    ).encode()
    again = decode_reservation(data, "reservation").encode() == data
    return {"hex": data.hex() if again else "another", "object_hex": data.hex(), "size": len(data)}


def _continuous(given: Given) -> Answer:
    found = [
        list(range_)
        for range_ in continuous_ranges(map(tuple, given.take("objects")), given.take("trim", -1))
    ]
    return Answer({"objects": found, "recovered": found}, found)


def _lost(given: Given) -> Any:
    """Objects of one record each, of which some are lost."""
    said = str(given.take("objects"))
    span = range_of(said)
    count = re.match(r"\s*(\w+)", said)
    numbers = list(span or range(number_of(count[1]) if count else 0))
    lost = {
        at - 1
        for word in re.findall(r"[a-z0-9]+", str(given.take("lost")))
        if (at := ordinal_of(word)) is not None
    }
    lost = {at % len(numbers) if at < 0 else at for at in lost}
    held = {
        (at * ALIGNMENT, (at + 1) * ALIGNMENT): number
        for at, number in enumerate(numbers)
        if at not in lost
    }
    records = [held[range_] for range_ in continuous_ranges(held)]
    return {"records": records, "recovered": records}


def _recovery(given: Given) -> Answer:
    ends = {int(stream_id): end for stream_id, end in given.take("stream_ends").items()}
    kept = recoverable([(pair[0], pair[1]) for pair in given.take("records")], ends)
    found = {str(stream_id): offsets for stream_id, offsets in kept.items()}
    ended = {str(stream): max(kept.get(stream, [end - 1])) + 1 for stream, end in ends.items()}
    return Answer(_Exactly({"records": found, "recovered": found, "ends": ended, **found}, found))


class _Exactly(Keyed):
    """Streams by id; none may be left out where they are stated by themselves."""

    def __init__(self, facts: Mapping[str, Any], only: Mapping[str, Any]) -> None:
        super().__init__(facts)
        self.only = only

    def holds(self, stated: object) -> bool:
        return stated == self.only


def _header(given: Given) -> Any:
    stated = given.stated.get("hex") or given.take("hex", None)
    data = bytes.fromhex(str(stated))
    length = given.first("length", "body_length")
    size = None if length is None else length + len(data)
    header = decode_header(data, "header", size)
    wanted = {
        "start_offset": given.first("start_offset", "start"),
        "body_length": length,
        "node_id": given.first("node", "node_id"),
        "node_epoch": given.first("epoch", "node_epoch"),
        "trim_offset": given.first("trim", "trim_offset"),
    }
    sticky = given.first("sticky_record_length", "sticky_length", default=None)
    given.first("magic", "version")
    found = {name: getattr(header, name) for name in wanted}
    is_read = all(value is None or found[name] == value for name, value in wanted.items())
    is_read = is_read and sticky in (None, int.from_bytes(data[20:28], "big"))
    return {
        "hex": data.hex() if is_read else str(found),
        "size": header.header_size,
        "header_size": header.header_size,
        **found,
    }


_STATES = re.compile(r"(COPY|DELETE)_SEGMENT_(STARTED|FINISHED)")


def _are_states(value: Any, _: Any) -> bool:
    return bool(value) and all(
        isinstance(item, list) and len(item) == 2 and _STATES.search(str(item)) for item in value
    )


_WORDS = re.compile(
    r"truncat|transaction|\bmarker\b|coordinator|high watermark|snapshot, delete|delete before \d|"
    r"hand-?off|abort|snapshot\b.*\bdelete",
    re.IGNORECASE,
)


def _are_not_offered(value: Any, _: Any) -> bool:
    return (
        bool(value)
        and all(isinstance(item, str | list) for item in value)
        and _WORDS.search(" ; ".join(map(str, value))) is not None
    )


SHAPES = (
    Shape("kafka reservation", _reservation, fits=_is_reservation),
    Shape(
        "kafka reservation object",
        _reserved,
        "node epoch failover | node_id node_epoch failover",
        "hex|object_hex|size",
        "ObjectReservationServiceTest",
    ),
    Shape(
        "kafka objects of a log",
        _continuous,
        "objects trim",
        "objects|recovered",
        "ObjectWALServiceTest",
    ),
    Shape("kafka lost objects", _lost, "objects lost", "records|recovered", "ObjectWALServiceTest"),
    Shape("kafka recovery", _recovery, "stream_ends records", sources="WALRecoveryTest"),
    Shape(
        "kafka object header",
        _header,
        "start_offset node epoch | start_offset length node | start_offset node_id | "
        "start_offset trim_offset",
        "hex|size|.*_offset|header_size|body_length|node.*",
        "WALObjectHeaderTest",
        keys="start body_length node_epoch trim sticky_record_length sticky_length magic "
        "version hex",
    ),
    # not offered: what the product has nothing of
    Shape("not offered: remote segments", None, fits=_are_states),
    Shape(
        "not offered: transactions",
        None,
        "aborted | offsets aborted | entries after_reopen | transactional",
        keys="read_from appends then",
        fits=_are_not_offered,
    ),
    Shape(
        "not offered: hand-over", None, "node target wal_config | handoff", keys="node_epoch stream"
    ),
    Shape(
        "not offered: running write-ahead log",
        None,
        "epochs each | records trim_after",
        sources="ObjectWALServiceTest",
        keys="read",
    ),
    Shape(
        "not offered: segments as files",
        None,
        "base cases | bases from | streams | snapshots keep_range",
    ),
)
