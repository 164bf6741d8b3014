"""Reporter of the benchmarks: progress on a terminal, then tables or exactly one JSON object."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias, get_args

import rich.box
import rich.console
import rich.markup
import rich.status
import rich.table

from scripts.benchmarks.figures import Outcome, Table
from scripts.benchmarks.machine import Machine

PIPED_WIDTH = 180

Format: TypeAlias = Literal["table", "json", "markdown"]
FORMATS: tuple[Format, ...] = get_args(Format)


class Reporter:
    """Prints results to standard output, and progress to standard error if it is a terminal."""

    def __init__(self, output_format: Format) -> None:
        self._format = output_format
        self._console = rich.console.Console(
            highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH
        )
        errors = rich.console.Console(stderr=True, quiet=not sys.stderr.isatty())
        self._status = rich.status.Status("starting", console=errors)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Show progress while the block runs."""
        with self._status:
            yield

    def progress(self, text: str) -> None:
        """Show what is being measured."""
        self._status.update(text)

    def fail(self, reason: str) -> None:
        """Print why there is no result."""
        if self._format == "json":
            print(json.dumps({"ok": False, "error": reason}))
        else:
            print(f"bench: {reason}", file=sys.stderr)

    def results(
        self, machine: Machine, commit: str, other_cores: float, outcomes: Sequence[Outcome]
    ) -> None:
        """Print all outcomes, and the machine and commit they belong to."""
        if self._format == "json":
            result = {
                "ok": True,
                "machine": machine.as_json(),
                "commit": commit,
                "cores_used_by_others": other_cores,
                "benchmarks": [_to_json(outcome) for outcome in outcomes],
            }
            print(json.dumps(result))
            return

        print(f"{machine}\ncommit {commit}; others kept {other_cores:.2f} cores busy meanwhile")
        for outcome in outcomes:
            for table in outcome.all_tables():
                print()
                if self._format == "markdown":
                    print(_to_markdown(table))
                else:
                    self._print(table)

    def _print(self, table: Table) -> None:
        self._console.print(table.title, style="bold", markup=False)
        shown = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for index, column in enumerate(table.columns):
            justify: Literal["left", "right"] = "right" if table.is_numeric(index) else "left"
            shown.add_column(column, justify=justify, overflow="fold")
        for row in table.rows:
            shown.add_row(*(rich.markup.escape(str(cell)) for cell in row))
        self._console.print(shown)


def _to_markdown(table: Table) -> str:
    """Return the table in the form of docs/benchmarks.md."""
    marks = ["---:" if table.is_numeric(index) else "---" for index in range(len(table.columns))]
    rows = [table.columns, marks, *table.rows]
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([f"{table.title}:", "", *lines])


def _to_json(outcome: Outcome) -> dict[str, object]:
    return {
        "benchmark": outcome.benchmark,
        "settings": dict(outcome.settings),
        "figures": dict(outcome.figures),
        **outcome.details,
    }
