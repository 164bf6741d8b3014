"""Page of the Python API, from signatures, docstrings and the comments of fields."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

PACKAGES = (
    "streammeta.client",
    "streammeta.client.sync",
    "streammeta.client.errors",
    "streammeta.client.parts",
    "streammeta.client.prometheus",
    "streammeta.reconcile",
)

_FIELD = re.compile(r"^ {4}(\w+): [^#\n]*  # (.+)$", re.MULTILINE)
"""A field of a class with the comment that follows it."""

_SECTION = re.compile(r"^(\w+):\n((?: {4}.*\n?)+)", re.MULTILINE)
"""A section of a docstring, such as the errors that are raised."""


def page() -> Iterator[str]:
    """Yield the parts of the page."""
    yield "# Python API\n\nThe public names of the client and of reconciliation."
    yield " [The broker client](../broker-client.md) and [reconciliation](../reconciliation.md)"
    yield " explain their use. [Stability](../stability.md) describes how they may change.\n"
    for name in PACKAGES:
        yield from _package(importlib.import_module(name))


def _package(package: ModuleType) -> Iterator[str]:
    yield f"\n## {package.__name__}\n\n{_docstring(package)}\n"
    # A package exports what its modules define, a module only what it defines itself.
    owner = "streammeta." if hasattr(package, "__path__") else package.__name__
    public = {
        name: value
        for name, value in sorted(vars(package).items(), key=lambda item: item[0].lower())
        if name[0] != "_" and getattr(value, "__module__", "").startswith(owner)
    }
    errors = {name: value for name, value in public.items() if name.endswith("Error")}
    for name in public.keys() - errors.keys():
        if not callable(public[name]):
            del public[name]
    for name, value in public.items():
        if name not in errors:
            yield f"\n### {name}\n\n"
            yield from _class(value) if isinstance(value, type) else _function(name, value)
    if errors:
        yield f"\n### Errors of {package.__name__}\n\n| error | base | meaning |\n|---|---|---|\n"
    for name, value in errors.items():
        bases = ", ".join(f"`{base.__name__}`" for base in value.__bases__)
        yield f"| `{name}` | {bases} | {_cell(_docstring(value))} |\n"


def _class(owner: type) -> Iterator[str]:
    yield f"{_docstring(owner)}\n"
    rows = [*_fields(owner), *_properties(owner)]
    if rows:
        yield "\n| attribute | type | default | meaning |\n|---|---|---|---|\n"
        yield from rows
    for name, member in _members(owner):
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if inspect.isfunction(function) and inspect.getdoc(function):
            yield "\n"
            yield from _function(owner.__name__ if name == "__init__" else name, function)


def _fields(owner: type) -> Iterator[str]:
    if not dataclasses.is_dataclass(owner):
        return
    comments: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("streammeta."):
            comments |= dict(_FIELD.findall(inspect.getsource(base)))
    for field in dataclasses.fields(owner):
        if field.name[0] != "_" and field.init:
            default = "" if field.default is dataclasses.MISSING else f"`{_value(field.default)}`"
            yield _row(field.name, field.type, default, comments.get(field.name, ""))


def _properties(owner: type) -> Iterator[str]:
    for name, member in _members(owner):
        if isinstance(member, property) and member.fget is not None:
            kind = member.fget.__annotations__.get("return", "")
            yield _row(name, kind, "", inspect.getdoc(member) or "")


def _row(name: str, kind: Any, default: str, meaning: str) -> str:
    return f"| `{name}` | `{_cell(_value(kind))}` | {_cell(default)} | {_cell(meaning)} |\n"


def _members(owner: type) -> Iterator[tuple[str, Any]]:
    """Yield the public members of a class and of its bases, and its constructor."""
    found: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("streammeta."):
            found |= vars(base)
    for name, member in found.items():
        if name[0] != "_" or (name == "__init__" and not dataclasses.is_dataclass(owner)):
            yield name, member


def _function(name: str, function: Any) -> Iterator[str]:
    """Yield a function as it is called, on one line of code, and its docstring."""
    signature = inspect.signature(function)
    words, previous = [], None
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and previous not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            words.append("*")
        previous = parameter.kind
        star = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(previous.name, "")
        words.append(f"{star}{parameter.name}{_suffix(parameter)}")
    prefix = "async " if inspect.iscoroutinefunction(function) else ""
    returns = signature.return_annotation
    result = "" if returns in (inspect.Signature.empty, "None") else f" -> {_value(returns)}"
    yield f"`{prefix}{name}({', '.join(words)}){result}`\n\n{_docstring(function)}\n"


def _suffix(parameter: inspect.Parameter) -> str:
    """Return the type and the default of a parameter."""
    kind = "" if parameter.annotation is parameter.empty else f": {_value(parameter.annotation)}"
    return kind if parameter.default is parameter.empty else f"{kind} = {_value(parameter.default)}"


def _value(value: Any) -> str:
    """Return an annotation or a default as it is written, without the modules of our own types."""
    if callable(value):
        name = str(getattr(value, "__qualname__", type(value).__qualname__))
        return "..." if "<lambda>" in name else name
    text = value if isinstance(value, str) and value else repr(value)
    text = re.sub(r"(?<![\w.])(?!(?:asyncio|grpc|os|random)\.)[a-z_]+\.(?=[A-Z])", "", text)
    return f"{type(value).__name__}()" if " object at 0x" in text else text


def _docstring(owner: Any) -> str:
    """Return a docstring whose sections are lists."""
    text = inspect.getdoc(owner) or ""
    return _SECTION.sub(lambda found: f"{found[1]}:\n\n{_list(found[2])}", f"{text}\n").strip()


def _list(lines: str) -> str:
    return re.sub(r"^ {8}", "  ", re.sub(r"^ {4}(?! )", "- ", lines, flags=re.M), flags=re.M)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
