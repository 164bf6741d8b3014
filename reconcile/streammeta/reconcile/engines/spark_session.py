"""Spark session that plan and apply run on: start, options, failures.

Alone in setting Spark's options and the environment its processes inherit. A failed job is reported
in one line.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import streammeta
from streammeta.reconcile.engines.java_runtime import find_java_home
from streammeta.reconcile.vocabulary.errors import ConfigurationError, SparkJobError
from streammeta.storage.errors import StorageError
from streammeta.storage.installation import optional_packages

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway  # type: ignore[import-untyped]
    from pyspark import SparkConf
    from pyspark.sql import SparkSession


DEFAULT_MASTER = "local[2]"
_DESCRIPTION = "spark.job.description"
_QUIET_LOGGING = Path(__file__).with_name("log4j2.properties")


@dataclass(frozen=True, slots=True)
class SparkConfig:
    """Where Spark runs. `driver_memory` and the shuffle size suit up to about 10 million keys.

    Without a `master` it is the one of spark-submit, or else `DEFAULT_MASTER`. Under spark-submit
    its options win over `driver_memory` and `shuffle_partitions`.
    """

    master: str | None = None
    driver_memory: str = "1g"
    shuffle_partitions: int = 16

    @property
    def place(self) -> str:
        """Name of the master for messages."""
        return self.master or ("the master of spark-submit" if _submitted() else DEFAULT_MASTER)


_INTERRUPTED = (
    "KeyboardInterrupt while sending",
    "Exception occurred while shutting down connection",
)
"""Beginnings of what py4j logs on a signal."""


@contextmanager
def spark_session(config: SparkConfig) -> Iterator[SparkSession]:
    """Give the process's running session, or else a new one that is stopped at the end.

    Raises:
        MissingPackageError: a package of the extra `reconcile-spark` is not installed.
        ConfigurationError: there is no Java, or SPARK_REMOTE names a Spark Connect server.
        SparkJobError: the session does not start.
    """
    with optional_packages("reconciliation on Spark"):
        for name in ("pyspark", "psutil"):
            importlib.import_module(name)
        # It is large, and only wanted where Spark hands rows to Python.
        if find_spec("pandas") is None:
            raise ModuleNotFoundError("No module named 'pandas'", name="pandas")
    _refuse_remote()
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        yield running
        return
    loggers = [logging.getLogger(name) for name in (None, "py4j.clientserver")]
    for logger in loggers:
        logger.addFilter(_is_no_interrupt)
    try:
        session = _start(config)
        try:
            yield session
        finally:
            session.stop()
    finally:
        for logger in loggers:
            logger.removeFilter(_is_no_interrupt)


def _refuse_remote() -> None:
    """Refuse Spark Connect before anything starts: its clients can't register data sources' tasks.

    With these variables pyspark would start no JVM, or one that refuses its own options.
    """
    for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"):
        if os.environ.get(name):
            raise ConfigurationError(
                f"{name} is set to {os.environ[name]!r}, but reconciliation needs a Spark session"
                " of its own process, not Spark Connect; unset it, and name the cluster by --master"
                " or spark-submit"
            )


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    """Whether a line is other than those of py4j on a signal, which it passes on all the same.

    It logs the signal, and that the connection it ends with that is over already, with traces.
    """
    return not str(record.msg).startswith(_INTERRUPTED)


@contextmanager
def job_errors(doing: str) -> Iterator[None]:
    """Turn what Spark raises while `doing` something into a `SparkJobError` of one line.

    Spark's pages and metrics name the jobs meanwhile by what is done.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    with _described(SparkSession.getActiveSession(), doing):
        try:
            yield
        except (Py4JError, PySparkException) as error:
            raise SparkJobError(f"{doing} failed: {_reason_of(str(error))}") from error


@contextmanager
def _described(running: SparkSession | None, doing: str) -> Iterator[None]:
    """Name the jobs of a session, if there is one, until the end of the block."""
    if running is None:
        yield
        return
    context = running.sparkContext
    before = context.getLocalProperty(_DESCRIPTION)
    context.setLocalProperty(_DESCRIPTION, f"streammeta reconcile: {doing}")
    try:
        yield
    finally:
        # None takes the name away, which Spark's types do not say.
        context.setLocalProperty(_DESCRIPTION, before)  # type: ignore[arg-type]


def _start(config: SparkConfig) -> SparkSession:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    with job_errors(f"starting Spark on {config.place}"), _own_sigint():
        conf = _submitted_conf(config) if _submitted() else _own_conf(config)
        return SparkSession(SparkContext(conf=conf))


@contextmanager
def _own_sigint() -> Iterator[None]:
    """Keep the handler of SIGINT that the process has, which a session replaces by its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _submitted() -> bool:
    """Whether spark-submit started this process, which then has a JVM and its options already."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _submitted_conf(config: SparkConfig) -> SparkConf:
    """Make the options of spark-submit complete, without changing one that it was given."""
    from pyspark import SparkConf, SparkContext

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    SparkContext._ensure_initialized()
    conf = SparkConf()
    for name, value in _session_options(config).items():
        conf.setIfMissing(name, value)
    if config.master is not None:
        conf.setMaster(config.master)
    return conf


def _own_conf(config: SparkConfig) -> SparkConf:
    """Start a JVM with all options, unless this process has one."""
    from pyspark import SparkConf, SparkContext

    master = config.master or DEFAULT_MASTER
    _prepare_environment(master)
    conf = SparkConf().setMaster(master).setAppName("streammeta reconcile")
    conf.setAll(list((_session_options(config) | _driver_options(config, master)).items()))
    # A JVM outlives its session; a second one in this process would be a stranger to pyspark.
    if SparkContext._gateway is None:
        SparkContext._ensure_initialized(gateway=_launch_jvm(conf), conf=conf)
    return conf


class _WithoutFork(dict[str, object]):
    """Arguments for starting a process that can't be given `preexec_fn`.

    With it, the process would be made by a plain fork, and gRPC's fork handlers then kill or hang
    parent or child once a channel has been used. It only keeps Ctrl-C from the JVM, which a
    session of its own does as well.
    """

    def __setitem__(self, name: str, value: object) -> None:
        if name != "preexec_fn":
            super().__setitem__(name, value)


def _launch_jvm(conf: SparkConf) -> JavaGateway:
    from pyspark.errors import PySparkException
    from pyspark.java_gateway import launch_gateway

    with tempfile.TemporaryFile() as log:
        arguments = _WithoutFork(start_new_session=True, stdout=log, stderr=log)
        try:
            gateway: JavaGateway = launch_gateway(conf, arguments)  # type: ignore[no-untyped-call]
        except (OSError, PySparkException) as error:
            log.seek(0)
            said = log.read().decode(errors="replace").strip().splitlines()[-3:]
            raise SparkJobError(
                f"Spark does not start on {os.environ['JAVA_HOME']}: {' '.join(said) or error};"
                " set JAVA_HOME to another Java 17+ runtime, or free memory and disk space"
            ) from error
    return gateway


def _prepare_environment(master: str) -> None:
    """Set what the JVM and, through it, the Python workers inherit."""
    os.environ["JAVA_HOME"] = str(find_java_home())
    if _in_one_process(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # On a cluster the interpreter may be elsewhere than here.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    path = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    roots = [str(Path(part).parent) for part in streammeta.__path__]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*roots, *path]))


def _in_one_process(master: str) -> bool:
    """Whether tasks run in the driver's process, which then nobody has to reach."""
    return master == "local" or master.startswith("local[")


def _session_options(config: SparkConfig) -> dict[str, str]:
    return {
        "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
        "spark.sql.shuffle.partitions": str(config.shuffle_partitions),
        "spark.sql.session.timeZone": "UTC",
        # HotSpot leaves methods above this size to the interpreter.
        "spark.sql.codegen.hugeMethodLimit": "8000",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
        # One wrong answer is an answer: a failed listing or deletion is reported, not repeated.
        "spark.task.maxFailures": "1",
    }


def _driver_options(config: SparkConfig, master: str) -> dict[str, str]:
    """Options of a JVM that is yet to start."""
    options = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": config.driver_memory,
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_QUIET_LOGGING.as_uri()}",
    }
    if _in_one_process(master):
        options["spark.driver.host"] = "127.0.0.1"
        options["spark.driver.bindAddress"] = "127.0.0.1"
    return options


_LOST = re.compile(
    r"ExecutorLostFailure \(executor (\S+) exited.*?\)(?: Reason: (.+))?$", re.MULTILINE
)


def _reason_of(text: str) -> str:
    """Find the last error of the traceback that a Spark message carries, or a lost executor."""
    known = "|".join(_error_names(StorageError))
    found = re.findall(rf"^(?:[\w.]+\.)?(?:{known}): (.+)$", text, re.MULTILINE)
    if found:
        return str(found[-1]).strip()
    if lost := _LOST.search(text):
        executor, reason = lost.groups()
        return (
            f"executor {executor} was lost: {reason or 'Spark names no reason'}; look at its log,"
            " and give executors more memory if it was killed"
        )
    # py4j's own first line names a method, and the error of the JVM follows after a colon.
    raised = re.findall(r"^(?:: )?((?:[\w.]+\.)?\w+(?:Error|Exception): .+)$", text, re.MULTILINE)
    return str(raised[-1]).strip() if raised else text.strip().split("\n", 1)[0]


def _error_names(base: type[StorageError]) -> list[str]:
    names = [base.__name__]
    for child in base.__subclasses__():
        names += _error_names(child)
    return names
