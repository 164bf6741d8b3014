"""The managers of the map are asked by name: no part of one is reachable from another."""

import ast
from pathlib import Path

import pytest

from streammeta.controller import metadata
from streammeta.controller.metadata.cluster_map import ClusterMap

_MODULES = sorted(Path(metadata.__path__[0]).glob("*.py"))
_MANAGERS = (
    "_streams",
    "_objects",
    "_nodes",
    "_kvs",
    "_bucket_claim",
    "_upkeep",
    "_repeats",
)


@pytest.mark.parametrize("name", _MANAGERS)
def test_a_manager_shows_no_table(name: str) -> None:
    manager = getattr(ClusterMap(), name)
    assert [field for field in vars(manager) if not field.startswith("_")] == []
    assert not hasattr(manager, "__getitem__"), "a column by its name is no named query"


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: path.stem)
def test_private_parts_are_reached_through_their_owner_alone(path: Path) -> None:
    # `self._streams` names a manager; `self._streams._table` would reach into it.
    found = [
        f"{ast.unparse(node)} in line {node.lineno}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not _is_own(node.value)
        and not _is_builder(node)
    ]
    assert found == []


def _is_own(owner: ast.expr) -> bool:
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def _is_builder(node: ast.Attribute) -> bool:
    """Return whether `from_sections` fills its map, or a named tuple is asked for its parts."""
    if node.attr in ("_make", "_fields"):
        return True
    return isinstance(node.value, ast.Name) and node.value.id == "cluster_map"
