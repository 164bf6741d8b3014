"""The audit writer: lines are written in order, and callers that wait for the disk are told."""

import asyncio
import json

import pytest

from streammeta.controller.errors import AuditUnavailableError
from streammeta.controller.trust.audit.writer import AuditWriter
from tests.kit.waiting import until
from tests.trust.audit_lines import MemoryLog, line


def numbers(log: MemoryLog) -> list[int]:
    return [json.loads(one)["target"]["node"] - 1000 for one in log.written]


async def test_lines_are_written_in_order_and_all_of_them_before_the_end() -> None:
    log = MemoryLog()
    writer = AuditWriter(log)
    assert all(writer.put(line(number)) for number in range(500))
    await writer.stop()
    assert numbers(log) == list(range(500))
    assert log.synced == 500
    assert writer.head == log.chain


async def test_a_line_that_is_waited_for_is_synced_at_once() -> None:
    log = MemoryLog()
    writer = AuditWriter(log, sync_every_s=3_600)
    writer.put(line(1))
    await writer.written(line(2))
    assert log.synced == 2
    writer.put(line(3))
    await until(lambda: len(log.written) == 3)
    assert log.synced == 2
    await writer.stop()


async def test_lines_are_synced_after_a_while_if_nobody_waits() -> None:
    log = MemoryLog()
    writer = AuditWriter(log, sync_every_s=0.01)
    writer.put(line(1))
    await until(lambda: log.synced == 1)
    await writer.stop()


async def test_without_room_lines_are_lost_and_counted_by_the_next() -> None:
    log = MemoryLog(error=OSError("no room"))
    writer = AuditWriter(log, capacity=2, sync_every_s=0.01)
    assert [writer.put(line(number)) for number in range(5)] == [True, True, False, False, False]
    assert writer.problem
    log.error = None
    await until(lambda: len(log.written) == 2)
    assert writer.put(line(9))
    await writer.stop()
    assert [json.loads(one).get("dropped") for one in log.written] == [None, None, 3]
    assert writer.lost == 3


async def test_who_waits_hears_of_a_failure_and_the_line_is_written_later() -> None:
    log = MemoryLog(error=OSError("no room"))
    writer = AuditWriter(log, sync_every_s=0.01)
    with pytest.raises(AuditUnavailableError):
        await writer.written(line(1))
    await until(lambda: "no room" in writer.problem)
    log.error = None
    await until(lambda: not writer.problem)
    assert numbers(log) == [1]
    await writer.written(line(2))
    await writer.stop()
    assert numbers(log) == [1, 2]


async def test_a_failed_sync_is_a_failure() -> None:
    log = MemoryLog(sync_error=OSError("bad disk"))
    writer = AuditWriter(log, sync_every_s=0.01)
    with pytest.raises(AuditUnavailableError, match="bad disk"):
        await writer.written(line(1))
    log.sync_error = None
    await until(lambda: not writer.problem)
    await writer.stop()
    assert numbers(log) == [1]
    assert log.synced == 1


async def test_a_log_that_can_not_be_written_does_not_keep_the_process() -> None:
    writer = AuditWriter(MemoryLog(error=OSError("no room")), sync_every_s=0.01)
    writer.put(line(1))
    async with asyncio.timeout(60):
        await writer.stop()


async def test_a_log_is_reopened_by_the_thread() -> None:
    log = MemoryLog()
    writer = AuditWriter(log)
    writer.reopen()
    await until(lambda: log.reopened == 1)
    await writer.stop()


async def test_a_caller_that_has_left_is_not_told() -> None:
    log = MemoryLog()
    writer = AuditWriter(log)
    waiting = asyncio.ensure_future(writer.written(line(1)))
    await asyncio.sleep(0)
    waiting.cancel()
    await writer.stop()
    assert numbers(log) == [1]
