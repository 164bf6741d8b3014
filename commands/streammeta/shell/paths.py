"""From words to places in the tree: splitting a line into words, and words into matching nodes.

Words are patterns, so an escape survives splitting and is undone where names are compared. `.` and
`..` are taken out by looking at the text alone, as the tree has no links.
"""

import re
from collections.abc import Iterator

from streammeta.shell.glob import compile_component, escape
from streammeta.shell.tree import Directory, File, Node, Path

_TOKEN = re.compile(r"""'[^']*'|"[^"]*"|\\.|\\$|\s+|['"]|[^\\\s'"]+""", re.DOTALL)


class UnclosedQuoteError(ValueError):
    """A line ends inside a quote."""


def split_words(line: str) -> list[str]:
    """Split a line at blanks. Quoted text belongs to one word and is never a pattern.

    Raises `UnclosedQuoteError`.
    """
    words: list[str] = []
    in_word = False
    for token in _TOKEN.findall(line):
        if token.isspace():
            in_word = False
            continue
        if token in {"'", '"'}:
            raise UnclosedQuoteError(f"the quote {token} is never closed")
        text = escape(token[1:-1]) if token[0] in "'\"" else token
        if in_word:
            words[-1] += text
        else:
            words.append(text)
        in_word = True
    return words


def absolute(here: Path, word: str) -> Path:
    """The components that `word` means when typed in `here`, without `.` and `..`.

    Names of `here` are escaped, so that the result is a path of patterns.
    """
    components = [] if word.startswith("/") else [escape(name) for name in here]
    for component in word.split("/"):
        if component == "..":
            del components[-1:]
        elif component not in {"", "."}:
            components.append(component)
    return tuple(components)


def resolve(root: Directory, patterns: Path) -> Iterator[tuple[Path, Node]]:
    """Every node that matches, with its path, in the order of the directories."""
    yield from _descend((), root, patterns)


def _descend(path: Path, node: Node, patterns: Path) -> Iterator[tuple[Path, Node]]:
    if not patterns:
        yield path, node
        return
    if isinstance(node, File):
        return
    pattern = compile_component(patterns[0])
    if pattern.literal is not None:
        found = node.child(pattern.literal)
        if found is not None:
            yield from _descend((*path, pattern.literal), found, patterns[1:])
        return
    for child in node.children(pattern.prefix):
        if pattern.matches(child.name):
            yield from _descend((*path, child.name), child.node, patterns[1:])
