"""`streammeta config`: the settings that a controller would run with, and where each is from."""

from __future__ import annotations

import click

from streammeta.cli.controller.controller_command import controller
from streammeta.cli.framework.config_file import origins
from streammeta.cli.framework.output import Output, with_output
from streammeta.storage.object_store.protocol.address import without_secrets

_COLUMNS = ("setting", "value", "origin")


@click.group()
def config() -> None:
    """Look at the settings of a controller.

    \b
    Example:
      streammeta config show --config controller.toml
    """


@config.command("show", context_settings={"ignore_unknown_options": True})
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF CONTROLLER]...")
@with_output
@click.pass_context
def show_command(context: click.Context, *, options: tuple[str, ...], output: Output) -> None:
    """Show what each setting of `streammeta controller` would be, and its origin.

    Takes the options of `streammeta controller`; starts nothing. Origins are, from the strongest:
    option, environment, file, default. Stores are shown without their secrets.

    \b
    Example:
      streammeta config show --config controller.toml --listen 10.0.0.1:9091
    """
    root = context.find_root()
    called = controller.make_context("controller", list(options), parent=root)
    rows = []
    for setting, value, origin in origins(called):
        is_store = setting in ("store", "backup-store") and value is not None
        shown = without_secrets(value) if is_store else value
        rows.append((setting, "" if shown is None else str(shown), origin))
    output.rows("settings", _COLUMNS, rows)
