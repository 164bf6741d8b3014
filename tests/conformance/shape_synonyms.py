"""Other names of keys, other units and other forms of numbers than those that a shape has itself.

A scenario may name the same thing in another way: in the singular, with its unit, under a synonym,
or one level deeper. Knows no shape and no scenario.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any

_SIZES = {
    "": 1, "b": 1, "byte": 1, "bytes": 1, "k": 1024, "m": 1024**2, "g": 1024**3,
    "kb": 1024, "mb": 1024**2, "gb": 1024**3, "kib": 1024, "mib": 1024**2, "gib": 1024**3,
}  # fmt: skip
_TIMES = {
    "ms": 1, "millis": 1, "millisecond": 1, "milliseconds": 1, "s": 1000, "sec": 1000,
    "secs": 1000, "second": 1000, "seconds": 1000, "m": 60_000, "min": 60_000, "mins": 60_000,
    "minute": 60_000, "minutes": 60_000, "h": 3_600_000, "hour": 3_600_000, "hours": 3_600_000,
    "d": 86_400_000, "day": 86_400_000, "days": 86_400_000,
}  # fmt: skip
_UNIT_OF_KEY = re.compile(r"_(ms|millis|milliseconds|s|sec|secs|seconds|min|minutes|h|hours|days)$")
_TIMED_KEYS = ("age", "lag", "interval", "timeout")
_SIZED_KEY = re.compile(r"size|bytes|length|limit|max|min|threshold|capacity|buffer|block")
_GROUPS = frozenset(
    [
        "config", "configuration", "settings", "setup", "options", "parameters", "params", "file",
        "segment", "queue", "log", "ledger", "managed_ledger", "policy", "policies", "state",
        "context", "broker", "topic", "writer", "reader",
    ]
)  # fmt: skip
"""Keys under which a scenario may gather keys that a shape has one level higher."""

SYNONYMS = (
    ("first_entry", "first_entry_id", "start_entry", "begin_entry"),
    ("last_entry", "last_entry_id", "lac", "last_add_confirmed", "end_entry"),
    ("block_size", "max_block_size", "block_bytes"),
    ("header", "header_length", "data_header_length", "header_size"),
    ("bookkeeper_deleted", "source_deleted", "deleted_from_bookkeeper", "deleted_from_source"),
    ("lag_ms", "lag", "deletion_lag_ms", "deletion_lag", "offload_deletion_lag_ms"),
    ("age_ms", "age", "since_offload_ms", "offloaded_ago_ms"),
    ("retention_minutes", "retention_ms", "retention_seconds", "retention", "retention_time"),
    ("threshold_bytes", "offload_threshold_bytes", "size_threshold_bytes", "threshold_size"),
    ("threshold_seconds", "offload_threshold_seconds", "time_threshold_seconds"),
    ("read_priority", "priority", "offloaded_read_priority"),
    ("max_entries_per_ledger", "entries_per_ledger", "ledger_entries", "rollover_entries"),
    ("trim_after_minutes", "trims", "trim_at_minutes", "trim_minutes", "trims_after_minutes"),
    ("segment_max_bytes", "max_segment_bytes", "segment_bytes", "max_segment_size", "segment_size"),
    ("max_size", "segment_size", "max_bytes", "file_size_limit", "max_file_size"),
    ("base_offset", "base", "base_position"),
    ("first_offset", "init_offset", "start_offset", "initial_offset", "from_offset", "offset"),
    ("start_size", "initial_size", "stored_size", "existing_size"),
    ("max_buffers", "max_waiting_buffers", "buffer_limit", "max_buffer_count"),
    ("items_per_file", "max_items_per_file", "file_items", "max_items", "items"),
    ("slots", "hash_slots", "slot_count", "max_hash_slots"),
    ("lookups", "lookup", "queries", "ask", "search", "searches", "asks", "times", "timestamps"),
    ("requests", "request", "reads", "read", "fetches", "gets"),
    ("stored", "stored_offsets", "stored_range", "tiered_range", "offsets_stored"),
    ("max", "max_count", "limit", "count", "max_messages"),
    ("codes", "tags_codes", "tag_codes", "filter_codes"),
    ("topics", "topic_names", "names"),
    ("black_list", "blacklist", "excluded", "black_listed"),
    ("local_earliest", "local_earliest_ms", "earliest_local", "earliest_local_time"),
    ("local", "local_earliest", "local_min", "local_time"),
    ("tiered", "tiered_earliest", "tiered_min", "tiered_time"),
    ("epoch", "node_epoch", "producer_epoch"),
    ("node", "node_id"),
    ("leader_epoch", "partition_leader_epoch"),
    ("trim", "trim_offset", "trimmed_at"),
    ("length", "body_length", "data_length"),
    ("store_timestamp", "stored_at", "store_time", "store_time_ms"),
    ("born_timestamp", "born_at", "born_time"),
    ("body_utf8", "body", "body_text"),
    ("entry_size", "entry_bytes", "bytes_per_entry", "data_size"),
    ("indexed", "indexed_entries", "index", "index_entries"),
    ("uploads", "upload", "upload_outcomes", "failures"),
    ("size", "object_size", "file_size"),
    ("offload_to", "offload_upto", "offload_up_to", "offload_position"),
    ("failing", "failing_ledger", "failing_ledgers", "fails_at"),
    ("bookies", "ensembles", "members"),
    ("digest", "digest_type"),
    ("ensemble", "ensemble_size"),
    ("custom", "custom_metadata"),
    ("created_ms", "created", "ctime", "creation_time"),
    ("messages", "message_count", "appended"),
    ("type", "segment_type", "file_type", "kind"),
    ("commits", "writes", "uploads"),
    ("commit", "write", "upload"),
)
"""Keys of inputs that name the same thing; a shape has one or more of each."""

FACT_SYNONYMS = (
    ("end", "next_offset", "end_offset", "log_end", "log_end_offset"),
    ("start", "log_start", "start_offset", "log_start_offset", "start_position"),
    ("end", "end_position"),
    ("min", "min_offset", "first", "start"),
    ("commit", "committed", "commit_offset", "committed_offset"),
    ("append", "append_offset", "max_offset", "end_offset", "end"),
    ("segments", "segment_count", "files", "file_count"),
    ("bases", "base_offsets", "segment_bases"),
    ("complete", "offloaded", "completed", "offload_complete", "complete_ledgers"),
    ("in_bookkeeper", "sources", "bookkeeper", "in_source", "kept_in_bookkeeper"),
    ("stored", "in_store", "in_blob_store", "in_tiered_storage", "offloaded"),
    ("deleted_from_store", "deleted", "deleted_offloads", "deleted_copies"),
    ("first_unoffloaded", "first_not_offloaded", "first_unoffloaded_position"),
    ("item_count", "items"),
    ("used_slots", "slot_count", "hash_slot_count", "slots_used"),
    ("status", "state", "file_status", "statuses"),
    ("found", "hits", "found_items", "items", "result_count", "results"),
    ("error", "exception", "refused", "refusal", "fails_with", "throws"),
    ("last_seq", "last_sequence"),
    ("first_seq", "first_sequence"),
    ("producers", "active_producers", "producer_count"),
    ("snapshots", "snapshot_offsets"),
    ("map_end", "producer_map_end", "end_of_map"),
    ("clean_shutdown", "cleaned_shutdown", "closed_cleanly"),
    ("entry", "first_entry", "first_entry_id"),
    ("end_entry", "last_entry", "end_entry_id"),
    ("padding", "padding_bytes", "padding_size"),
    ("hex", "bytes", "bytes_hex", "encoded", "encoded_hex", "value_hex", "object_hex"),
    ("size", "bytes", "total_size", "length", "encoded_size", "header_size", "header_length"),
    ("opened_offloaded", "offloaded_opened", "opened_tiered"),
    ("need_commit", "needs_commit"),
    ("next", "next_begin_offset", "next_offset"),
    ("messages", "message_count", "count"),
    ("left", "remaining", "count"),
    ("records", "record_count", "recovered", "recovered_records"),
    ("objects", "object_count", "recovered", "recovered_objects", "ranges"),
    ("max_size", "max_sizes", "size", "sizes"),
    ("tiered", "from_tiered", "reads_tiered", "via_tiered"),
    ("chunk_count", "chunks"),
)
"""Keys of facts that name the same thing."""

_PLACES = {
    "min": 0, "start": 0, "first": 0, "begin": 0, "commit": 1, "committed": 1, "confirmed": 1,
    "end": -1, "max": -1, "append": -1, "appended": -1, "last": -1, "count": None, "size": None,
    "number": None,
}  # fmt: skip


def size_in(text: str) -> int | None:
    """Return the bytes of "64KiB" or "1 MB"; None for other words, and for mere numbers."""
    found = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([kmg]i?b?|b|bytes?)\s*", text.lower())
    return None if found is None else int(float(found[1].replace("_", "")) * _SIZES[found[2]])


def time_in(text: str) -> int | None:
    """Return the ms of "5 minutes", "1 day and 1 ms"; None for other words, and mere numbers."""
    part = rf"\d+(?:\.\d+)? ?(?:{'|'.join(sorted(_TIMES, key=len, reverse=True))})"
    if re.fullmatch(rf"\s*{part}(?:(?:,| and|,? \+)? {part})*\s*", text.lower()) is None:
        return None
    pairs = re.findall(r"(\d+(?:\.\d+)?) ?([a-z]+)", text.lower().replace(" and ", " "))
    return int(sum(float(number) * _TIMES[unit] for number, unit in pairs))


def plain_times(sentence: str) -> str:
    """Return a sentence whose times of several units are in ms: "1 day and 1 ms"."""
    unit = "|".join(sorted(_TIMES, key=len, reverse=True))
    several = rf"\b\d+ ?(?:{unit})(?:(?:,| and|,? \+) \d+ ?(?:{unit}))+\b"
    return re.sub(several, lambda found: f"{time_in(found[0])} ms", sentence)


# ---- inputs ----


def key_forms(key: str) -> Iterator[str]:
    """Yield a key, and the forms that it may have under another hand."""
    snake = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", key).lower().replace("-", "_").replace(" ", "_")
    yield snake
    for name in (
        f"{snake}s", snake.removesuffix("s"), snake.removesuffix("es"), f"{snake}_count",
        snake.removesuffix("_count"), f"is_{snake}", snake.removeprefix("is_"),
        snake.removeprefix("number_of_"), snake.removeprefix("the_"), f"{snake}_bytes",
        snake.removesuffix("_bytes"), snake.removesuffix("_id"), f"{snake}_id",
        snake.removesuffix("_offset"), f"{snake}_offset", snake.removeprefix("initial_"),
        re.sub(r"ies$", "y", snake), re.sub(r"y$", "ies", snake),
    ):  # fmt: skip
        if name != snake:
            yield name


@cache
def _without_unit(key: str) -> str:
    return _UNIT_OF_KEY.sub("", key)


def known_key(key: str, known: Collection[str]) -> str | None:
    """Return the known key that a key means; None for none."""
    forms = list(key_forms(key))
    bare = _without_unit(forms[0])
    forms += [name for name in known if _without_unit(name) in (bare, forms[0])]
    for form in forms:
        if form in known:
            return form

    words = {*forms, *map(_without_unit, forms)}
    for group in SYNONYMS:
        if not words.isdisjoint(group):
            for name in group:
                if name in known:
                    return name
    return None


def with_known_keys(
    value: Mapping[str, Any], known: Collection[str], is_known: Callable[[str], bool]
) -> dict[str, Any]:
    """Return a map under the keys that a shape has; keys that mean nothing else stay."""
    found: dict[str, Any] = {}
    for key, part in value.items():
        name = str(key)
        if isinstance(part, Mapping) and name in _GROUPS and name not in known:
            inner = with_known_keys(part, known, is_known)
            if all(key in known for key in inner) and not set(inner) & {*value, *found}:
                found |= inner
                continue
        other = None if name in known or is_known(name) else known_key(name, known)
        if other is None or other in value or other in found:
            other = name
        is_one_of_several = isinstance(part, Mapping) and other != name and other.endswith("s")
        found[other] = _in_units([part] if is_one_of_several else part, name, other)
    return found


def _in_units(value: Any, said: str, meant: str) -> Any:
    """Return a value in the unit of the key that is meant."""
    if isinstance(value, list):
        return [_in_units(item, said, meant) for item in value]
    if isinstance(value, Mapping):
        return {key: _in_units(item, str(key), str(key)) for key, item in value.items()}
    unit, wanted = _unit_of(said), _unit_of(meant)
    if isinstance(value, str):
        time = time_in(value) if wanted or said != meant or meant in _TIMED_KEYS else None
        if time is not None and size_in(value) is None:
            return time // (wanted or 1)
        size = size_in(value)
        is_plain = re.fullmatch(r"\s*[\d_.]+\s*b(ytes?)?\s*", value.lower()) is not None
        if size is not None and (not is_plain or _SIZED_KEY.search(meant)):
            return size
    elif isinstance(value, int) and not isinstance(value, bool) and unit != wanted and unit:
        return value * unit // (wanted or 1)
    return value


def _unit_of(key: str) -> int:
    found = _UNIT_OF_KEY.search(key)
    return 0 if found is None else _TIMES[found[1]]


# ---- facts ----


def fact_forms(key: str) -> Iterator[str]:
    """Yield a key of a fact, other forms of it, and what else names the same fact."""
    forms = list(key_forms(key))
    yield from forms
    for group in FACT_SYNONYMS:
        if forms[0] in group:
            yield from (name for name in group if name != forms[0])


def part_named(found: Any, name: str) -> Any:
    """Return the part of a list that a name means: of [min, committed, end], or their number.

    Raises:
        LookupError: the name means none.
    """
    if not isinstance(found, list | tuple) or name not in _PLACES:
        raise LookupError(name)
    at = _PLACES[name]
    return len(found) if at is None else found[at]


_RELATIONS: Mapping[str, Callable[[float, float], bool]] = {
    ">=|≥|at least|no less than|not less than|no fewer than|minimum": lambda a, b: a >= b,
    "<=|≤|at most|no more than|not more than|up to|maximum": lambda a, b: a <= b,
    ">|more than|greater than|larger than|over|above": lambda a, b: a > b,
    "<|less than|fewer than|smaller than|under|below": lambda a, b: a < b,
    "=|==|exactly|equal to|equals": lambda a, b: a == b,
}
_OR = {"more": ">=", "greater": ">=", "larger": ">=", "less": "<=", "fewer": "<=", "smaller": "<="}


def relation_in(text: str) -> Callable[[float], bool] | None:
    """Return whether a number has the relation of ">= 3", "at least 3", "between 1 and 3".

    None for other words.
    """
    said = " ".join(text.lower().split())
    between = re.fullmatch(r"(?:between )?(-?\d+)(?: and |\.\.| to )(-?\d+)(?: [a-z]+)?", said)
    if between is not None:
        return lambda number: int(between[1]) <= number <= int(between[2])
    several = re.fullmatch(
        r"(\S+(?: [kmg]?i?bytes)?) or (more|greater|larger|less|fewer|smaller)", said
    )
    if several is not None:
        said = f"{_OR[several[2]]} {several[1]}"
    for words, holds in _RELATIONS.items():
        found = re.fullmatch(rf"(?:{words}) ?(-?\d[\d_]*(?: ?[kmg]i?b)?)(?: [a-z]+)?", said)
        if found is not None:
            limit = size_in(found[1])
            least = int(found[1].replace("_", "")) if limit is None else limit
            return lambda number, holds=holds, least=least: holds(number, least)  # type: ignore[misc]
    if said in ("positive", "non-zero", "nonzero", "not zero", "> zero"):
        return lambda number: number > 0
    return None
