"""Files written past the page cache hold what was written, whatever goes through it meanwhile."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from streammeta.storage.durable_files import (
    BLOCK_BYTES,
    DIRECT_BYTES,
    DirectFile,
    DiskFullError,
    PosixFileSystem,
)

ROOM = bytes(16 * BLOCK_BYTES)
PATTERN = bytes(range(1, 251))


def _is_direct(fd: int) -> bool:
    info = Path(f"/proc/self/fdinfo/{fd}").read_text()
    flags = next(line.split()[1] for line in info.splitlines() if line.startswith("flags"))
    return bool(int(flags, 8) & os.O_DIRECT)


class DirectWrites:
    """Watches `os.pwrite`: how many went past the cache, and what those are to do instead."""

    def __init__(self) -> None:
        self.count = 0
        self.error = 0
        """Error number to fail with; 0 for none."""
        self.shortened_by = 0
        self._pwrite = os.pwrite

    def __call__(self, fd: int, data: memoryview, position: int) -> int:
        if not _is_direct(fd):
            return self._pwrite(fd, data, position)
        assert position % BLOCK_BYTES == 0
        assert len(data) % BLOCK_BYTES == 0
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        self.count += 1
        if self.shortened_by:
            data = data[: len(data) - self.shortened_by]
        return self._pwrite(fd, data, position) if len(data) else 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(BLOCK_BYTES))
    try:
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"this file system has no direct writes: {error}")
    os.close(fd)
    path.unlink()
    return path


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> DirectWrites:
    writes = DirectWrites()
    monkeypatch.setattr(os, "pwrite", writes)
    return writes


@pytest.fixture
def file(path: Path) -> Iterator[DirectFile]:
    file = DirectFile(path, create=True)
    yield file
    file.close()


def test_small_writes_over_existing_bytes_go_past_the_cache(
    path: Path, file: DirectFile, direct: DirectWrites
) -> None:
    file.write(0, ROOM)
    assert direct.count == 0
    position = 100
    for _ in range(60):
        file.write(position, PATTERN)
        position += len(PATTERN)
    assert direct.count == 60
    file.sync()
    expected = bytearray(ROOM)
    expected[100:position] = PATTERN * 60
    assert path.read_bytes() == expected


def test_any_mixture_of_writes_and_cuts_is_what_a_plain_file_would_hold(
    path: Path, direct: DirectWrites
) -> None:
    rng = random.Random(7)
    file = DirectFile(path, create=True)
    expected = bytearray()
    end = 0
    for step in range(3_000):
        match rng.randrange(20):
            case 0:
                size = rng.randrange(len(expected) + 1)
                file.truncate(size)
                del expected[size:]
                end = min(end, size)
            case 1:
                file.close()
                file = DirectFile(path, create=False)
            case 2 | 3:
                end = _write(file, expected, end, rng.randbytes(rng.randrange(3 * DIRECT_BYTES)))
            case 4 | 5 if len(expected) < 1 << 20:
                file.write(end, ROOM)
                expected[end : end + len(ROOM)] = ROOM
            case 6:
                end = rng.randrange(len(expected) + 1)
            case _:
                end = _write(file, expected, end, rng.randbytes(rng.randrange(1, 600)))
        if step % 10 == 0 or len(expected) < 10 * BLOCK_BYTES:
            assert path.read_bytes() == expected, f"step {step}"
        position = rng.randrange(len(expected) + 1)
        read = file.read(position, 700)
        assert read == expected[position : position + 700], f"step {step}"
    assert file.size() == len(expected)
    assert direct.count > 500
    file.close()


def _write(file: DirectFile, expected: bytearray, position: int, data: bytes) -> int:
    file.write(position, data)
    end = position + len(data)
    expected[position:end] = data
    return end


def test_a_direct_write_lengthens_nothing(
    path: Path, file: DirectFile, direct: DirectWrites
) -> None:
    file.write(0, bytes(BLOCK_BYTES + 500))
    file.write(BLOCK_BYTES + 100, PATTERN)  # whole blocks would end beyond the file
    assert direct.count == 0
    assert path.stat().st_size == BLOCK_BYTES + 500
    file.write(BLOCK_BYTES - len(PATTERN), PATTERN)
    assert direct.count == 1
    assert path.stat().st_size == BLOCK_BYTES + 500


def test_large_writes_go_through_the_cache(file: DirectFile, direct: DirectWrites) -> None:
    file.write(0, ROOM)
    file.write(10, b"x" * (DIRECT_BYTES + 1))
    assert direct.count == 0
    file.write(10, b"x" * DIRECT_BYTES)
    assert direct.count == 1


def test_a_write_through_the_cache_is_seen_by_the_next_direct_one(
    path: Path, file: DirectFile, direct: DirectWrites
) -> None:
    file.write(0, ROOM)
    file.write(0, PATTERN)
    file.write(300, b"y" * (DIRECT_BYTES + 1))
    file.write(250, PATTERN[:50])
    assert direct.count == 2
    found = path.read_bytes()
    assert found[:300] == PATTERN + PATTERN[:50]
    assert found[300 : 300 + DIRECT_BYTES + 2] == b"y" * (DIRECT_BYTES + 1) + b"\0"


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_direct_writes_gets_none(
    path: Path, file: DirectFile, direct: DirectWrites, error: int
) -> None:
    file.write(0, ROOM)
    direct.error = error
    file.write(100, PATTERN)
    direct.error = 0
    file.write(100 + len(PATTERN), PATTERN)
    assert direct.count == 0
    assert path.read_bytes()[100 : 100 + 2 * len(PATTERN)] == 2 * PATTERN


def test_a_file_system_that_opens_no_direct_file_is_written_through_the_cache(
    path: Path, file: DirectFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_open = os.open

    def open_plain(name: Path, flags: int, mode: int = 0o644) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain_open(name, flags, mode)

    monkeypatch.setattr(os, "open", open_plain)
    file.write(0, ROOM)
    file.write(100, PATTERN)
    assert path.read_bytes()[100 : 100 + len(PATTERN)] == PATTERN


def test_a_direct_write_cut_short_is_completed(
    path: Path, file: DirectFile, direct: DirectWrites
) -> None:
    file.write(0, ROOM)
    direct.shortened_by = BLOCK_BYTES
    data = 20 * PATTERN
    file.write(3_000, data)
    direct.shortened_by = 0
    assert path.read_bytes()[3_000 : 3_000 + len(data)] == data


def test_a_direct_write_without_room_tells_so(file: DirectFile, direct: DirectWrites) -> None:
    """Where files are copied on write, bytes written over others take room too."""
    file.write(0, ROOM)
    direct.error = errno.ENOSPC
    with pytest.raises(DiskFullError):
        file.write(100, PATTERN)
    direct.error = 0
    file.write(100, PATTERN)
    assert file.read(100, len(PATTERN)) == PATTERN


def test_a_failed_direct_write_is_told(file: DirectFile, direct: DirectWrites) -> None:
    file.write(0, ROOM)
    direct.error = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        file.write(100, PATTERN)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_closed_or_cut_file_keeps_no_descriptor(path: Path) -> None:
    before = descriptors()
    files = PosixFileSystem()
    file = files.open(path, create=True, direct=True)
    file.write(0, ROOM)
    file.write(100, PATTERN)
    file.truncate(5_000)
    assert descriptors() == before + 1
    file.write(200, PATTERN)
    file.close()
    assert descriptors() == before
