"""Facts of one RPC: access, audit, retries, admission, memory and lists.

Types of the table in `streammeta.rpc.method_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum, auto
from typing import Any

from streammeta.tls.identity import Role

BATCH_MAX = 10_000
"""Maximum number of items in one list of a request, unless its row states another limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Roles that may call a method, and the restrictions of their calls."""

    roles: frozenset[Role]
    binds_brokers: bool = False
    """Whether a broker may only name its own node, or one assigned to it."""
    new_brokers: bool = False
    """Whether a broker without a node id may call."""
    roles_of_fields: Mapping[str, frozenset[Role]] = field(default_factory=dict)
    """Roles that may set a field of the request, for fields that not every caller may set."""


class Recorded(StrEnum):
    """Audit classes: how the calls of a method are recorded."""

    EACH = "each"
    """One line per call, with all ids."""
    CHANGE = "change"
    """One line per call, with the number of ids and the first one."""
    SUMMED = "summed"
    """One line per minute and principal."""


@dataclass(frozen=True, slots=True)
class AuditRule:
    """Audit class of a method, and the fields that name the objects of a call.

    `asked` and `made` map a name in the audit line to a path into the request or the answer. A
    guarded call is recorded before it is decided, and answered after the record of its outcome is
    durable. It is rejected while the audit log can't be written.
    """

    recorded: Recorded
    is_guarded: bool = False
    at_start: bool = False
    """Whether the call is counted when it begins, because it may last for days."""
    is_always_answered: bool = False
    """Whether the call is answered although all calls need a record and none can be written."""
    asked: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)
    when: tuple[tuple[str, ...], AuditRule] | None = None
    """Fields of the request, and the rule that replaces this one if any of them is set."""

    def of(self, request: Any) -> AuditRule:
        """Return the rule for one request of the method."""
        if self.when is None:
            return self
        names, rule = self.when
        return rule if any(getattr(request, name) for name in names) else self


class Retry(StrEnum):
    """Retry safety: the effect of sending the same request again after an unknown outcome."""

    READ = "a read"
    """The call changes nothing."""
    SAFE = "safe"
    """A repeat changes nothing more."""
    REQUEST_ID = "safe by request id"
    """A repeat with the same `request_id` returns the first answer."""
    OBJECT_ID = "safe by object id"
    """A repeat with the same object id and content returns the first answer."""
    CONDITIONAL = "safe in part"
    """Depends on the request: the comment of the RPC states when."""


class RequestClass(IntEnum):
    """Admission classes by cost and urgency; a lower number is served first."""

    HEARTBEAT = 0
    COMMIT = 1
    CHANGE = 2
    READ = 3
    SCAN = 4
    SNAPSHOT = 5


DESCRIPTION_LOOKUPS = 8
"""Look-ups that the description of one stream or object, or one entry of a page, costs."""

LISTS_LOOKUPS = 60
"""Look-ups that the description of a stream with its ranges or objects costs."""


class Unnamed(Enum):
    """Work of a request that names no items."""

    NOTHING = auto()
    PAGE = auto()
    """One item for each entry of the requested page."""
    WALK = auto()
    """A walk through part of the metadata, however small the page: skipped entries cost as well."""


@dataclass(frozen=True, slots=True)
class Work:
    """Admission class of a method's requests. Requests with too many look-ups become scans."""

    kind: RequestClass
    """Class of a request with few look-ups."""
    items: str = ""
    """Repeated field of the request with the items to look up; empty if there is none."""
    lookups: int = 1
    """Look-ups that one item costs."""
    unnamed: Unnamed = Unnamed.NOTHING
    lists: tuple[str, ...] = ()
    """Flags of the request that raise the look-ups of one item to `LISTS_LOOKUPS`."""
    walks_with: str = ""
    """Flag of the request that makes it a walk; empty if there is none."""


class MemoryClass(Enum):
    """Memory classes: when a controller that is short of memory rejects a call."""

    VITAL = auto()
    """Never: the call keeps the cluster alive, serves operators, or frees memory."""
    COMMIT = auto()
    """At the limit, however large the request is."""
    ORDINARY = auto()
    """At the limit, and before it if the request is large."""
    BULK = auto()
    """Before the limit."""


@dataclass(frozen=True, slots=True)
class RequestList:
    """Repeated field of a request, and its limits in items."""

    field: str
    least: int = 1
    most: int = BATCH_MAX


@dataclass(frozen=True, slots=True)
class AnswerList:
    """Repeated field of an answer that may reach megabytes for a request of a few bytes.

    Unread answers of such methods count against a memory budget.
    """

    field: str
    is_split: bool = True
    """Whether a long list is encoded in pieces, each in its own turn of the event loop."""


@dataclass(frozen=True, slots=True)
class MethodFacts:
    """Facts of one RPC; every field is required."""

    access: Access
    audit: AuditRule
    retry: Retry
    leader_only: bool
    """Whether the leader answers, except reads at an offset. Otherwise any controller does."""
    work: Work | None
    """Admission class; None if the call is not queued by admission control."""
    memory: MemoryClass
    request_lists: tuple[RequestList, ...]
    """Lists with their own limit; rows in columns have a joint limit and are not listed."""
    answer_list: AnswerList | None
    """None if every answer is small, or the method streams its answers."""

    @property
    def is_read(self) -> bool:
        """Whether the call changes nothing."""
        return self.retry is Retry.READ
