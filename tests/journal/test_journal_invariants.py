"""The journal stops, instead of writing, when its caller breaks an invariant."""

import pytest

from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.quorum.config import QuorumState
from tests.journal.journal_tools import DIRECTORY, STATE, batch, make, open_journal
from tests.kit.crash_disk import CrashDisk


def test_an_epoch_never_decreases_on_disk() -> None:
    disk = CrashDisk()
    make(DIRECTORY, disk)
    journal = open_journal(DIRECTORY, files=disk)

    with pytest.raises(AssertionError):
        journal.write_quorum_state(QuorumState(Epoch(STATE.epoch - 1)))

    journal.close()
    assert open_journal(DIRECTORY, files=disk).quorum_state == STATE


def test_no_offset_beyond_the_log_counts_as_flushed() -> None:
    disk = CrashDisk()
    make(DIRECTORY, disk)
    journal = open_journal(DIRECTORY, files=disk)
    journal.append([batch(0, 1, b"x")])

    journal.flushed_end = EndOffset(2)

    with pytest.raises(AssertionError):
        journal.sync()
