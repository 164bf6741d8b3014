"""Finds out what a scenario file holds and runs all of it.

A file is a map of sections; what a section is follows from its name, what a scenario is from its
fields, so files may be named and cut as one likes. Nothing is left out in silence: an unknown
section or scenario is a failure, one about what the contract does not have is said to be that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.conformance.compaction_scenarios import is_set_compaction, run_set_compaction
from tests.conformance.conformance_report import Deviation, Mismatch, ScenarioResult
from tests.conformance.deviation_rules import rules
from tests.conformance.format_scenarios import FIELDS as FORMAT_FIELDS
from tests.conformance.format_scenarios import run_format
from tests.conformance.image_scenarios import run_codec, run_image
from tests.conformance.key_tables import NOT_OFFERED, run_table
from tests.conformance.key_tables import SECTIONS as KEY_SECTIONS
from tests.conformance.layout_tables import run_layout
from tests.conformance.query_scenarios import SECTIONS as QUERY_SECTIONS
from tests.conformance.query_scenarios import run_queries
from tests.conformance.scenario_steps import run_scenario
from tests.conformance.stream_object_scenarios import is_stream_compaction, run_stream_compaction

_REMARKS = ("rules", "skipped", "code_facts_without_test", "notes")
"""Sections that state nothing that could be run."""
_INPUTS = ("input_sets", "prepared_objects")
"""Sections that scenarios of the same file name, even if this one has none that does."""


class ScenarioFileError(Exception):
    """A file can't be read as scenarios; the message says which and why."""


def load_file(path: Path) -> dict[str, Any]:
    """Return the sections of a file.

    Raises:
        ScenarioFileError: there is no such file, or it is no YAML map.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ScenarioFileError(f"{path}: {error.strerror}; name a scenario file") from error
    except yaml.YAMLError as error:
        raise ScenarioFileError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ScenarioFileError(f"{path}: holds no sections; a map of sections was expected")
    return content


def run_file(path: Path) -> Iterator[ScenarioResult]:
    """Run what a file holds; yields results as they come."""
    content = load_file(path)
    for section, entries in content.items():
        if section in (*_REMARKS, *_INPUTS, *_named(content)) or str(section).startswith("derived"):
            continue
        yield from _run_section(path.name, section, entries, content)


def _named(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sections that scenarios name as their input."""
    for scenario in content.get("scenarios") or []:
        name = scenario.get("input")
        if isinstance(name, str) and name in content:
            yield name


def _run_section(
    file: str, section: str, entries: Any, content: Mapping[str, Any]
) -> Iterator[ScenarioResult]:
    if section in NOT_OFFERED:
        yield from _not_offered(file, section, entries)
    elif section == "layout":
        yield from run_layout(file, entries)
    elif section == "scenarios":
        for scenario in entries:
            yield _run_any(file, scenario, entries, content)
    elif section in QUERY_SECTIONS:
        for entry in entries:
            yield _guarded(file, entry, lambda e, s=section: QUERY_SECTIONS[s](file, e))
    elif section == "codecs":
        for entry in entries:
            yield _guarded(file, entry, lambda e: run_codec(file, e))
    elif section in KEY_SECTIONS:
        for number, entry in enumerate(entries, start=1):
            yield run_table(file, section, number, entry)
    else:
        result = ScenarioResult(file, str(section))
        result.fail(0, "section", [Mismatch("section", section, "unknown section")])
        yield result


def _run_any(
    file: str,
    scenario: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    content: Mapping[str, Any],
) -> ScenarioResult:
    if is_stream_compaction(scenario):
        return _guarded(file, scenario, lambda e: run_stream_compaction(file, e, content))
    if is_set_compaction(scenario):
        input_sets = content.get("input_sets", {})
        return _guarded(file, scenario, lambda e: run_set_compaction(file, e, input_sets))
    steps = scenario.get("steps") or []
    if FORMAT_FIELDS & scenario.keys() and not steps:
        return _guarded(file, scenario, lambda e: run_format(file, e))
    if "queries" in scenario or "image_same_as" in scenario:
        return _guarded(file, scenario, lambda e: run_queries(file, e, entries))
    if "start" in scenario or any("op" not in step and "replay" in step for step in steps):
        return _guarded(file, scenario, lambda e: run_image(file, e))
    if steps and all("op" in step for step in steps):
        return _guarded(file, scenario, lambda e: run_scenario(file, e))
    result = ScenarioResult(file, str(scenario.get("name", "without a name")))
    result.fail(
        0, "scenario", [Mismatch("steps", "steps, replays, queries or writes", sorted(scenario))]
    )
    return result


def _guarded(file: str, entry: Mapping[str, Any], run: Any) -> ScenarioResult:
    """Run one scenario; one that breaks the runner fails, the others go on."""
    try:
        result: ScenarioResult = run(entry)
    except Exception as error:  # noqa: BLE001 - see above
        result = ScenarioResult(file, str(entry.get("name", "without a name")))
        said = f"{type(error).__name__}: {error}"
        result.fail(0, "scenario", [Mismatch("run", "no failure", said)])
    return result


def _not_offered(file: str, section: str, entries: Sequence[Any]) -> Iterator[ScenarioResult]:
    """Yield one result a section that says why nothing is run; it counts neither way."""
    rule = rules()["feature-not-offered"]
    result = ScenarioResult(file, f"{section} ({len(entries)} entries)", is_counted=False)
    result.deviations.append(Deviation(0, section, rule.feature, rule.reason))
    yield result
