"""Storing an object of any size, out of bytes that come one after the other.

Owns the choice between one request and an upload in parts, the size of parts, how many travel at a
time, and that nothing half-uploaded stays behind. Works on every store; knows nothing of what the
bytes mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from streammeta.storage.errors import StorageError, StoreRejectedError
from streammeta.storage.object_store.base import (
    MAX_PART_SIZE,
    MAX_PARTS,
    MIN_PART_SIZE,
    Body,
    MultipartUpload,
    ObjectStore,
    Tags,
    UploadedPart,
)

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class UploadOptions:
    """How an object is sent: in one request up to `single_put_bytes`, else in parts.

    Parts have `part_bytes`, and at most `parallel_parts` travel at a time. Raises `ValueError` on
    sizes outside of S3's limits: parts of 5 MiB to 5 GiB, a single request of at most 5 GiB.
    """

    single_put_bytes: int = 32 * MIB
    part_bytes: int = 32 * MIB
    parallel_parts: int = 4

    def __post_init__(self) -> None:
        if not MIN_PART_SIZE <= self.part_bytes <= MAX_PART_SIZE:
            raise ValueError(
                f"part_bytes is {self.part_bytes}, wanted {MIN_PART_SIZE}..{MAX_PART_SIZE}"
            )
        if not 0 <= self.single_put_bytes <= MAX_PART_SIZE:
            raise ValueError(
                f"single_put_bytes is {self.single_put_bytes}, wanted 0..{MAX_PART_SIZE}"
            )
        if self.parallel_parts < 1:
            raise ValueError(f"parallel_parts is {self.parallel_parts}, wanted at least 1")


def upload(
    store: ObjectStore,
    key: str,
    parts: Iterable[Body],
    *,
    options: UploadOptions | None = None,
    tags: Tags | None = None,
) -> int:
    """Store the bytes of `parts`, in order, as one object; return how many there were.

    `parts` may be of any size, and must not change after they are given. They are taken as they are
    needed, so that no more is held than `single_put_bytes + parallel_parts * part_bytes` and the
    part taken last. If anything fails, `parts` included, an upload that was begun is aborted and
    the error raised; when not even that succeeds, a note of the error says so. Raises
    `StoreRejectedError` for more than 10000 parts.
    """
    chosen = options or UploadOptions()
    gathered = _Gathered(parts)
    first = gathered.take(chosen.single_put_bytes + 1)
    if len(first) <= chosen.single_put_bytes:
        store.put(key, first, tags=tags)
        return len(first)
    gathered.give_back(first)
    del first
    unfinished = store.start_multipart(key, tags=tags)
    try:
        done = _upload_parts(store, unfinished, gathered, chosen)
        store.complete_multipart(unfinished, done)
    except BaseException as error:
        _abort(store, unfinished, error)
        raise
    return sum(part.size for part in done)


class _Gathered:
    """The bytes still to be sent, cut to wanted sizes whatever they came in."""

    def __init__(self, parts: Iterable[Body]) -> None:
        self._coming: Iterator[Body] = iter(parts)
        self._waiting: list[memoryview] = []

    def take(self, size: int) -> bytes:
        """Give the next `size` bytes, fewer only at the end."""
        taken: list[memoryview] = []
        missing = size
        while missing:
            view = self._waiting.pop() if self._waiting else self._next()
            if view is None:
                break
            taken.append(view[:missing])
            if len(view) > missing:
                self._waiting.append(view[missing:])
            missing -= len(taken[-1])
        return b"".join(taken)

    def give_back(self, data: bytes) -> None:
        """Put bytes in front of those still to be taken."""
        self._waiting.append(memoryview(data))

    def _next(self) -> memoryview | None:
        part = next(self._coming, None)
        return None if part is None else memoryview(part).cast("B")


def _upload_parts(
    store: ObjectStore, unfinished: MultipartUpload, gathered: _Gathered, options: UploadOptions
) -> list[UploadedPart]:
    """Send all parts; those on their way are waited for even when one has failed.

    All parts but the last have the same size, which some servers insist on.
    """
    done: list[UploadedPart] = []
    running: set[Future[UploadedPart]] = set()
    with ThreadPoolExecutor(options.parallel_parts, "upload-part") as pool:
        number = 0
        while data := gathered.take(options.part_bytes):
            number += 1
            if number > MAX_PARTS:
                raise StoreRejectedError(
                    f"object {unfinished.key!r} is larger than {MAX_PARTS} parts of"
                    f" {options.part_bytes} bytes; store it in larger parts"
                )
            running.add(pool.submit(store.upload_part, unfinished, number, data))
            del data
            if len(running) == options.parallel_parts:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                done.extend(future.result() for future in finished)
        done.extend(future.result() for future in running)
    return sorted(done, key=lambda part: part.number)


def _abort(store: ObjectStore, unfinished: MultipartUpload, error: BaseException) -> None:
    try:
        store.abort_multipart(unfinished)
    except StorageError as second:
        error.add_note(
            f"upload {unfinished.upload_id!r} of {unfinished.key!r} could not be aborted"
            f" ({second}); its parts stay in the store until it is, or until a rule of the"
            " bucket drops them"
        )
