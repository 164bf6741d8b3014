"""`streammeta completion`: scripts for command completion in a shell."""

import click
from click.shell_completion import get_completion_class

from streammeta.cli.framework.output import Output, with_output

_PROGRAM = "streammeta"
_VARIABLE = "_STREAMMETA_COMPLETE"
"""Variable in which the scripts ask for completions. The name is click's."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@with_output
def completion(shell: str, output: Output) -> None:
    """Print the script that lets a shell complete commands, options and their values.

    \b
    Example for bash, for this shell and for all later shells of the user:
      source <(streammeta completion bash)
      streammeta completion bash > ~/.local/share/bash-completion/completions/streammeta
    """
    kind = get_completion_class(shell)
    assert kind is not None
    # The root command knows all others, so the script completes them too.
    root = click.get_current_context().find_root().command
    output.text("script", kind(root, {}, _PROGRAM, _VARIABLE).source())
