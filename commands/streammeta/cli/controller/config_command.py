"""`streammeta config`: the settings of a controller, and their origins."""

from __future__ import annotations

import click

from streammeta.cli.controller.controller_command import controller
from streammeta.cli.framework.config_file import origins
from streammeta.cli.framework.output import Output, with_output
from streammeta.storage.object_store.protocol.address import without_secrets

_COLUMNS = ("setting", "value", "origin")


@click.group()
def config() -> None:
    """Show the settings of a controller.

    \b
    Example:
      streammeta config show --config controller.toml
    """


# Options of `streammeta controller` are passed on and not interpreted here.
@config.command("show", context_settings={"ignore_unknown_options": True})
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF CONTROLLER]...")
@with_output
@click.pass_context
def show_command(context: click.Context, *, options: tuple[str, ...], output: Output) -> None:
    """Show each setting of `streammeta controller`, and its origin.

    The command accepts the options of `streammeta controller` and starts nothing. Origins are, in
    order of precedence: option, environment, file, default. Secrets in store addresses are hidden.

    \b
    Example:
      streammeta config show --config controller.toml --listen 10.0.0.1:9091
    """
    root = context.find_root()
    # make_context parses and validates the options as a start would, without running anything.
    called = controller.make_context("controller", list(options), parent=root)
    rows = []
    for setting, value, origin in origins(called):
        # Store addresses may contain access keys. No other setting is secret.
        is_store = setting in ("store", "backup-store") and value is not None
        shown = without_secrets(value) if is_store else value
        rows.append((setting, "" if shown is None else str(shown), origin))
    output.rows("settings", _COLUMNS, rows)
