r"""Patterns for one component of a path: `?`, `*`, `{a,b}`, and `\` to take a character as it is.

`?` is one character, `*` any run of them; alternatives don't nest. An unclosed or nested group is
no pattern but plain text, as are `[` and `]`. Knows nothing of trees.
"""

import re
from dataclasses import dataclass

_SPECIAL = re.compile(r"[\\?*{},\s'\"]")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled component. If `literal` is not None, it is the only name that matches."""

    literal: str | None
    prefix: str  # every matching name begins with it
    regex: re.Pattern[str]

    def matches(self, name: str) -> bool:
        """Whether the whole of `name` matches."""
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
    """Write `name` so that as a word of a command line it matches itself alone."""
    return _SPECIAL.sub(lambda match: "\\" + match[0], name)


def unescape(component: str) -> str:
    """Take the escapes out of a component; a lone backslash at its end stays."""
    return re.sub(r"\\(.)", r"\1", component, flags=re.DOTALL)


def _translate(component: str) -> tuple[str, str] | None:
    """A regular expression and the literal prefix, or None for plain text."""
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
                if not is_pattern:
                    prefix.append(text)
    if in_group or not is_pattern:
        return None
    return "".join(source), "".join(prefix)
