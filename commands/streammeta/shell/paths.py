r"""Words of a command line and the paths they match: splitting, patterns, resolution in a tree.

Words are patterns of `?` (one character), `*` (any run of them), `{a,b}` (alternatives, not nested)
and `\` (quotes the next character). An unclosed or nested group is plain text, as are `[` and `]`.
An escape survives splitting and is removed where names are compared. `.` and `..` are resolved in
the text, because the tree has no links.
r
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from streammeta.shell.tree import Directory, File, Node, Path

_SPECIAL = re.compile(r"[\\?*{},\s'\"]")


@dataclass(frozen=True, slots=True)
class Pattern:
    """Compiled component. If `literal` is not None, it is the only name that matches."""

    literal: str | None
    prefix: str  # every matching name begins with it
    regex: re.Pattern[str]

    def matches(self, name: str) -> bool:
        """Return whether the whole of `name` matches."""
        return self.regex.fullmatch(name) is not None


def compile_component(component: str) -> Pattern:
    """Compile one component, which must not contain "/"."""
    translated = _translate(component)
    if translated is None:
        literal = unescape(component)
        return Pattern(literal, literal, re.compile(re.escape(literal), re.DOTALL))
    source, prefix = translated
    return Pattern(None, prefix, re.compile(source, re.DOTALL))


def escape(name: str) -> str:
    """Return `name` as a word of a command line that matches only itself."""
    return _SPECIAL.sub(lambda match: "\\" + match[0], name)


def unescape(component: str) -> str:
    """Remove the escapes from a component. A lone backslash at its end stays."""
    return re.sub(r"\\(.)", r"\1", component, flags=re.DOTALL)


def _translate(component: str) -> tuple[str, str] | None:
    """Return a regular expression and the literal prefix, or None for plain text."""
    source: list[str] = []
    prefix: list[str] = []
    in_group = is_pattern = False

    for token in re.findall(r"\\.|.", component, flags=re.DOTALL):
        match token:
            case "{" if in_group:
                return None
            case "{":
                source.append("(?:")
                in_group = is_pattern = True
            case "}" if in_group:
                source.append(")")
                in_group = False
            case "," if in_group:
                source.append("|")
            case "?" | "*":
                source.append("." if token == "?" else ".*")
                is_pattern = True
            case _:
                text = unescape(token)
                source.append(re.escape(text))
                # Text after a wildcard is not part of the prefix.
                if not is_pattern:
                    prefix.append(text)

    if in_group or not is_pattern:
        return None
    return "".join(source), "".join(prefix)


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
        # Quoted text is a token with both of its quotes. A lone quote is never closed.
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
    """Return the components of `word` as typed in `here`, without `.` and `..`.

    Names of `here` are escaped, so that the result is a path of patterns.
    """
    components = [] if word.startswith("/") else [escape(name) for name in here]
    for component in word.split("/"):
        if component == "..":
            # Above the root, `..` stays at the root as in a file system.
            del components[-1:]
        elif component not in {"", "."}:
            components.append(component)
    return tuple(components)


def resolve(root: Directory, patterns: Path) -> Iterator[tuple[Path, Node]]:
    """Yield every node that matches, with its path, in the order of the directories."""
    yield from _descend((), root, patterns)


def _descend(path: Path, node: Node, patterns: Path) -> Iterator[tuple[Path, Node]]:
    if not patterns:
        yield path, node
        return
    if isinstance(node, File):
        return
    pattern = compile_component(patterns[0])
    # A literal name is looked up, because listing a directory could read millions.
    if pattern.literal is not None:
        found = node.child(pattern.literal)
        if found is not None:
            yield from _descend((*path, pattern.literal), found, patterns[1:])
        return

    # The literal beginning of a pattern limits the listing.
    for child in node.children(pattern.prefix):
        if pattern.matches(child.name):
            yield from _descend((*path, child.name), child.node, patterns[1:])
