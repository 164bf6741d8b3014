"""Reading a whole log when it is opened: whose it is, whether it is whole, and where it ends.

Only the end of the last segment may be torn, and only behind what is known to have been on the
disk: the state file says how far that is, and so does each frame for those before it. Everything
else that can't be read is damage. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streammeta.client.write_ahead_log.errors import DamagedLogError, WrongLogError
from streammeta.client.write_ahead_log.frames import BadFrameError, FrameKind, frame_headers_from
from streammeta.client.write_ahead_log.identity import BadHeaderError, LogIdentity, check_owner
from streammeta.client.write_ahead_log.segment import Segment, segment_sequence
from streammeta.client.write_ahead_log.state_file import StateFile
from streammeta.storage.durable_files import FileSystem


@dataclass(frozen=True, slots=True)
class ScannedLog:
    """What was found: the segments, oldest first, and the sequence behind the last record.

    Each segment's `size` is the end of its last good frame; what follows in the last one is torn.
    From byte `unflushed_from` on, the last one is not known to be on the disk. `lost` counts the
    records that a quarantine has given up.
    """

    segments: tuple[Segment, ...]
    end: int
    unflushed_from: int
    lost: int


@dataclass(slots=True)
class _Reading:
    """How far one segment was read; `problem` says why no further, None at the end of the file."""

    end: int
    unflushed_from: int
    newest_epoch: int = 0
    lost: int = 0
    problem: str | None = None


def segment_paths(files: FileSystem, directory: Path) -> list[Path]:
    """Return the segments in a directory, oldest first."""
    names = files.names(directory)
    return [directory / name for name in names if segment_sequence(name) is not None]


def scan(files: FileSystem, directory: Path, identity: LogIdentity, state: StateFile) -> ScannedLog:
    """Read every frame.

    Raises:
        WrongLogError: a segment is of another node or namespace, or a newer process wrote it.
        DamagedLogError: what had been flushed can't be read; it names the first such place.
    """
    segments: list[Segment] = []
    try:
        paths = segment_paths(files, directory)
        segments.extend(_open(files, path, identity, state) for path in paths)
        return _read(directory, segments, identity, state)
    except BaseException:
        for segment in segments:
            segment.close()
        raise


def _open(files: FileSystem, path: Path, identity: LogIdentity, state: StateFile) -> Segment:
    try:
        segment = Segment.open(files, path)
    except BadHeaderError as error:
        raise DamagedLogError(path, 0, str(error)) from None
    try:
        check_owner(segment.header, identity, path)
        if segment.header.log_id != state.header.log_id:
            raise WrongLogError(
                f"{path} belongs to another write-ahead log of this node; move the file away"
            )
    except WrongLogError:
        segment.close()
        raise
    return segment


def _read(
    directory: Path, segments: Sequence[Segment], identity: LogIdentity, state: StateFile
) -> ScannedLog:
    end = segments[0].first_sequence if segments else state.trimmed
    if end > state.trimmed:
        raise DamagedLogError(
            segments[0].path, 0, f"the segment with records from {state.trimmed} on is missing"
        )
    unflushed_from = lost = 0
    for index, segment in enumerate(segments):
        reading = _read_segment(segment, state.flushed)
        following = segments[index + 1] if index + 1 < len(segments) else None
        _check_end(segment, reading, following, state)
        if reading.newest_epoch > identity.node_epoch:
            raise WrongLogError(
                f"{segment.path} was written by process epoch {reading.newest_epoch} of node"
                f" {identity.node_id}, this process is older ({identity.node_epoch}): stop it, or"
                " start it with a larger node epoch"
            )
        end, unflushed_from, lost = reading.end, reading.unflushed_from, lost + reading.lost
    if end < state.flushed:
        last = segments[-1] if segments else None
        raise DamagedLogError(
            last.path if last else directory,
            last.size if last else 0,
            f"records {end} to {state.flushed - 1} are missing",
        )
    return ScannedLog(tuple(segments), end, unflushed_from, lost)


def _read_segment(segment: Segment, flushed: int) -> _Reading:
    """Read the frames of one segment, and set its `size` to the end of the last good one."""
    frames = segment.frames()
    reading = _Reading(segment.first_sequence, segment.size)
    try:
        while frame := frames.next():
            header = frame[0]
            if header.first_sequence != reading.end:
                raise BadFrameError(
                    f"a frame begins with record {header.first_sequence}, wanted {reading.end}"
                )
            reading.end = header.end_sequence
            reading.newest_epoch = max(reading.newest_epoch, header.node_epoch)
            if header.kind == FrameKind.LOST:
                reading.lost += header.count
            segment.size = frames.position
            if reading.end <= flushed:
                reading.unflushed_from = segment.size
    except BadFrameError as error:
        reading.problem = str(error)
    return reading


def _check_end(
    segment: Segment, reading: _Reading, following: Segment | None, state: StateFile
) -> None:
    """Raise `DamagedLogError` unless the segment may end where it was read to."""
    if following is not None:
        problem = reading.problem
        if problem is None and reading.end != following.first_sequence:
            problem = (
                f"it ends before record {reading.end}, the next segment begins with"
                f" {following.first_sequence}"
            )
        if problem is not None:
            raise DamagedLogError(segment.path, segment.size, problem)
    elif reading.problem is not None and _vouched_end(segment, state) > reading.end:
        raise DamagedLogError(segment.path, segment.size, reading.problem)


def _vouched_end(segment: Segment, state: StateFile) -> int:
    """Return how far the log was on the disk, by the state file and by what follows `size`."""
    later = frame_headers_from(segment.file, segment.header.log_id, segment.size)
    return max(state.flushed, max((header.flushed_end for _, header in later), default=0))
