"""A child process that adopts in batches of three objects, and kills somebody at an ordered call.

Arguments: the step ("before" the call, "under way" or "after" its answer), the number of the call,
the process to kill (0 is the child itself), then the words of the command.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any
from unittest.mock import patch

from streammeta.cli.framework.output import run_cli
from streammeta.cli.recovery import adoption_command
from streammeta.cli.root import cli
from streammeta.storage.adoption import planner

OBJECTS_A_BATCH = 3


def main() -> int:
    step, at, victim, *words = sys.argv[1:]
    left = int(at)
    adopt = adoption_command._adopt

    def kill() -> None:
        os.kill(int(victim) or os.getpid(), signal.SIGKILL)

    def doomed(*batch: Any) -> None:
        nonlocal left
        left -= 1
        if left:
            adopt(*batch)
            return
        if step == "before":
            kill()
        if step == "under way":
            threading.Timer(0.002, kill).start()
        adopt(*batch)
        if step == "after":
            kill()

    with (
        patch.object(planner, "OBJECTS_A_BATCH", OBJECTS_A_BATCH),
        patch.object(adoption_command, "_adopt", doomed),
    ):
        return run_cli(cli, words)


if __name__ == "__main__":
    sys.exit(main())
