"""Settings of topics: those of Kafka that are known here, their defaults, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping

from streammeta.brokers.kafka.codes import Code, KafkaError
from streammeta.brokers.partition.log import TIMESTAMP_AFTER_MAX_MS, LogConfig
from streammeta.brokers.partition.record_batch import MAX_BATCH_BYTES
from streammeta.brokers.partition.segments import Retention, SegmentLimits

DEFAULTS: Mapping[str, str] = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "max.message.bytes": str(MAX_BATCH_BYTES),
    "message.timestamp.after.max.ms": str(TIMESTAMP_AFTER_MAX_MS),
    "message.timestamp.type": "CreateTime",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "segment.bytes": "1073741824",
    "segment.ms": "604800000",
}

_FIXED = ("cleanup.policy", "compression.type", "message.timestamp.type")
_LOWEST = {"message.timestamp.after.max.ms": 0, "retention.ms": -1, "retention.bytes": -1}


def checked(configs: Mapping[str, str | None]) -> dict[str, str]:
    """Return settings of a topic, those left empty dropped.

    Raises `KafkaError` (INVALID_CONFIG) that names a setting which is unknown or has a bad value.
    """
    found: dict[str, str] = {}
    for name, value in configs.items():
        if value is None:
            continue
        if name not in DEFAULTS:
            raise _invalid(f"{name} is not known, wanted one of {', '.join(DEFAULTS)}")
        if name in _FIXED:
            if value != DEFAULTS[name]:
                raise _invalid(
                    f"{name} is {value!r}, wanted {DEFAULTS[name]!r}: nothing else is offered"
                )
        else:
            _check_number(name, value)
        found[name] = value
    return found


def _check_number(name: str, value: str) -> None:
    lowest = _LOWEST.get(name, 1)
    try:
        is_good = lowest <= int(value) < 2**63
    except ValueError:
        is_good = False
    if not is_good:
        raise _invalid(f"{name} is {value!r}, wanted an integer of at least {lowest}")


def _invalid(message: str) -> KafkaError:
    return KafkaError(Code.INVALID_CONFIG, message)


def log_config(configs: Mapping[str, str]) -> LogConfig:
    """Return the bounds of the logs of a topic with these settings."""
    values = {**DEFAULTS, **configs}
    return LogConfig(
        max_batch_bytes=int(values["max.message.bytes"]),
        segment=SegmentLimits(int(values["segment.bytes"]), int(values["segment.ms"])),
        retention=Retention(int(values["retention.ms"]), int(values["retention.bytes"])),
        timestamp_after_max_ms=int(values["message.timestamp.after.max.ms"]),
    )
