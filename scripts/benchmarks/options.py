"""Command-line options derived from the fields of a settings dataclass."""

import argparse
import json
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Option:
    """Help, bounds and choices of an option; bounds apply to numbers, also within lists."""

    help: str
    least: float = 1
    most: float = math.inf
    choices: Sequence[str] = ()


def option(
    default: object,
    help_text: str,
    *,
    least: float = 1,
    most: float = math.inf,
    choices: Sequence[str] = (),
) -> Any:
    """Return a dataclass field that is also an option, with this default."""
    return field(default=default, metadata={"option": Option(help_text, least, most, choices)})


def seconds(default: float, of: str) -> Any:
    """Return a field and option for a duration between 0.5 and 600 s."""
    return option(default, f"seconds {of}", least=0.5, most=600)


class Parser(argparse.ArgumentParser):
    """Parser that reports a wrong usage as JSON if JSON was asked for."""

    def error(self, message: str) -> NoReturn:
        """Print `message` and exit with 2."""
        words = " ".join(sys.argv)
        if "--format json" in words or "--format=json" in words:
            print(json.dumps({"ok": False, "error": f"usage: {message}"}))
            sys.exit(2)
        super().error(message)


def add_options(
    parser: argparse.ArgumentParser, settings: type[Any], defaults: Mapping[str, object]
) -> None:
    """Add an option for each field of `settings` that `option` made. `defaults` override theirs.

    A field whose option the parser has already is left out.
    """
    hints = get_type_hints(settings)
    for item in fields(settings):
        if item.name in defaults or "option" not in item.metadata:
            continue
        name = f"--{item.name.replace('_', '-')}"
        if name in parser._option_string_actions:
            continue
        described: Option = item.metadata["option"]

        if hints[item.name] is bool:
            parser.add_argument(name, action="store_true", help=described.help)
            continue
        convert, metavar, choices = _converter(hints[item.name], described)
        text = described.help + (f", of {', '.join(choices)}" if choices else "")
        if item.default not in (None, ()):
            text += f"; default: {_word(item.default)}"
        parser.add_argument(name, type=convert, default=item.default, metavar=metavar, help=text)


def settings_of(
    settings: type[Any], arguments: argparse.Namespace, defaults: Mapping[str, object]
) -> Any:
    """Return the settings that the command line gave."""
    given = {**vars(arguments), **defaults}
    names = [item.name for item in fields(settings) if item.name in given]
    return settings(**{name: given[name] for name in names})


def words_of(settings: Any, without: Sequence[str] = ()) -> dict[str, Sequence[str]]:
    """Return the options that give these settings, defaults included, each with its value."""
    options: dict[str, Sequence[str]] = {}
    for item in fields(settings):
        value = getattr(settings, item.name)
        is_given = value is not None and value is not False and value != ()
        if "option" in item.metadata and is_given and item.name not in without:
            options[f"--{item.name.replace('_', '-')}"] = [] if value is True else [_word(value)]
    return options


def _word(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _converter(hint: Any, described: Option) -> tuple[Callable[[str], Any], str, Sequence[str]]:
    """Return how a word becomes a value of type `hint`, its placeholder, and its choices."""
    if get_origin(hint) in (types.UnionType, Union):
        hint = next(member for member in get_args(hint) if member is not type(None))
    if get_origin(hint) is tuple:
        convert, metavar, choices = _converter(get_args(hint)[0], described)

        def convert_all(text: str) -> tuple[Any, ...]:
            return tuple(convert(part) for part in text.split(","))

        return convert_all, f"{metavar},...", choices
    if get_origin(hint) is Literal or described.choices:
        known = described.choices or get_args(hint)
        return lambda text: _choose(text, known), "NAME", known
    if hint in (int, float):
        return lambda text: _number(text, hint, described), "N", ()
    return hint, "DIR" if hint is Path else "TEXT", ()


def _choose(text: str, known: Sequence[str]) -> str:
    if text not in known:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected some of {', '.join(known)}")
    return text


def _number(text: str, kind: type[int] | type[float], described: Option) -> float:
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not described.least <= number <= described.most:
        wanted = "a whole number" if kind is int else "a number"
        most = "" if described.most == math.inf else f" and at most {described.most:g}"
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected {wanted} of at least {described.least:g}{most}"
        )
    return number
