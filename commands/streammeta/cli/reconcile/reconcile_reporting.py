"""Report of a run of `streammeta reconcile` to the controllers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from streammeta.storage.cluster_files.reconcile_runs import Run
    from streammeta.tls.files import CallerFiles


def tell_controllers(run: Run, connect: Sequence[str], tls: CallerFiles | None) -> None:
    """Add a run to the runs on status pages. A failure is a warning on stderr."""
    from streammeta.reconcile.run_reporter import report_run

    problem = report_run(run, connect, tls)
    if problem:
        click.echo(f"warning: {problem}", err=True)
