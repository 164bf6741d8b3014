"""Objects and errors of a call, as an audit line names them.

Only fields that the method's `AuditRule` names reach a line. It never names values of keys, tags,
`wal_config`, page tokens or bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

from google.protobuf.message import Message

from streammeta.controller.trust.audit.lines import clipped
from streammeta.rpc.method_facts import AuditRule, Recorded
from streammeta.v1.common_pb2 import ErrorCode

LISTED_MAX = 100
"""Maximum number of ids in a line. Longer lists are shown by count, first, last and a digest."""

LISTED_BYTES_MAX = 8_192
"""Maximum size of a list of names in a line, in bytes."""

_DIGEST_BYTES = 16


def refusals(answer: Message | None) -> tuple[str, int]:
    """Return the first error in an answer by its name, and the number of rejected items."""
    errors = [error for error in _errors(answer) if error] if answer is not None else []
    if not errors:
        return "", 0
    return ErrorCode.Name(errors[0]).removeprefix("ERROR_CODE_"), len(errors)


def _errors(answer: Any) -> Iterator[ErrorCode.ValueType]:
    for found in answer.DESCRIPTOR.fields:
        if found.name == "error":
            yield answer.error
        elif found.name == "errors":
            yield from answer.errors
        # Batch methods have an error in every item. The descriptor finds them for new methods too.
        elif found.message_type is not None and "error" in found.message_type.fields_by_name:
            yield from (item.error for item in getattr(answer, found.name))


def targets(rule: AuditRule, request: Message | None, answer: Message | None) -> dict[str, Any]:
    """Return what a call is about, as members of a line."""
    found: dict[str, Any] = {}
    for message, paths in ((request, rule.asked), (answer, rule.made)):
        for name, path in paths.items() if message is not None else ():
            values = list(_at(message, path.split(".")))
            if _is_list(message, path):
                found[name] = listed(values, all_ids=rule.recorded is Recorded.EACH)
            elif values:
                found[name] = _shown(values[0])
    return found


def listed(values: Sequence[Any], *, all_ids: bool) -> Any:
    """Return ids for a line: all of few, else their number, first, last and a digest of all."""
    # Lines of sums and samples stay small. One id is enough to find the call elsewhere.
    if not all_ids:
        return {"count": len(values), **({"first": _shown(values[0])} if values else {})}
    encoded = json.dumps(values).encode()
    if len(values) <= LISTED_MAX and len(encoded) <= LISTED_BYTES_MAX:
        return list(values)
    return {
        "count": len(values),
        "first": _shown(values[0]),
        "last": _shown(values[-1]),
        # Proves later which ids were meant, without writing all of them.
        "digest": f"blake2b:{blake2b(encoded, digest_size=_DIGEST_BYTES).hexdigest()}",
    }


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(part) for part in value]
    return clipped(value) if isinstance(value, str) else value


def _at(message: Any, path: Sequence[str]) -> Iterator[Any]:
    """Yield the values at a path.

    Several names with `/` between them yield a list of their values.
    """
    name, *rest = path
    if "/" in name:
        yield [getattr(message, part) for part in name.split("/")]
        return
    found = message.DESCRIPTOR.fields_by_name[name]
    # An absent message has default values, which the caller did not send.
    if found.has_presence and not message.HasField(name):
        return
    value = getattr(message, name)
    for item in value if found.is_repeated else (value,):
        if rest:
            yield from _at(item, rest)
        else:
            yield item


def _is_list(message: Any, path: str) -> bool:
    descriptor = message.DESCRIPTOR
    for name in path.split("."):
        if "/" in name:
            break
        if descriptor.fields_by_name[name].is_repeated:
            return True
        descriptor = descriptor.fields_by_name[name].message_type
    return False
