"""A failure of Spark is told in one line that names its reason."""

from __future__ import annotations

import pytest

from streammeta.reconcile.engines.spark_session import SparkConfig, _reason_of, spark_session
from streammeta.reconcile.vocabulary.errors import ConfigurationError

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
    assert _reason_of(text).startswith(reason)


@pytest.mark.parametrize("name", ["SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"])
def test_spark_connect_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "sc://host:15002")
    with (
        pytest.raises(ConfigurationError, match=f"{name}.*'sc://host:15002'"),
        spark_session(SparkConfig()),
    ):
        pytest.fail("a session began")
