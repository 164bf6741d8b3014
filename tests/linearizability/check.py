"""Check recorded histories: the command for files that a failed run has left.

Prints OK, or the smallest history that no order of its operations explains. Exits with 0 if every
file is linearizable, 1 if one is not or the budget was spent, 2 if a file can't be read.

Example: python -m tests.linearizability.check history.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.linearizability.checker import DEFAULT_BUDGET, Verdict, check
from tests.linearizability.history import load
from tests.linearizability.models import MODELS, values_of
from tests.linearizability.report import explain


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written by `dump`")
    parser.add_argument(
        "--budget", type=int, default=DEFAULT_BUDGET, help=f"steps; default {DEFAULT_BUDGET}"
    )
    parser.add_argument("--format", choices=["text", "json"], default="text")
    given = parser.parse_args(arguments)
    verdicts = {}
    for path in given.files:
        try:
            name, history = load(path, values_of)
        except (OSError, ValueError) as error:
            if given.format == "json":
                print(json.dumps({"ok": False, "error": str(error)}))
            else:
                print(error, file=sys.stderr)
            return 2
        report = check(history, MODELS[name], given.budget)
        explanation = explain(report, MODELS[name], given.budget)
        verdicts[str(path)] = {"verdict": report.verdict.name, "explanation": explanation}
        if given.format == "text":
            print(f"{path}: {explanation}")
    ok = all(item["verdict"] == Verdict.LINEARIZABLE.name for item in verdicts.values())
    if given.format == "json":
        print(json.dumps({"ok": ok, "files": verdicts}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
