"""Answers about named objects, as plain values, see `answers`."""

from dataclasses import dataclass

from streammeta.controller.metadata.api.answers import Answer, ErrorsAnswer
from streammeta.controller.metadata.api.requests import OwnerKey
from streammeta.controller.metadata.tables.values import Tags

NAMES = "_streammeta/named"
"""Namespace of the names of objects."""

OWNERS = "_streammeta/named-owners"
"""Namespace of the keys that map owners to names."""

OWN_NAMESPACES = frozenset((NAMES, OWNERS))
"""Namespaces whose keys change only together with their objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteNamedObjectsAnswer(ErrorsAnswer):
    """Outcomes by name, and the number of objects that the requested owner has now."""

    remaining: int = 0
    owner_key_deleted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedObject:
    """An object and its name. It has exactly one of the two owners."""

    name: str
    object_id: int
    object_size: int
    crc32c: int
    committed_at_ms: int
    owner_stream_id: int = -1
    owner_key: OwnerKey | None = None
    metadata: Tags = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeNamedObjectsAnswer(Answer):
    """One page, in name order."""

    objects: tuple[NamedObject, ...] = ()
    next_page_token: str = ""
