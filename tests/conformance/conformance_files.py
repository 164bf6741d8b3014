"""Finds out what a scenario file holds and runs all of it.

A file is a map of sections; what a section is follows from its name, what a scenario is from its
fields, so files may be named and cut as one likes. Nothing is left out in silence: an unknown
section or scenario is a failure, one about what the contract does not have is said to be that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.conformance.compaction_scenarios import check_set_compaction, is_set_compaction
from tests.conformance.conformance_report import Mismatch, ScenarioResult
from tests.conformance.format_scenarios import check_format, is_format
from tests.conformance.image_scenarios import check_codec, check_image
from tests.conformance.kafka_layouts import SENTENCES as KAFKA_SENTENCES
from tests.conformance.layout_tables import KEY_TABLES, NOT_OFFERED, SENTENCES, check_layout
from tests.conformance.query_scenarios import SECTIONS as QUERY_SECTIONS
from tests.conformance.query_scenarios import check_queries
from tests.conformance.scenario_args import Args, Check, run_entry
from tests.conformance.scenario_steps import check_steps
from tests.conformance.shape_layouts import SHAPE_LAYOUTS, check_shape_layout
from tests.conformance.shape_scenarios import SHAPES
from tests.conformance.shape_vocabulary import check_shape, is_shape_scenario
from tests.conformance.stream_object_scenarios import check_stream_compaction, is_stream_compaction

_REMARKS = ("rules", "skipped", "code_facts_without_test", "notes")
"""Sections that state nothing that could be run."""
_NOT_CHECKED = (*SENTENCES, *KAFKA_SENTENCES, *SHAPE_LAYOUTS)
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
    if section in NOT_OFFERED:  # one result that says why nothing is run, and counts neither way
        result = ScenarioResult(file, f"{section} ({len(entries)} entries)", is_counted=False)
        result.deviate(0, section, "feature-not-offered")
        yield result
    elif section == "layout":
        for table in [name for name in entries if name in SHAPE_LAYOUTS]:
            result = ScenarioResult(file, f"layout {table}")
            result.fail(0, section, check_shape_layout(table, entries[table]))
            yield result
        for table in [name for name in entries if name not in _NOT_CHECKED]:
            check = partial(check_layout, table)
            yield run_entry(file, entries[table], section, check, name=f"layout {table}")
    elif section == "scenarios":
        for scenario in entries:
            yield run_scenario(file, scenario, content)
    elif section in _SECTIONS:
        for number, entry in enumerate(entries, start=1):
            name = f"{section} {number}"
            yield run_entry(file, entry, section, _SECTIONS[section], name=name, number=number)
    else:
        result = ScenarioResult(file, section)
        result.fail(0, "section", [Mismatch("section", section, "unknown section")])
        yield result


_SECTIONS: Mapping[str, Check] = {**QUERY_SECTIONS, **KEY_TABLES, "codecs": check_codec}


def run_scenario(
    file: str, scenario: Mapping[str, Any], content: Mapping[str, Any]
) -> ScenarioResult:
    return run_entry(file, scenario, *_kind_of(scenario, content))


def _kind_of(scenario: Mapping[str, Any], content: Mapping[str, Any]) -> tuple[str, Check]:
    """Return what a scenario is about, by its fields, and what checks it."""
    steps = scenario.get("steps") or []
    if is_stream_compaction(scenario):
        return scenario["kind"], partial(check_stream_compaction, scenario, content)
    if is_set_compaction(scenario):
        return scenario["kind"], partial(check_set_compaction, content.get("input_sets", {}))
    if is_format(scenario) and not steps:
        return "scenario", check_format
    if "queries" in scenario or "image_same_as" in scenario:
        return "scenario", partial(check_queries, content.get("scenarios", []))
    if "start" in scenario or any(
        "op" not in step and "replay" in step for step in steps if isinstance(step, dict)
    ):
        return "scenario", check_image
    if is_shape_scenario(scenario):
        return "scenario", partial(check_shape, SHAPES, scenario, content)
    if steps and all("op" in step for step in steps):
        return "scenario", partial(check_steps, scenario)
    return "scenario", _check_nothing


def _check_nothing(args: Args, _: ScenarioResult) -> Iterator[Mismatch]:
    yield Mismatch("steps", "steps, replays, queries or writes", args.names())
