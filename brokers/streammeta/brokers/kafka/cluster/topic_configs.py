"""Settings of topics: the supported ones, their defaults, and their meaning.

Kafka's other settings are accepted and stored if they change nothing that a client can rely on:
they concern replicas, files and caches of a broker's own disk. An unknown setting is rejected, and
so is a value that needs a missing feature, such as compaction by key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from streammeta.brokers.kafka.protocol.codes import Code, KafkaError
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

LISTS = (
    "cleanup.policy",
    "follower.replication.throttled.replicas",
    "leader.replication.throttled.replicas",
)
"""Settings with list values, which a client may append to."""

DISKLESS = "diskless.enable"
"""Setting of topics without leaders. It is given when the topic is created, and never changes."""

_FIXED = ("cleanup.policy", "message.timestamp.type")
_LOWEST = {"message.timestamp.after.max.ms": 0, "retention.ms": -1, "retention.bytes": -1}
_CODECS = ("uncompressed", "none", "gzip", "snappy", "lz4", "zstd", "producer")


def _is_integer(lowest: int) -> Callable[[str], bool]:
    def is_one(value: str) -> bool:
        try:
            return lowest <= int(value) < 2**63
        except ValueError:
            return False

    return is_one


def _is_share(value: str) -> bool:
    try:
        return 0 <= float(value) <= 1
    except ValueError:
        return False


def _is_flag(value: str) -> bool:
    return value.lower() in ("true", "false")


_KEPT: Mapping[str, tuple[Callable[[str], bool], str]] = {
    **dict.fromkeys(
        (
            "delete.retention.ms",
            "file.delete.delay.ms",
            "index.interval.bytes",
            "message.timestamp.before.max.ms",
            "message.timestamp.difference.max.ms",
            "min.compaction.lag.ms",
            "segment.jitter.ms",
        ),
        (_is_integer(0), "an integer of at least 0"),
    ),
    **dict.fromkeys(
        (
            "compression.gzip.level",
            "compression.lz4.level",
            "compression.zstd.level",
            "local.retention.bytes",
            "local.retention.ms",
        ),
        (_is_integer(-(2**31)), "an integer"),
    ),
    **dict.fromkeys(
        (
            "flush.messages",
            "flush.ms",
            "max.compaction.lag.ms",
            "min.insync.replicas",
            "segment.index.bytes",
        ),
        (_is_integer(1), "an integer of at least 1"),
    ),
    **dict.fromkeys(
        (
            "message.downconversion.enable",
            "preallocate",
            "remote.log.copy.disable",
            "remote.log.delete.on.disable",
            "remote.storage.enable",
            "unclean.leader.election.enable",
        ),
        (_is_flag, "true or false"),
    ),
    **dict.fromkeys((*LISTS[1:], "message.format.version"), (lambda _: True, "a text")),
    "min.cleanable.dirty.ratio": (_is_share, "a number from 0 to 1"),
    "compression.type": (_CODECS.__contains__, f"one of {', '.join(_CODECS)}"),
}
"""Settings that are accepted and stored without effect, with a check of their values.

Batches keep their producers' compression, regardless of `compression.type`.
"""

_BOOLEAN, _STRING, _INT, _LONG, _DOUBLE, _LIST = 1, 2, 3, 5, 6, 7
_INTS = frozenset(
    (
        "index.interval.bytes",
        "max.message.bytes",
        "min.insync.replicas",
        "segment.bytes",
        "segment.index.bytes",
    )
)
_VALUE_MAX = 4096
_NAMED_MAX = 100


def checked(configs: Mapping[str, str | None]) -> dict[str, str]:
    """Return validated settings of a topic, without empty ones.

    Raises `KafkaError` (INVALID_CONFIG), which names the unknown or invalid setting.
    """
    found: dict[str, str] = {}
    for name, value in configs.items():
        if value is None:
            continue
        if name == DISKLESS:
            if not _is_flag(value):
                raise _invalid(f"{name} is {value[:_NAMED_MAX]!r}, expected true or false")
        elif name in _KEPT:
            _check_kept(name, value)
        elif name not in DEFAULTS:
            known = ", ".join(sorted({*DEFAULTS, *_KEPT, DISKLESS}))
            raise _invalid(f"{name[:_NAMED_MAX]} is unknown, expected one of {known}")
        elif name in _FIXED:
            if value != DEFAULTS[name]:
                raise _invalid(
                    f"{name} is {value[:_NAMED_MAX]!r}. Only {DEFAULTS[name]!r} is supported"
                )
        else:
            _check_number(name, value)
        found[name] = value

    if is_diskless(found) and int(found.get("retention.bytes", "-1")) >= 0:
        raise _invalid(f"retention.bytes has no effect with {DISKLESS}. Set retention.ms")
    return found


def is_diskless(configs: Mapping[str, str]) -> bool:
    """Return whether a topic with these settings has no leaders."""
    return configs.get(DISKLESS, "false").lower() == "true"


def checked_change(before: Mapping[str, str], configs: Mapping[str, str | None]) -> dict[str, str]:
    """Return validated new settings of a topic, which keeps its kind if they do not name it.

    Raises `KafkaError` (INVALID_CONFIG), also for a change of the kind.
    """
    kind = {DISKLESS: before[DISKLESS]} if DISKLESS in before else {}
    after = checked({**kind, **configs})
    if is_diskless(before) != is_diskless(after):
        raise _invalid(f"{DISKLESS} can't be changed. Create another topic")
    return after


def type_of(name: str) -> int:
    """Return the type of a setting as numbered by DescribeConfigs."""
    check, _ = _KEPT.get(name, (_is_flag if name == DISKLESS else None, ""))
    if name in LISTS:
        return _LIST
    if name in _INTS or name.endswith(".level"):
        return _INT
    if name.endswith((".type", ".version")):
        return _STRING
    return {_is_flag: _BOOLEAN, _is_share: _DOUBLE}.get(check, _LONG)  # type: ignore[arg-type]


def _check_kept(name: str, value: str) -> None:
    is_good, wanted = _KEPT[name]
    if len(value) > _VALUE_MAX or not is_good(value):
        raise _invalid(f"{name} is {value[:_NAMED_MAX]!r}, expected {wanted}")


def _check_number(name: str, value: str) -> None:
    lowest = _LOWEST.get(name, 1)
    if len(value) > _NAMED_MAX or not _is_integer(lowest)(value):
        given = value[:_NAMED_MAX]
        raise _invalid(f"{name} is {given!r}, expected an integer of at least {lowest}")


def _invalid(message: str) -> KafkaError:
    return KafkaError(Code.INVALID_CONFIG, message)


def log_config(configs: Mapping[str, str]) -> LogConfig:
    """Return the limits of a topic's logs for these settings."""
    values = {**DEFAULTS, **configs}
    return LogConfig(
        max_batch_bytes=int(values["max.message.bytes"]),
        segment=SegmentLimits(int(values["segment.bytes"]), int(values["segment.ms"])),
        retention=Retention(int(values["retention.ms"]), int(values["retention.bytes"])),
        timestamp_after_max_ms=int(values["message.timestamp.after.max.ms"]),
    )
