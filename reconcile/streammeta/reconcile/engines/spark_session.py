"""Spark session of plan and apply: start, options, failures.

Owns Spark's options and the environment of its processes. A failed job becomes an error of one
line.
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
from streammeta.storage import errors, installation

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway  # type: ignore[import-untyped]
    from pyspark import SparkConf
    from pyspark.sql import SparkSession


DEFAULT_MASTER = "local[2]"
_DESCRIPTION = "spark.job.description"
_QUIET_LOGGING = Path(__file__).with_name("log4j2.properties")


@dataclass(frozen=True, slots=True)
class SparkConfig:
    """Location of Spark. `driver_memory` and the shuffle size suit up to about 10 million keys.

    The default `master` is spark-submit's, or `DEFAULT_MASTER`. Under spark-submit, its options
    take precedence over `driver_memory` and `shuffle_partitions`.
    """

    master: str | None = None
    driver_memory: str = "1g"
    shuffle_partitions: int = 16

    @property
    def place(self) -> str:
        """Name of the master for messages."""
        return self.master or ("the master of spark-submit" if _is_submitted() else DEFAULT_MASTER)


_INTERRUPTED = (
    "KeyboardInterrupt while sending",
    "Exception occurred while shutting down connection",
)
"""Prefixes of py4j's log lines on a signal."""


@contextmanager
def spark_session(config: SparkConfig) -> Iterator[SparkSession]:
    """Yield the process's active Spark session, or a new one that stops at the end.

    Raises:
        MissingPackageError: a package of the extra `reconcile-spark` is not installed.
        ConfigurationError: Java was not found, or SPARK_REMOTE names a Spark Connect server.
        SparkJobError: the Spark session does not start.
    """
    with installation.optional_packages("reconciliation on Spark"):
        for name in ("pyspark", "psutil"):
            importlib.import_module(name)
        # Importing pandas is slow, and only Spark's Python workers need it.
        if find_spec("pandas") is None:
            raise ModuleNotFoundError("No module named 'pandas'", name="pandas")
    _reject_remote()
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        yield running
        return
    loggers = [logging.getLogger(name) for name in (None, "py4j.clientserver")]
    for logger in loggers:
        logger.addFilter(_is_not_interrupt)
    try:
        session = _start(config)
        try:
            yield session
        finally:
            session.stop()
    finally:
        for logger in loggers:
            logger.removeFilter(_is_not_interrupt)


def _reject_remote() -> None:
    """Reject Spark Connect before the start, because it can't run tasks of data sources.

    With these variables pyspark would start no JVM, or a JVM that rejects its own options.
    """
    for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"):
        if os.environ.get(name):
            raise ConfigurationError(
                f"{name} is set to {os.environ[name]!r}, but reconciliation needs Spark"
                " in this process, not Spark Connect. Unset it, and name the cluster by --master"
                " or spark-submit"
            )


def _is_not_interrupt(record: logging.LogRecord) -> bool:
    """Return whether a log line is not py4j's report of a signal.

    On a signal, py4j logs stack traces of the interrupt and of its closed connection, although it
    raises the interrupt too.
    """
    return not str(record.msg).startswith(_INTERRUPTED)


@contextmanager
def job_errors(doing: str) -> Iterator[None]:
    """Turn errors of Spark in the block into a `SparkJobError` of one line.

    `doing` describes the block in the error, and in Spark's pages and metrics.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    with _describe_jobs(SparkSession.getActiveSession(), doing):
        try:
            yield
        except (Py4JError, PySparkException) as error:
            raise SparkJobError(f"{doing} failed: {_reason_of(str(error))}") from error


@contextmanager
def _describe_jobs(running: SparkSession | None, doing: str) -> Iterator[None]:
    """Describe the jobs of an active Spark session until the end of the block."""
    if running is None:
        yield
        return
    context = running.sparkContext
    before = context.getLocalProperty(_DESCRIPTION)
    context.setLocalProperty(_DESCRIPTION, f"streammeta reconcile: {doing}")
    try:
        yield
    finally:
        # None removes the description, although Spark's types do not allow it.
        context.setLocalProperty(_DESCRIPTION, before)  # type: ignore[arg-type]


def _start(config: SparkConfig) -> SparkSession:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    with job_errors(f"starting Spark on {config.place}"), _own_sigint():
        conf = _submitted_conf(config) if _is_submitted() else _own_conf(config)
        return SparkSession(SparkContext(conf=conf))


@contextmanager
def _own_sigint() -> Iterator[None]:
    """Keep the process's SIGINT handler, which a new Spark session replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_submitted() -> bool:
    """Return whether spark-submit started this process, with a JVM and options."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _submitted_conf(config: SparkConfig) -> SparkConf:
    """Complete the options of spark-submit without changing existing ones."""
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
    """Start a JVM with all options, unless this process has a JVM."""
    from pyspark import SparkConf, SparkContext

    master = config.master or DEFAULT_MASTER
    _prepare_environment(master)
    conf = SparkConf().setMaster(master).setAppName("streammeta reconcile")
    conf.setAll(list((_session_options(config) | _driver_options(config, master)).items()))
    # A JVM outlives its Spark session, and pyspark supports only one JVM per process.
    if SparkContext._gateway is None:
        SparkContext._ensure_initialized(gateway=_launch_jvm(conf), conf=conf)
    return conf


class _WithoutFork(dict[str, object]):
    """Arguments of a new process that ignore `preexec_fn`.

    With `preexec_fn`, Python would use a plain fork, and gRPC's fork handlers kill or hang parent
    or child after a channel was used. It only protects the JVM from Ctrl-C, which a new process
    session does too.
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
                f"Spark does not start on {os.environ['JAVA_HOME']}: {' '.join(said) or error}."
                " Set JAVA_HOME to another Java 17+ runtime, or free memory and disk space"
            ) from error
    return gateway


def _prepare_environment(master: str) -> None:
    """Set the environment of the JVM and its Python workers."""
    os.environ["JAVA_HOME"] = str(find_java_home())
    if _in_one_process(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # A variable of the user wins: executors on a cluster may have another interpreter path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    path = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    roots = [str(Path(part).parent) for part in streammeta.__path__]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*roots, *path]))


def _in_one_process(master: str) -> bool:
    """Return whether tasks run in the driver's process, which then needs no reachable address."""
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
    known = "|".join(_error_names(errors.StorageError))
    found = re.findall(rf"^(?:[\w.]+\.)?(?:{known}): (.+)$", text, re.MULTILINE)
    if found:
        return str(found[-1]).strip()
    if lost := _LOST.search(text):
        executor, reason = lost.groups()
        return (
            f"executor {executor} was lost: {reason or 'Spark names no reason'}. Look at its log,"
            " and give executors more memory if it was killed"
        )
    # py4j's own first line names a method, and the error of the JVM follows after a colon.
    raised = re.findall(r"^(?:: )?((?:[\w.]+\.)?\w+(?:Error|Exception): .+)$", text, re.MULTILINE)
    return str(raised[-1]).strip() if raised else text.strip().split("\n", 1)[0]


def _error_names(base: type[errors.StorageError]) -> list[str]:
    names = [base.__name__]
    for child in base.__subclasses__():
        names += _error_names(child)
    return names
