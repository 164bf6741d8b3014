"""Arguments of appends: checked, and converted to the form in which a writer keeps them."""

from __future__ import annotations

from collections.abc import Sequence

from streammeta.client.arguments import INT64_MAX, as_payload, check_int, check_items
from streammeta.client.upload_batch import UNKNOWN_TIME

NO_TIME = (UNKNOWN_TIME, UNKNOWN_TIME)


def checked_payloads(payloads: Sequence[bytes]) -> Sequence[bytes]:
    """Return the payloads of many records; a single bytes object is no sequence of them."""
    wanted = "a sequence of payloads; `append` takes a single one"
    payloads = check_items("payloads", payloads, wanted)
    if not payloads:
        raise ValueError("payloads is empty, wanted at least one")
    if set(map(type, payloads)) == {bytes}:
        return payloads
    return [
        one if type(one) is bytes else as_payload(f"payloads[{index}]", one)
        for index, one in enumerate(payloads)
    ]


def time_bounds(earliest_ms: int | None, latest_ms: int | None) -> tuple[int, int]:
    """Return the bounds of an append, `UNKNOWN_TIME` twice without a time; refuse nonsense."""
    if earliest_ms is None and latest_ms is None:
        return NO_TIME
    for name, value in (("timestamp_ms", earliest_ms), ("max_timestamp_ms", latest_ms)):
        if value is not None and type(value) is not int:
            check_int(name, value)
    if earliest_ms is not None and latest_ms is None:
        latest_ms = earliest_ms
    if earliest_ms is None or latest_ms is None or not 0 <= earliest_ms <= latest_ms <= INT64_MAX:
        raise ValueError(
            f"timestamp_ms is {earliest_ms} and max_timestamp_ms {latest_ms}, wanted the first or"
            " both, 0 <= timestamp_ms <= max_timestamp_ms"
        )
    return earliest_ms, latest_ms
