"""Methods of the contract and their facts.

Importing this module fails if a method has no row in `streammeta.rpc.method_rows`, a row has no
method, or a row names a field that does not exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from google.protobuf.descriptor import Descriptor

from streammeta.rpc.contract import SERVICES
from streammeta.rpc.method_facts import MemoryClass, MethodFacts, Retry
from streammeta.rpc.method_rows import EVERYONE, ROWS, SUMMED_ALWAYS

PACKAGE = "streammeta.v1"


def complete(
    rows: Mapping[str, MethodFacts], descriptors: Iterable[Any]
) -> Mapping[str, MethodFacts]:
    """Return the rows by full name of the method if they fit the services of a contract.

    Raises:
        ValueError: a method has no row, a row has no method, or a row names an unknown field.
    """
    methods = {method.full_name: method for service in descriptors for method in service.methods}
    # Checked in both directions, so that no method is ever served without its rules.
    if missing := sorted(methods.keys() - rows.keys()):
        raise ValueError(
            f"methods without a row in streammeta.rpc.method_rows: {', '.join(missing)}"
        )
    if unknown := sorted(rows.keys() - methods.keys()):
        raise ValueError(
            f"rows of streammeta.rpc.method_rows without a method: {', '.join(unknown)}"
        )
    problems = [problem for name, row in rows.items() for problem in _problems(methods[name], row)]
    if problems:
        raise ValueError(f"streammeta.rpc.method_rows: {'; '.join(problems)}")
    return MappingProxyType(dict(rows))


def _problems(method: Any, row: MethodFacts) -> Iterator[str]:
    """Yield what a row says of its method and the contract does not."""
    name, request, answer = method.full_name, method.input_type, method.output_type
    asked = [*row.audit.asked.values(), *row.access.roles_of_fields]
    if row.audit.when is not None:
        names, rule = row.audit.when
        asked += [*names, *rule.asked.values()]

    # The fields of streamed commits are fields of the commits in a message.
    if not method.client_streaming:
        asked += ["node.node_id"] if row.access.binds_brokers else []
        asked += ["request_id"] if row.retry is Retry.REQUEST_ID else []
        yield from (
            f"{name}: {path} is not a field of {request.name}"
            for path in asked
            if not _has_path(request, path)
        )

    yield from (
        f"{name}: {path} is not a field of {answer.name}"
        for path in row.audit.made.values()
        if not _has_path(answer, path)
    )
    lists = [(request, limit.field) for limit in row.request_lists]
    lists += [(answer, row.answer_list.field)] if row.answer_list is not None else []

    if row.work is not None:
        lists += [(request, row.work.items)] if row.work.items else []
        flags = [*row.work.lists, *([row.work.walks_with] if row.work.walks_with else [])]
        yield from (
            f"{name}: {flag} is not a field of {request.name}"
            for flag in flags
            if not _has_path(request, flag)
        )

    for message, field in lists:
        if field not in message.fields_by_name or not message.fields_by_name[field].is_repeated:
            yield f"{name}: {field} is not a repeated field of {message.name}"


def _has_path(message: Descriptor, path: str) -> bool:
    """Return whether a path such as `keys.namespace/key` leads to fields other than messages."""
    *way, last = path.split(".")
    for name in way:
        field = message.fields_by_name.get(name)
        if field is None or field.message_type is None:
            return False
        message = field.message_type
    return all(name in message.fields_by_name for name in last.split("/"))


METHODS: Mapping[str, MethodFacts] = complete(
    {
        f"{PACKAGE}.{service}.{name}": row
        for service, methods in ROWS.items()
        for name, row in methods.items()
    },
    SERVICES.values(),
)
"""Facts by full name of the method, e.g. `streammeta.v1.KVService.PutKVs`."""


def _infrastructure(memory: MemoryClass) -> MethodFacts:
    return MethodFacts(
        access=EVERYONE,
        audit=SUMMED_ALWAYS,
        retry=Retry.READ,
        leader_only=False,
        work=None,
        memory=memory,
        request_lists=(),
        answer_list=None,
    )


SERVED_METHODS: Mapping[str, MethodFacts] = MappingProxyType(
    {
        **METHODS,
        "grpc.health.v1.Health.Check": _infrastructure(MemoryClass.VITAL),
        "grpc.health.v1.Health.List": _infrastructure(MemoryClass.VITAL),
        "grpc.health.v1.Health.Watch": _infrastructure(MemoryClass.VITAL),
        "grpc.reflection.v1alpha.ServerReflection.ServerReflectionInfo": _infrastructure(
            MemoryClass.ORDINARY
        ),
    }
)
"""Facts of all methods that a controller serves: the contract, health and reflection."""


def facts_of(method: str) -> MethodFacts:
    """Return the facts of a method of the contract, e.g. `KVService.PutKVs`."""
    return METHODS[f"{PACKAGE}.{method}"]
