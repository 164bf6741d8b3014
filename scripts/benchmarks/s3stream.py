"""Price of the controllers for AutoMQ's s3stream: appends with them and with metadata in memory.

One JVM runs two nodes of s3stream, which take turns (`peers/S3streamLoad.java`). Both keep the
write-ahead log and the objects in a directory. The metadata of one are in three controllers, by the
plug-in of AutoMQ. The other has s3stream's own manager, which keeps them in the JVM. s3stream is
compiled from a checkout of AutoMQ, which AUTOMQ_HOME names.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.cluster import running_cluster
from scripts.benchmarks.figures import (
    BenchmarkError,
    Outcome,
    Progress,
    Table,
    Target,
    median,
    medians,
)
from scripts.benchmarks.options import option
from scripts.benchmarks.peers.java_load import CLIENTS, JavaLoad, jar_of

SYSTEMS = ("controllers", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of the load."""

    appends: int = option(40_000, "appends of 4 KiB in a turn")
    turns: int = option(5, "turns of each")


def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Measure the appends with both kinds of metadata."""
    if "AUTOMQ_HOME" not in os.environ:
        raise BenchmarkError(
            "set AUTOMQ_HOME to a checkout of AutoMQ, whose s3stream is not on Maven Central"
        )
    progress("s3stream: compile")
    load = JavaLoad.compile("S3streamLoad", root / "classes", _class_path(root / "classpath"))
    with running_cluster(root / "cluster") as cluster:
        progress(f"s3stream: {settings.turns} turns")
        words = (",".join(cluster.endpoints), root / "data", settings.appends, settings.turns)
        lines = load.run(*words)
    return outcome_of([line.split() for line in lines], settings)


def _class_path(file: Path) -> str:
    """Return the plug-in, s3stream and what that needs, as Maven finds it."""
    command = ["mvn", "-q", "--offline", "-f", str(CLIENTS), "-pl", "streammeta-automq-shapes"]
    goal = ["dependency:build-classpath", f"-Dmdep.outputFile={file}"]
    subprocess.run([*command, *goal], check=True, stdout=subprocess.DEVNULL)
    jars = map(jar_of, ("streammeta-automq", "streammeta-automq-shapes"))
    return ":".join((*map(str, jars), file.read_text().strip()))


def outcome_of(lines: list[list[str]], settings: Settings) -> Outcome:
    """Return the outcome of turns, each its system, seconds, and percentiles of milliseconds."""
    turns: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    for system, seconds, p50_ms, p99_ms in lines:
        speed = round(settings.appends / float(seconds), 1)
        turn = {"appends_per_s": speed, "p50_ms": float(p50_ms), "p99_ms": float(p99_ms)}
        turns[system].append(turn)
    found = {system: medians(own) for system, own in turns.items()}
    ratios = [
        ours["appends_per_s"] / peer["appends_per_s"]
        for ours, peer in zip(*turns.values(), strict=True)
    ]
    return Outcome(
        benchmark="s3stream",
        figures={f"{system}_{name}": own[name] for system, own in found.items() for name in own},
        details={"turns": turns},
        tables=[
            Table.of(
                f"{settings.appends:,} appends of 4 KiB to 16 streams, 256 in flight, medians",
                [{"metadata": system, **own} for system, own in found.items()],
                "metadata | appends/s = appends_per_s | p50 ms = p50_ms | p99 ms = p99_ms",
            )
        ],
        targets=[Target("price of the controllers", "at most", 0.05, 1 - median(ratios))],
    )
