"""`streammeta version`: what is installed, for people and for programs that roll out versions."""

import platform
from importlib import metadata

import click

from streammeta.cli.framework.output import Output, with_output
from streammeta.controller.features import SUPPORTED
from streammeta.storage.installation import DISTRIBUTION


@click.command()
@with_output
def version(output: Output) -> None:
    """Show the version, the feature levels that it can run at, and what it runs on.

    A cluster's own level is told by `streammeta features describe`.

    \b
    Example:
      streammeta version --format json
    """
    output.summary(
        {
            "version": metadata.version(DISTRIBUTION),
            "lowest_feature_level": SUPPORTED.lowest,
            "highest_feature_level": SUPPORTED.highest,
            "python": platform.python_version(),
            "platform": platform.platform(),
        }
    )
