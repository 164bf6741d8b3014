"""`streammeta version`: the installed version, for people and for rollout programs."""

import platform
from importlib import metadata

import click

from streammeta.cli.framework.output import Output, with_output
from streammeta.controller.features import SUPPORTED
from streammeta.storage.installation import DISTRIBUTION


@click.command()
@with_output
def version(output: Output) -> None:
    """Show the version, its feature levels and its platform.

    `streammeta features describe` shows the level of a cluster.

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
