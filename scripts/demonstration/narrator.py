"""Output of the demo and the drills: steps, a progress bar on a terminal, a summary at the end.

In a pipe it prints only the steps, and with `--format json` only the final object.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence

import rich.console
import rich.progress
import rich.table


class Narrator:
    """Printer of the steps of a program, with the seconds since its start."""

    def __init__(self, *, as_json: bool, program: str = "demo") -> None:
        self._as_json = as_json
        self._program = program
        self._console = rich.console.Console(
            file=sys.stderr if as_json else sys.stdout, quiet=as_json, highlight=False, width=110
        )
        self._began = time.monotonic()

    def step(self, text: str) -> None:
        """Print a step with the seconds since the start."""
        seconds = time.monotonic() - self._began
        self._console.print(f"[dim]{seconds:6.1f} s[/]  {text}", soft_wrap=True)

    def show(self, text: str) -> None:
        """Print another program's output, indented and verbatim."""
        for line in text.rstrip("\n").splitlines():
            self._console.print(f"          {line}", markup=False, soft_wrap=True)

    def progress(self, total: int) -> rich.progress.Progress:
        """Return a progress bar over `total` rows, which only a terminal shows."""
        bar = rich.progress.Progress(
            rich.progress.TextColumn("          {task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=self._as_json or not sys.stdout.isatty(),
        )
        bar.add_task("rows committed", total=total)
        return bar

    def fail(self, reason: str) -> None:
        """Print the reason of a failure, in JSON as one object."""
        if self._as_json:
            print(json.dumps({"ok": False, "error": reason}))
        else:
            print(f"{self._program}: {reason}", file=sys.stderr)

    def summary(self, result: Mapping[str, object], failed: Sequence[str]) -> None:
        """Print the result: a table, or exactly one JSON object."""
        if self._as_json:
            print(json.dumps({**result, "failed_checks": list(failed)} if failed else result))
            return
        table = rich.table.Table(title=f"The {self._program} in figures", title_justify="left")
        table.add_column("figure")
        table.add_column("value", justify="right")
        for name, value in result.items():
            table.add_row(name, str(value))
        self._console.print(table)
        for check in failed:
            self._console.print(f"[bold red]failed[/]  {check}")
