"""Output of child processes that should end: one that hangs prints where each thread is."""

import signal
import subprocess

from tests.kit.waiting import PATIENCE_S


def output_of(process: subprocess.Popen[str], patience_s: float = PATIENCE_S) -> tuple[str, str]:
    """Wait until `process` has ended, and return what it printed through its pipes.

    One that takes longer than `patience_s` is ended, and fails the test.
    """
    try:
        said, rest = process.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        # tests/conftest.py makes all Python processes print their stacks at this signal.
        process.send_signal(signal.SIGABRT)
        said, rest = process.communicate(timeout=PATIENCE_S)
        raise AssertionError(f"not ended within {patience_s:.0f} s: {said}\n{rest}") from None
    return said, rest
