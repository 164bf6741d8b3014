"""Settings of a command from a TOML file: `--config FILE`, below the environment and the options.

A key is the name of an option without its dashes, `snapshot-log-bytes = 20000000`. The module knows
no particular command: the options of a command define its keys.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from streammeta.cli.framework.client import Command
from streammeta.storage.parsing import parse_toml

_ORIGINS = {
    ParameterSource.COMMANDLINE: "option",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
    ParameterSource.DEFAULT: "default",
}

# These options act at once and say nothing about the controller.
_NOT_SETTINGS = frozenset({"config", "help", "check_config"})


def config_option(command: Command) -> Command:
    """Add `--config`. The environment and the command line have precedence over the file."""
    return click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=_apply_file,
        metavar="FILE",
        help="Settings as TOML: a key for each option, by its name without dashes, such as"
        ' listen = "10.0.0.1:9091". Options and the environment go before it.',
    )(command)


def settings(command: click.Command) -> Mapping[str, click.Option]:
    """Return the options of a command that are settings, by their key in a file."""
    return {
        # The longest name is the option's long form. Short forms are not keys.
        max(option.opts, key=len).lstrip("-"): option
        for option in command.params
        if isinstance(option, click.Option) and option.name not in _NOT_SETTINGS
    }


def origins(context: click.Context) -> Iterator[tuple[str, Any, str]]:
    """Yield name, value and origin of each setting that a command was called with.

    Origins are "option", "environment", "file" and "default".
    """
    for key, option in settings(context.command).items():
        assert option.name is not None
        source = context.get_parameter_source(option.name)
        origin = "default" if source is None else _ORIGINS.get(source, "default")
        yield key, context.params[option.name], origin


def _apply_file(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is not None:
        known = settings(context.command)
        # click looks up defaults below the command line and the environment, which is the
        # documented order.
        context.default_map = {
            str(known[key].name): _check(path, key, known[key], value)
            for key, value in _read(path, known).items()
        }


def _read(path: Path, known: Mapping[str, click.Option]) -> Mapping[str, Any]:
    try:
        found = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _usage_error(path, f"{error.strerror}, must be a file that can be read") from error
    except ValueError as error:  # of TOML, or of UTF-8
        raise _usage_error(path, f"{error}, must be TOML") from error
    for key in found:
        # A misspelt key would otherwise leave a default in force without a sign.
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            meant = f"Did you mean {near[0]}?" if near else f"Known are {', '.join(sorted(known))}"
            raise _usage_error(path, f"{key}: no such setting. {meant}")
    return found


def _check(path: Path, key: str, option: click.Option, value: Any) -> Any:
    """Return a value as the option accepts it. A list replaces comma-separated values."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    # type() and not isinstance(): in Python True is an int, in TOML it is not a number.
    wanted: type = bool if option.is_flag else int if option.type is click.INT else str
    if type(value) is not wanted:
        names = {bool: "true or false", int: "a whole number", str: "a text in quotes"}
        raise _usage_error(path, f"{key}: {value!r}, must be {names[wanted]}")
    return value


def _usage_error(path: Path, problem: str) -> click.UsageError:
    return click.UsageError(f"config: {path}: {problem}")
