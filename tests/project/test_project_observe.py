"""Logging never gets in the way of what is logged about."""

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import resource, structlog
from streammeta.controller.log_setup import configure_logging
configure_logging("info", as_json=True)
log = structlog.get_logger()
log.info("with_room")
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
for _ in range(3):
    log.info("without_room")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.info("room_again")
print("went on")
"""


def test_a_log_line_that_finds_no_room_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as log:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            check=False,
            timeout=60,
        )
    lines = path.read_text()
    assert (done.returncode, done.stdout) == (0, "went on\n"), lines
    assert "with_room" in lines
    assert "room_again" in lines
