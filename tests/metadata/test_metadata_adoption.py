"""Adoption into a restored map: what lies in the bucket beyond the backup, by rules of uploads."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streammeta.controller.errors import ErrorCode, InvalidRequestError, RecoveringError
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.object_listings import ListStreamSetObjects
from streammeta.controller.metadata.api.object_slices import ObjectQuery
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.registries.cluster_modes import ALLOWED
from streammeta.controller.metadata.registries.object_directory import ObjectDirectory
from streammeta.controller.metadata.tables.values import ObjectState, RangeColumns, column
from tests.kit.seeds import seeds
from tests.metadata.map_pair import recovering
from tests.metadata.slow_model_adoption import WAITING
from tests.metadata.small_world import NODE, NOW, OTHER, World, upload

NONE, GAP = ErrorCode.NONE, ErrorCode.OFFSET_NOT_MATCHED
FIRST, BELOW = 50, 500
"""The undecided ids."""


def adopt(
    *objects: tuple[Any, ...], epoch: int = 1, size: int = 10, replaced: tuple[int, ...] = ()
) -> r.AdoptObjects:
    """Make a request of (object id, (stream, start, end, epoch or nothing), ...)."""
    rows = [(*row, epoch)[:4] for _, *ranges in objects for row in ranges]
    return r.AdoptObjects(
        object_id=column([object_id for object_id, *_ in objects]),
        object_size=column([size] * len(objects)),
        range_count=column([len(ranges) for _, *ranges in objects]),
        ranges=RangeColumns(
            stream_id=column([row[0] for row in rows]),
            start_offset=column([row[1] for row in rows]),
            end_offset=column([row[2] for row in rows]),
            stream_epoch=column([row[3] for row in rows]),
        ),
        replaced=column(replaced),
    )


def restored_world() -> World:
    """Return a map in recovery mode, whose streams 0 and 1 end at 5 under epoch 1."""
    world = World()
    world.write(upload(0, (0, 0, 5), (1, 0, 5)))
    sections = recovering(world.map.freeze().sections(), (FIRST, BELOW))
    world.map = ClusterMetadata.from_sections(sections, world.map.applied_end_offset)
    return world


def errors(answer: Any) -> list[int]:
    found: list[int] = answer.errors.tolist()
    return found


def described(world: World, stream_id: int) -> Any:
    answer: Any = world.map.query(r.DescribeStreams(stream_ids=(stream_id,)))
    return answer.streams[0]


def test_objects_continue_streams_whatever_the_order_of_their_ids() -> None:
    world = restored_world()
    # 60 holds what comes after 70, and the other way round in another stream.
    answer = world.write(adopt((60, (0, 8, 12), (1, 5, 6)), (70, (0, 5, 8), (1, 6, 9))))
    assert errors(answer) == [NONE, NONE]
    assert (described(world, 0).end_offset, described(world, 1).end_offset) == (12, 9)
    found: Any = world.map.query(r.GetObjects(queries=(ObjectQuery(0, 0, -1),)))
    assert [object_.object_id for object_ in found.results[0].objects] == [0, 70, 60]


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (adopt((60, (0, 6, 8))), GAP),
        (adopt((60, (0, 4, 8))), GAP),
        (adopt((60, (0, 5, 8)), (70, (0, 7, 9))), GAP),
        (adopt((60, (0, 5, 8)), (70, (0, 9, 10))), GAP),
        (adopt((60, (0, 5, 8)), (70, (0, 5, 8))), GAP),
        (adopt((60, (9, 0, 8))), ErrorCode.STREAM_NOT_EXIST),
        (adopt((60, (0, 5, 8)), epoch=0), ErrorCode.STREAM_FENCED),
        (adopt((60, (0, 5, 8, 3)), (70, (0, 8, 9, 2))), ErrorCode.STREAM_FENCED),
        (adopt((FIRST - 1, (0, 5, 8))), ErrorCode.OBJECT_NOT_EXIST),
        (adopt((BELOW, (0, 5, 8))), ErrorCode.OBJECT_NOT_EXIST),
        (adopt((0, (0, 5, 8))), ErrorCode.OBJECT_CONTENT_MISMATCH),
    ],
)
def test_what_does_not_fit_is_refused_with_all_that_comes_with_it(
    request_: r.AdoptObjects, error: ErrorCode
) -> None:
    world = restored_world()
    before = world.map.state_hash()
    answer = world.write(request_)
    assert errors(answer)[-1] == error
    assert world.map.state_hash() == before


def test_a_repeat_changes_nothing_and_other_content_is_refused() -> None:
    world = restored_world()
    world.write(adopt((60, (0, 5, 8))))
    before = world.map.state_hash()
    assert errors(world.write(adopt((60, (0, 5, 8))))) == [NONE]
    assert errors(world.write(adopt((60, (0, 5, 9))))) == [ErrorCode.OBJECT_CONTENT_MISMATCH]
    assert errors(world.write(adopt((60, (0, 5, 8)), size=11))) == [
        ErrorCode.OBJECT_CONTENT_MISMATCH
    ]
    assert world.map.state_hash() == before
    assert errors(world.write(adopt((60, (0, 5, 8)), (70, (0, 8, 9))))) == [NONE, NONE]
    assert described(world, 0).end_offset == 9


def test_a_stream_takes_over_the_largest_epoch_of_its_records() -> None:
    world = restored_world()
    world.write(adopt((60, (0, 5, 8, 4)), (70, (0, 8, 9, 7)), (71, (1, 5, 6, 1))))
    assert (described(world, 0).epoch, described(world, 1).epoch) == (7, 1)
    world.write(r.FinishRestore())
    opened = [
        world.write(r.OpenStreams(node=OTHER, streams=(r.StreamToOpen(0, epoch),))).streams[0].error
        for epoch in (6, 7, 8)
    ]
    assert opened == [ErrorCode.STREAM_FENCED, ErrorCode.STREAM_FENCED, NONE]
    assert described(world, 0).end_offset == 9


def test_what_a_node_owes_is_adopted_below_the_end_of_its_stream() -> None:
    world = World()
    world.write(upload(0, (0, 0, 5)))
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1, 9),)))
    sections = recovering(world.map.freeze().sections(), (FIRST, BELOW))
    world.map = ClusterMetadata.from_sections(sections, world.map.applied_end_offset)
    assert errors(world.write(adopt((60, (0, 6, 10))))) == [GAP]
    assert errors(world.write(adopt((60, (0, 5, 7)), epoch=2))) == [GAP], "of another writer"
    assert (
        errors(world.write(adopt((60, (0, 5, 7)), (61, (0, 9, 12)), (62, (0, 7, 9))))) == [NONE] * 3
    )
    world.write(r.FinishRestore())
    abandoned: Any = world.write(r.AbandonUploads(node_id=NODE.node_id))
    assert not abandoned.abandoned, "nothing is owed any more"
    assert described(world, 0).end_offset == 12


def parts(world: World, stream_id: int, start: int = 0) -> list[tuple[int, int, int]]:
    query = ObjectQuery(stream_id, start, -1)
    found: Any = world.map.query(r.GetObjects(queries=(query,)))
    return [(one.object_id, one.start_offset, one.end_offset) for one in found.results[0].objects]


def test_a_compaction_takes_the_place_of_objects_and_continues_their_streams() -> None:
    world = restored_world()
    answer = world.write(adopt((60, (0, 0, 9, 3)), (61, (1, 0, 3)), (62, (1, 3, 7)), replaced=(0,)))
    assert errors(answer) == [NONE] * 3
    assert parts(world, 0) == [(60, 0, 9)]
    assert parts(world, 1) == [(61, 0, 3), (62, 3, 7)]
    assert (described(world, 0).epoch, described(world, 0).end_offset) == (3, 9)
    known: Any = world.map.query(r.CheckObjects(object_ids=(0,)))
    assert known.states == (ObjectState.MARK_DESTROYED,)
    before = world.map.state_hash()
    repeated = adopt((60, (0, 0, 9, 3)), (61, (1, 0, 3)), (62, (1, 3, 7)), replaced=(0,))
    assert errors(world.write(repeated)) == [NONE] * 3
    assert world.map.state_hash() == before


def test_offsets_of_replaced_objects_that_no_range_has_are_lost_and_passed_over() -> None:
    world = restored_world()
    assert errors(world.write(adopt((60, (0, 2, 6)), replaced=(0,)))) == [NONE]
    query = ObjectQuery(0, 0, -1)
    found: Any = world.map.query(r.GetObjects(queries=(query,)))
    assert found.results[0].lost_end_offset == 2
    assert parts(world, 0, 2) == [(60, 2, 6)]
    of_other: Any = world.map.query(r.GetObjects(queries=(ObjectQuery(1, 0, -1),)))
    assert of_other.results[0].lost_end_offset == 5
    world.write(r.FinishRestore())
    abandoned: Any = world.write(r.AbandonUploads(node_id=NODE.node_id))
    assert not abandoned.abandoned, "the node owes no more than before"


def test_a_compaction_fills_a_pending_upload_that_it_spans() -> None:
    world = World()
    world.write(upload(0, (0, 0, 5)))
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1, 9),)))
    sections = recovering(world.map.freeze().sections(), (FIRST, BELOW))
    world.map = ClusterMetadata.from_sections(sections, world.map.applied_end_offset)
    assert errors(world.write(adopt((60, (0, 0, 12)), replaced=(0,)))) == [NONE]
    assert parts(world, 0) == [(60, 0, 12)]
    world.write(r.FinishRestore())
    abandoned: Any = world.write(r.AbandonUploads(node_id=NODE.node_id))
    assert not abandoned.abandoned


@pytest.mark.parametrize(
    "request_",
    [
        adopt((60, (0, 0, 9))),
        adopt((60, (0, 0, 9)), (61, (0, 4, 10)), replaced=(0,)),
        adopt((60, (0, 0, 3)), (61, (0, 2, 5)), replaced=(0,)),
        adopt((60, (0, 5, 9)), (61, (0, 3, 9)), replaced=(0,)),
    ],
)
def test_a_range_lies_where_the_map_has_something_only_if_that_is_replaced(
    request_: r.AdoptObjects,
) -> None:
    world = restored_world()
    before = world.map.state_hash()
    assert GAP in errors(world.write(request_))
    assert world.map.state_hash() == before


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (adopt((60, (0, 5, 9)), replaced=(0,)), "replaced_object_ids[0]"),
        (adopt((60, (0, 5, 9)), replaced=(BELOW + 7,)), "replaced_object_ids[0]"),
        (adopt((60, (0, 5, 9)), replaced=(0, 0)), "replaced_object_ids[1]"),
        (adopt((60, (0, 5, 9)), replaced=(-1,)), "replaced_object_ids[0]"),
    ],
)
def test_an_object_is_not_replaced_with_nothing(request_: r.AdoptObjects, field: str) -> None:
    world = restored_world()
    before = world.map.state_hash()
    with pytest.raises(InvalidRequestError) as caught:
        world.write(request_)
    assert caught.value.field.startswith(field[:-3])
    assert world.map.state_hash() == before


def test_a_range_after_a_gap_is_adopted_if_it_says_so_and_the_gap_is_lost() -> None:
    world = restored_world()
    gap = replace(
        adopt((60, (0, 9, 12, 2)), (61, (0, 5, 7)), (62, (1, 5, 6))), after_gap=column([1, 0, 0])
    )
    assert errors(world.write(replace(gap, after_gap=column([0, 0, 1])))) != [NONE] * 3
    assert errors(world.write(gap)) == [NONE] * 3
    assert parts(world, 0, 9) == [(60, 9, 12)]
    found: Any = world.map.query(r.GetObjects(queries=(ObjectQuery(0, 7, -1),)))
    assert found.results[0].lost_end_offset == 9
    assert described(world, 0).end_offset == 12


def test_objects_belong_to_the_owner_of_their_first_stream() -> None:
    world = restored_world()
    world.write(adopt((60, (0, 5, 8))))
    listed: Any = world.map.query(ListStreamSetObjects(node_id=NODE.node_id))
    assert [object_.object_id for object_ in listed.objects] == [0, 60]


def test_adoption_is_undone_and_replayed_like_all_else() -> None:
    world = restored_world()
    before, offset = world.map.state_hash(), world.map.applied_end_offset
    world.write(adopt((60, (0, 5, 8, 3))))
    after = world.map.state_hash()
    world.map.undo_to(offset)
    assert world.map.state_hash() == before
    world.write(adopt((60, (0, 5, 8, 3))))
    assert world.map.state_hash() == after
    world.write(r.FinishRestore())
    assert world.map.undecided is None
    world.map.undo_to(offset + 1)
    assert world.map.undecided == (FIRST, BELOW)


def test_every_mutation_waits_for_the_end_of_recovery_or_is_known_not_to() -> None:
    known = [kind for kind in vars(r).values() if isinstance(kind, type)]
    kinds = {kind for kind in known if issubclass(kind, r.WriteRequest)} - {r.WriteRequest}
    assert set(WAITING) == kinds - ALLOWED
    world = restored_world()
    with pytest.raises(RecoveringError):
        world.write(r.PrepareObjects(request_id="x", node=NODE, count=1, ttl_ms=60_000))
    assert world.write(r.FinishRestore()).was_recovering
    assert not world.write(r.FinishRestore()).was_recovering
    answer = world.write(r.PrepareObjects(request_id="x", node=NODE, count=1, ttl_ms=60_000))
    assert answer.first_object_id == BELOW


def test_nothing_is_adopted_outside_recovery_mode() -> None:
    world = World()
    assert errors(world.write(adopt((7, (0, 0, 5))))) == [ErrorCode.OBJECT_NOT_EXIST]
    assert world.map.decide(adopt((7, (0, 0, 5))), NOW, 99).records == ()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (adopt((60, (0, 5, 8)), epoch=-1), "ranges.stream_epoch[0]"),
        (adopt((60, (0, 5, 8), (0, 8, 9))), "ranges.stream_id[1]"),
        (adopt((60, (0, 5, 8)), (60, (1, 5, 8))), "object_id"),
        (adopt((60, (0, 8, 8))), "ranges.end_offset[0]"),
    ],
)
def test_malformed_requests_name_their_field(request_: r.AdoptObjects, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        restored_world().write(request_)
    assert caught.value.field == field


@pytest.mark.parametrize("seed", seeds(2, slow=4))
def test_ids_are_put_in_anywhere_in_the_directory(seed: int) -> None:
    rng = np.random.default_rng(seed)
    directory = ObjectDirectory(ring_ids=16, part_ids=4)
    known = np.sort(rng.choice(120, 40, replace=False))
    directory.load(known, 130)
    rows = dict(zip(known.tolist(), range(40), strict=True))
    free = rng.permutation(np.setdiff1d(np.arange(130), known))
    for part in np.array_split(free[:60], 9):
        numbers = rng.integers(0, 1_000, len(part))
        directory.insert(part, numbers)
        rows |= dict(zip(part.tolist(), numbers.tolist(), strict=True))
        if rng.random() < 0.4:
            directory.remove(part)
            rows = {object_id: row for object_id, row in rows.items() if object_id not in part}
        every = np.arange(131)
        wanted = [rows.get(object_id, -1) for object_id in range(131)]
        assert directory.rows(every).tolist() == wanted, f"seed {seed}"
        listed = [object_id for ids, _ in directory.from_id(0) for object_id in ids.tolist()]
        assert listed == sorted(rows), f"seed {seed}"
