"""Reference page of the RPCs' facts, generated from `streammeta.rpc.methods`."""

from __future__ import annotations

from collections.abc import Iterator

from streammeta.rpc.contract import SERVICES
from streammeta.rpc.method_facts import Access, AuditRule, MethodFacts, Retry, Work
from streammeta.rpc.methods import METHODS
from streammeta.tls.identity import Role

_ORDER = list(Role)

_RETRIES = {
    Retry.READ: "the call changes nothing",
    Retry.SAFE: "a repeat changes nothing more",
    Retry.REQUEST_ID: "a repeat with the same `request_id` returns the first answer, for 24 h",
    Retry.OBJECT_ID: "a repeat with the same object id and content returns the first answer",
    Retry.CONDITIONAL: "it depends on the request, see the comment of the call",
}

_INTRODUCTION = f"""# Methods

Controllers and the broker client read the facts of every call from the same table.
[The API](api.md) describes requests and answers, [the protocol](../protocol.md) describes failures.

- **Roles** may make the call over TLS. With "own node" a broker may only name its own node, or one
  that it recovers or compacts. A field that fewer roles may set is listed with those roles.
- **Retry** is the effect of sending the same request again after an unknown outcome.
{"".join(f"  `{retry}`: {meaning}." + chr(10) for retry, meaning in _RETRIES.items())}\
- **Audit** is the record in the [audit log](../security.md#audit): one line per call (`each` with
  all ids, `change` with their number and the first one), or one line per minute and principal
  (`summed`). A `guarded` call is recorded before it is decided, and rejected while the log can't be
  written.
- **Admission** is the class of the queue in which the call waits. A read with too many look-ups
  counts as `scan`. A call without a class does not wait.
- **Memory** states when a controller that is short of memory rejects the call: `bulk` first,
  `ordinary` at the limit and before it if the request is large, `commit` at the limit, and `vital`
  never.
- **Lists** are the repeated fields of a request, with their limits in items. The list of an answer
  is named if it may be large. Unread answers with such a list count against a memory budget.
"""


def page() -> Iterator[str]:
    """Yield the page's parts."""
    yield _INTRODUCTION
    for service in SERVICES.values():
        yield f"\n## {service.name}\n\n"
        yield "| method | roles | retry | audit | admission | memory | lists |\n"
        yield "|---|---|---|---|---|---|---|\n"
        for method in service.methods:
            facts = METHODS[method.full_name]
            anchor = f"{service.name}{method.name}".lower()
            cells = (
                f"[{method.name}](api.md#{anchor})",
                _roles(facts.access),
                str(facts.retry),
                _record(facts.audit),
                _admission(facts.work),
                facts.memory.name.lower(),
                _lists(facts),
            )
            yield f"| {' | '.join(cells)} |\n"


def _roles(access: Access) -> str:
    names = [str(role) for role in _ORDER if role in access.roles]
    if access.new_brokers and Role.BROKER not in access.roles:
        names.append("broker/new")
    text = ", ".join(names) + (" (own node)" if access.binds_brokers else "")
    for field, roles in access.roles_of_fields.items():
        text += f"; `{field}`: {', '.join(str(role) for role in _ORDER if role in roles)}"
    return text


def _record(rule: AuditRule) -> str:
    text = "guarded" if rule.is_guarded else str(rule.recorded)
    if rule.when is not None:
        fields, other = rule.when
        text += f"; with {' or '.join(f'`{field}`' for field in fields)} {_record(other)}"
    return text


def _admission(work: Work | None) -> str:
    return "" if work is None else work.kind.name.lower()


def _lists(facts: MethodFacts) -> str:
    parts = [f"`{limit.field}` {limit.least} to {limit.most}" for limit in facts.request_lists]
    if facts.answer_list is not None:
        parts.append(f"answer: `{facts.answer_list.field}`")
    return ", ".join(parts)
