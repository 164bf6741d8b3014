"""Traces of runs: a span for each phase of a plan and each batch of an apply, and their calls."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from streammeta.reconcile.apply import ApplyConfig, apply
from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.engines.task_tracing import TaskTracing
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.vocabulary.errors import ReconcileError
from streammeta.reconcile.watch import WatchConfig, watch
from streammeta.rpc import tracing
from tests.kit.real_cluster import STEADY, running_cluster, streammeta
from tests.kit.traces import collecting, exporting, ids, only
from tests.kit.waiting import wait_until
from tests.reconcile.fake_controller import LocalBucket, Scene

PHASES = ["list", "uploads", "snapshot", "join", "confirm", "write"]
PREFIX = "streammeta.reconcile."
CHECK = "streammeta.v1.ObjectService/CheckObjects"


def inside(spans: tuple[ReadableSpan, ...], parent: ReadableSpan) -> list[str]:
    """Return the names of the children of a span, by their begin."""
    (own_id,) = {ids(parent)[1]}
    found = [
        span
        for span in spans
        if span.parent is not None and span.parent.span_id.to_bytes(8, "big") == own_id
    ]
    return [span.name for span in sorted(found, key=lambda span: span.start_time or 0)]


def plant(scene: Scene, orphans: int) -> None:
    scene.fill(range(400), range(500, 500 + orphans))


def planned(bucket: LocalBucket, endpoint: str, folder: Path) -> PlanConfig:
    return PlanConfig(bucket.address, (endpoint,), folder, max_share=0.9, engine=EngineName.LOCAL)


def test_a_run_has_a_span_for_each_phase_and_each_batch(scene: Scene, tmp_path: Path) -> None:
    plant(scene, orphans=30)
    with exporting() as exported:
        plan(planned(scene.bucket, scene.endpoint, tmp_path / "p"))
        spans = exported.get_finished_spans()
        root = only(spans, f"{PREFIX}plan")
        assert [name for name in inside(spans, root) if name.startswith(PREFIX)] == [
            PREFIX + phase for phase in PHASES
        ]
        assert root.attributes == {"engine": "local", "candidates": 30}
        listed = only(spans, f"{PREFIX}list").attributes or {}
        assert listed["rows"] == len(scene.bucket.keys()) + 1, "the marker too"
        snapshot = only(spans, f"{PREFIX}snapshot")
        assert "streammeta.v1.MetadataService/GetSnapshot" in inside(spans, snapshot)
        assert {ids(span)[0] for span in spans} == {ids(root)[0]}

        exported.clear()
        apply(ApplyConfig(tmp_path / "p", delete=True, keys_per_s=10))
        spans = exported.get_finished_spans()
        root = only(spans, f"{PREFIX}apply")
        batches = [span for span in spans if span.name == f"{PREFIX}batch"]
        assert inside(spans, root).count(f"{PREFIX}batch") == len(batches) > 1
        outcomes: Counter[str] = Counter()
        for batch in batches:
            assert CHECK in inside(spans, batch)
            outcomes.update({name: int(str(n)) for name, n in (batch.attributes or {}).items()})
        assert outcomes == {"deleted": 30}
        assert {ids(span)[0] for span in spans} == {ids(root)[0]}


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
@pytest.mark.timeout(300)
def test_tasks_of_spark_send_spans_of_their_batches_into_the_trace_of_the_run(scene: Scene) -> None:
    plant(scene, orphans=30)
    plan(planned(scene.bucket, scene.endpoint, scene.root / "p"))
    order = ApplyConfig(scene.root / "p", delete=True, keys_per_s=20, engine=EngineName.SPARK)
    with collecting() as collector:
        with exporting() as exported:
            apply(order)
            root = only(exported.get_finished_spans(), f"{PREFIX}apply")
        batches = collector.named(f"{PREFIX}batch")
        trace_id, root_id = ids(root)
        assert {(one.trace_id, one.parent_span_id) for one in batches} == {(trace_id, root_id)}
        outcomes: Counter[str] = Counter()
        for batch in batches:
            assert CHECK in [span.name for span in collector.in_span(batch)]
            outcomes.update({one.key: one.value.int_value for one in batch.attributes})
        assert outcomes == {"deleted": 30}
        assert collector.services == {"streammeta-reconcile"}


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
@pytest.mark.timeout(300)
def test_tasks_of_a_run_that_is_not_traced_send_nothing(scene: Scene, tmp_path: Path) -> None:
    plant(scene, orphans=3)
    plan(planned(scene.bucket, scene.endpoint, tmp_path / "p"))
    order = ApplyConfig(tmp_path / "p", delete=True, engine=EngineName.SPARK)
    with collecting() as collector:
        assert apply(order).complete
        with exporting(ALWAYS_OFF):
            assert apply(order).complete
        assert collector.spans == []


PARENT = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
ADDRESS = "OTEL_EXPORTER_OTLP_ENDPOINT"


def work_of_a_task(variables: dict[str, str]) -> None:
    """Do what a task does, in a process that traces nothing itself."""
    with TaskTracing(PARENT, variables).trace(), tracing.span("work"):
        pass


def test_a_task_has_the_driver_s_variables_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        work_of_a_task({ADDRESS: "http://127.0.0.1:1"})
        (sent,) = collector.spans
        assert (sent.trace_id.hex(), sent.parent_span_id.hex()) == ("1" * 32, "2" * 16)
        there = os.environ[ADDRESS]
        monkeypatch.delenv(ADDRESS)
        work_of_a_task({ADDRESS: there, "OTEL_SERVICE_NAME": "mine"})
        assert len(collector.spans) == 2
        assert collector.services == {"streammeta-reconcile", "mine"}
        assert {ADDRESS, "OTEL_SERVICE_NAME"} & os.environ.keys() == set()


def test_a_task_without_opentelemetry_works_untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with TaskTracing(PARENT, {}).trace():
        assert not tracing.is_on()


def test_a_round_of_a_watch_is_one_trace(scene: Scene, tmp_path: Path) -> None:
    plant(scene, orphans=1)
    config = WatchConfig(
        planned(scene.bucket, scene.endpoint, tmp_path / "rounds"),
        ApplyConfig(tmp_path / "rounds", delete=True, engine=EngineName.LOCAL),
        interval_s=1,
        rounds=1,
    )
    with exporting() as exported:
        watch(config, threading.Event(), lambda _round: None)
        spans = exported.get_finished_spans()
    root = only(spans, f"{PREFIX}round")
    assert root.attributes == {"outcome": "settled"}
    assert inside(spans, root) == [f"{PREFIX}plan", f"{PREFIX}apply"]
    assert root.parent is None


def test_a_phase_that_fails_says_so(scene: Scene, tmp_path: Path) -> None:
    plant(scene, orphans=1)
    (tmp_path / "p").mkdir()
    with exporting() as exported, pytest.raises(ReconcileError):
        plan(planned(scene.bucket, scene.endpoint, tmp_path / "p"))
    root = only(exported.get_finished_spans(), f"{PREFIX}plan")
    assert root.status.description == "PlanError"
    assert not root.status.is_ok


@pytest.mark.process
def test_the_command_sends_its_spans_and_controllers_join_its_trace(tmp_path: Path) -> None:
    with (
        collecting() as collector,
        running_cluster(tmp_path, 1, (*STEADY, "--tracing")) as cluster,
    ):
        where = ("--store", cluster.store_uri, "--connect", cluster.connect)
        made = streammeta(
            *("reconcile", "plan", *where, "--plan", str(tmp_path / "p"), "--allow-empty-map"),
            "--tracing",
        )
        assert made["ok"], made
        assert "streammeta-reconcile" in collector.services, "spans are sent before the end"
        (root,) = collector.named(f"{PREFIX}plan")

        def joined() -> bool:
            asked = [span for span in collector.named(CHECK) if span.trace_id == root.trace_id]
            sent = {span.span_id for span in asked}
            return any(span.parent_span_id in sent for span in asked)

        wait_until(joined, "a controller's span of a call in the run's trace")
