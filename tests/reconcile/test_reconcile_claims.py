"""A map that was restored to an earlier state frees nothing: the bucket's claims tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from streammeta.reconcile.apply import ApplyConfig, apply
from streammeta.reconcile.deletion.order import Outcome
from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.plans.plan_folder import PlanResult
from streammeta.reconcile.vocabulary.errors import PlanError, ReconcileError
from streammeta.reconcile.vocabulary.tables import Tally
from streammeta.reconcile.vocabulary.verdicts import Verdict
from streammeta.storage.cluster_files.bucket_marker import IdClaim, put_claim
from streammeta.storage.object_store.protocol.base import ObjectStore
from tests.reconcile.fake_controller import (
    COMMITTED,
    OWN,
    FakeMap,
    LocalBucket,
    MapObject,
    Scene,
    own,
)
from tests.reconcile.test_reconcile_deletion import NAMESPACE, Bench

ORPHANS = {own(at) for at in range(100, 105)}


def claim(store: ObjectStore, issued_below: int, namespace: str = OWN) -> None:
    """Claim ids as a leader does that issues them next."""
    bound = IdClaim(
        cluster_uuid="uuid-1", issued_below=issued_below, node_id=1, token="t", created_ms=1
    )
    put_claim(store, namespace, bound)


@pytest.fixture
def config(bucket: LocalBucket, state: FakeMap, endpoint: str, tmp_path: Path) -> PlanConfig:
    """A plan of a bucket with orphans."""
    state.objects = {at: MapObject(COMMITTED, size=10) for at in range(40)}
    for key in (*map(own, range(40)), *sorted(ORPHANS)):
        bucket.put(key)
    return PlanConfig(
        store=bucket.address,
        connect=(endpoint,),
        folder=tmp_path / "p",
        grace_ms=0,
        unsafe_grace=True,
        engine=EngineName.LOCAL,
    )


def failed_guards(made: PlanResult) -> set[str]:
    return {guard.name for guard in made.guards if not guard.passed}


def is_whole(bucket: LocalBucket) -> bool:
    return set(bucket.keys()) >= ORPHANS


def test_a_plan_by_a_map_below_the_claims_is_not_applied(scene: Scene, config: PlanConfig) -> None:
    claim(scene.bucket.store, scene.state.issued_below + 1)
    made = plan(config)
    assert made.classes[Verdict.ORPHAN] == Tally(5, 50)
    assert failed_guards(made) == {"map_age"}
    with pytest.raises(PlanError, match="restored"):
        apply(ApplyConfig(config.folder, delete=True, engine=EngineName.LOCAL))
    assert is_whole(scene.bucket)


def test_a_plan_by_a_map_at_the_newest_claim_is_applied(scene: Scene, config: PlanConfig) -> None:
    for bound in (500, scene.state.issued_below):
        claim(scene.bucket.store, bound)
    assert failed_guards(plan(config)) == set()
    done = apply(ApplyConfig(config.folder, delete=True, engine=EngineName.LOCAL))
    assert done.outcomes == {Outcome.DELETED: Tally(5, 50)}


def test_claims_that_come_while_the_map_is_copied_do_not_make_it_old(
    bucket: LocalBucket, state: FakeMap, config: PlanConfig
) -> None:
    """They are read before: a leader may claim at any time."""
    state.on_snapshot = lambda: claim(bucket.store, state.issued_below + 500)
    assert failed_guards(plan(config)) == set()


def test_a_map_restored_after_the_plan_was_made_frees_nothing(
    bucket: LocalBucket, state: FakeMap, config: PlanConfig
) -> None:
    assert failed_guards(plan(config)) == set()
    claim(bucket.store, state.issued_below + 1)
    with pytest.raises(ReconcileError, match="restored"):
        apply(ApplyConfig(config.folder, delete=True, engine=EngineName.LOCAL))
    assert is_whole(bucket)


def stored(bench: Bench) -> set[str]:
    return {candidate.key for candidate in bench.candidates} & bench.store.objects().keys()


@pytest.mark.parametrize("above", [0, 1])
def test_a_task_compares_each_answer_with_the_claims(tmp_path: Path, above: int) -> None:
    bench = Bench(tmp_path)
    claim(bench.store, bench.state.issued_below + above, NAMESPACE)
    wanted = Outcome.FAILED if above else Outcome.DELETED
    judged = bench.judged()
    assert {judgement.outcome for judgement in judged} == {wanted}
    assert len(stored(bench)) == (5 if above else 0)


@pytest.mark.parametrize("field", ["issued_below", "next_object_id"])
def test_a_map_restored_within_a_task_frees_nothing_more(tmp_path: Path, field: str) -> None:
    bench = Bench(tmp_path)
    claim(bench.store, bench.state.issued_below, NAMESPACE)
    bench.order = replace(bench.order, keys_per_s=2)

    def restore() -> None:
        if len(stored(bench)) == 3:
            setattr(bench.state, field, 999)

    bench.on_announced = restore
    outcomes = [judgement.outcome for judgement in bench.judged()]
    assert outcomes == [Outcome.DELETED] * 2 + [Outcome.FAILED] * 2 + [Outcome.SKIPPED]
    assert len(stored(bench)) == 3
