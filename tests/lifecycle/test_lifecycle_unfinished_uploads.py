"""Uploads in parts under ids that are gone are dropped, all others are left alone."""

import random
from collections.abc import Sequence

import pytest

from streammeta.controller.lifecycle import sweeps
from streammeta.controller.lifecycle.sweeps import UploadSweep
from streammeta.controller.metadata.answers import PrepareObjectsAnswer
from streammeta.controller.metadata.requests import ExpireObjects, PrepareObjects, RemoveObjects
from streammeta.controller.metadata.values import ObjectState
from streammeta.storage.errors import AccessDeniedError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.base import MultipartUpload
from tests.lifecycle.lifecycle_world import BROKER, NAMESPACE, World

LONG_MS = 3_600_000


class Uploading:
    """A world in which uploads are begun, and the sweep over it."""

    def __init__(self) -> None:
        self.world = World()
        self.sweep = UploadSweep(
            self.world.controller, self.world.store, NAMESPACE, 1_000, may_delete=lambda: True
        )

    async def prepared(self, count: int, ttl_ms: int = LONG_MS) -> list[int]:
        request_id = f"{self.world.log.next_offset}"
        prepare = PrepareObjects(request_id=request_id, node=BROKER, count=count, ttl_ms=ttl_ms)
        answer = await self.world.write(prepare)
        assert isinstance(answer, PrepareObjectsAnswer)
        return list(range(answer.first_object_id, answer.first_object_id + count))

    async def marked(self, count: int) -> list[int]:
        """Return ids that have expired, whose bytes are still to be deleted."""
        ids = await self.prepared(count, ttl_ms=1_000)
        self.world.clock.advance(2_000)
        await self.world.write(ExpireObjects(limit=1_000))
        assert self.world.states(ids) == {ObjectState.MARK_DESTROYED}
        return ids

    async def removed(self, count: int) -> list[int]:
        ids = await self.marked(count)
        await self.world.write(RemoveObjects(object_ids=tuple(ids)))
        assert self.world.states(ids) == {ObjectState.REMOVED}
        return ids

    def begin(self, ids: Sequence[int], namespace: str = NAMESPACE) -> list[MultipartUpload]:
        """Begin an upload for each id, with a part of it."""
        uploads = [self.world.store.start_multipart(key_for(one, namespace)) for one in ids]
        for upload in uploads:
            self.world.store.upload_part(upload, 1, b"part")
        return uploads

    def unfinished(self) -> set[MultipartUpload]:
        return set(self.world.store.list_multipart_uploads())


async def test_only_what_nobody_can_commit_any_more_is_dropped() -> None:

    uploading = Uploading()
    await uploading.world.start()
    gone = await uploading.removed(3)
    wanted = uploading.begin(await uploading.prepared(2))
    wanted += uploading.begin(await uploading.marked(2))
    next_id = (await uploading.prepared(1))[0] + 1
    wanted += uploading.begin([next_id, next_id + 1_000])
    wanted += uploading.begin(gone, namespace="_streammeta_other")
    wanted.append(uploading.world.store.start_multipart("backup/of/somebody"))
    dropped = uploading.begin([*gone, *gone])

    await uploading.sweep.step()

    assert uploading.unfinished() == set(wanted), f"dropped should be {dropped}"


@pytest.mark.parametrize("seed", range(8))
async def test_steps_of_any_size_drop_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(sweeps, "UPLOAD_BATCH_MAX", rng.randrange(1, 9))

    uploading = Uploading()
    await uploading.world.start()
    wanted: set[MultipartUpload] = set()
    for _ in range(rng.randrange(1, 12)):
        make = rng.choice((uploading.prepared, uploading.marked, uploading.removed))
        begun = uploading.begin(await make(rng.randrange(1, 5)))
        if make != uploading.removed:
            wanted.update(begun)

    await uploading.sweep.step()

    assert uploading.unfinished() == wanted, f"seed {seed}"


@pytest.mark.parametrize("refused", ["list_multipart_uploads", "abort_multipart"])
async def test_what_the_bucket_refuses_is_left_to_the_next_time(refused: str) -> None:

    uploading = Uploading()
    await uploading.world.start()
    uploading.begin(await uploading.removed(3))
    uploading.world.store.fail_next(refused, AccessDeniedError("not allowed to"))

    await uploading.sweep.step()
    assert len(uploading.unfinished()) == 3

    await uploading.sweep.step()
    assert not uploading.unfinished()


async def test_who_does_not_lead_asks_nothing_of_the_bucket() -> None:

    uploading = Uploading()
    await uploading.world.start()
    uploading.begin(await uploading.removed(1))
    uploading.world.log.lose_leadership(truncate=False)
    before = uploading.world.store.metrics()

    await uploading.sweep.step()

    assert uploading.world.store.metrics() == before
    assert len(uploading.unfinished()) == 1
