"""A tree of nested dicts: a dict is a directory, a string a file with that one value."""

from collections.abc import Iterator
from typing import Any

from streammeta.shell.tree import Child, Directory, Document, File, Node


class DictDirectory(Directory):
    """A directory over a dict; counts the children it was asked for."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.listed_count = 0

    def children(self, prefix: str = "") -> Iterator[Child]:
        for name, content in self.content.items():
            if name.startswith(prefix):
                self.listed_count += 1
                yield Child(name, node_of(content))

    def child(self, name: str) -> Node | None:
        return node_of(self.content[name]) if name in self.content else None


def node_of(content: Any) -> Node:
    if isinstance(content, dict):
        return DictDirectory(content)
    return File(lambda: None if content is None else Document((("value", content),)))


SAMPLE: dict[str, Any] = {
    "cluster": "one",
    "empty": {},
    "nodes": {"1": {"info": "first", "sets": {"68": "a", "78": "b"}}, "2": {"info": "second"}},
    "odd": {"a*b": "star", "a b": "blank", "axb": "plain", "gone": None},
    "streams": {"3": "three", "4": "four", "12": "twelve"},
}
