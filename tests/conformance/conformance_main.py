"""Run scenario files against the real controller and print every fact that does not hold.

Each scenario starts an empty controller over a log in memory: requests are decided, encoded,
replayed and committed as in a cluster of one. Compactions are planned by the planner, and carried
out by the client's compactor on such a controller and a bucket in memory. Lines that begin with
"deviation:" name facts that hold here in another, listed way (tests/conformance/deviations.yaml).
The last line counts scenarios.
Exits with 0 if all passed, 1 if one failed, 2 if the command was wrong.

Example: ./scripts/conformance tests/vectors/controller.yaml tests/vectors/get_objects.yaml
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

import structlog

from tests.conformance.conformance_files import ScenarioFileError, load_file, run_file
from tests.conformance.conformance_report import ScenarioResult


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.yaml")
    parser.add_argument(
        "--format", choices=["text", "json"], default="text", help="json: one object at the end"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    as_json = parsed.format == "json"
    try:
        for path in parsed.files:
            load_file(path)
        results = _run(parsed.files, tells=not as_json)
    except ScenarioFileError as error:
        print(json.dumps({"ok": False, "error": str(error)}) if as_json else f"error: {error}")
        return 2
    counted = [result for result in results if result.is_counted]
    passed = sum(result.is_passed for result in counted)
    failed = len(counted) - passed
    if as_json:
        found = {"ok": failed == 0, "passed": passed, "failed": failed}
        print(json.dumps({**found, "scenarios": [result.document() for result in results]}))
    else:
        print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def _run(files: list[Path], *, tells: bool) -> list[ScenarioResult]:
    results = []
    for path in files:
        for result in run_file(path):
            results.append(result)
            if tells:
                for line in result.lines():
                    print(line, flush=True)
            elif sys.stderr.isatty():
                print(f"\r{len(results)} scenarios", end="", file=sys.stderr, flush=True)
    return results


def quiet() -> None:
    """Let the controller's log say nothing: what is printed is the scenarios' alone."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


if __name__ == "__main__":
    quiet()
    logging.disable(logging.CRITICAL)  # brokers warn of failures that scenarios ask for
    sys.exit(main())
