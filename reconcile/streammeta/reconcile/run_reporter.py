"""Reports of runs to the controllers, for their status pages and metrics.

Reporting is best effort: a failure produces a warning, never an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from streammeta.reconcile.apply import ApplyResult
from streammeta.reconcile.cluster.controller_client import LeaderClient
from streammeta.reconcile.deletion.order import Outcome
from streammeta.reconcile.plans.plan_folder import PlanResult
from streammeta.reconcile.vocabulary.errors import ControllerError
from streammeta.reconcile.vocabulary.tables import Tally
from streammeta.reconcile.vocabulary.verdicts import Verdict
from streammeta.reconcile.watch import SUCCESSES, Round, RoundOutcome, judge_plan
from streammeta.storage.cluster_files.reconcile_runs import (
    KEY,
    NAMESPACE,
    Run,
    Runs,
    RunsError,
    decode,
    encode,
    shorten_text,
)
from streammeta.tls.files import CallerFiles, TlsError
from streammeta.v1 import common_pb2, kv_pb2, kv_pb2_grpc

_CALL_TIMEOUT_S = 5.0
# A report must not delay the end of a command whose work is done.
_PATIENCE_S = 5.0
# Only concurrent runs conflict, and few run at once.
_ATTEMPTS = 5
_REMOVED = (Outcome.DELETED, Outcome.QUARANTINED, Outcome.TAGGED)


def plan_report(plan: PlanResult, started_ms: int, ended_ms: int) -> Run:
    """Return the report of a plan."""
    outcome, problem = judge_plan(plan)
    return Run(
        started_ms=started_ms,
        ended_ms=ended_ms,
        kind="plan",
        engine=plan.engine,
        result=str(outcome),
        problem=shorten_text(problem),
        succeeded=outcome in SUCCESSES,
        keys=sum(tally.keys for tally in plan.classes.values()),
        orphans=plan.candidates.keys if plan.is_compared else None,
        orphan_bytes=plan.candidates.size if plan.is_compared else None,
        missing=plan.lost if plan.is_compared else None,
    )


def apply_report(done: ApplyResult, started_ms: int, ended_ms: int) -> Run:
    """Return the report of an apply or a dry run."""
    outcome, problems = RoundOutcome.SETTLED, done.problems
    if done.left:
        outcome, problems = RoundOutcome.ENDED, ("ended by a signal", *problems)
    elif not done.complete:
        outcome = RoundOutcome.INCOMPLETE

    return Run(
        started_ms=started_ms,
        ended_ms=ended_ms,
        kind="apply",
        engine=done.engine,
        result=str(outcome),
        problem=shorten_text("; ".join(filter(None, (*problems, done.warning)))),
        succeeded=done.complete,
        keys=sum(tally.keys for tally in done.outcomes.values()) + done.left,
        deleted=sum(done.outcomes.get(outcome, Tally()).keys for outcome in _REMOVED),
    )


def round_report(last: Round) -> Run:
    """Return the report of a round of `reconcile watch`."""
    orphans = last.verdicts.get(Verdict.ORPHAN, Tally()) if last.is_compared else None
    return Run(
        started_ms=last.started_ms,
        ended_ms=last.ended_ms,
        kind="round",
        engine=last.engine,
        result=str(last.outcome),
        problem=shorten_text(last.problem),
        succeeded=last.outcome in SUCCESSES,
        keys=sum(tally.keys for tally in last.verdicts.values()) if last.plan else None,
        orphans=None if orphans is None else orphans.keys,
        orphan_bytes=None if orphans is None else orphans.size,
        deleted=sum(last.outcomes.get(outcome, Tally()).keys for outcome in _REMOVED),
        missing=last.lost if last.is_compared else None,
    )


def report_run(run: Run, connect: Sequence[str], tls: CallerFiles | None) -> str:
    """Add a run to the cluster's record of runs. Returns a warning, or an empty string.

    A record that this version can't read is left unchanged.
    """
    try:
        with LeaderClient(connect, _PATIENCE_S, tls) as leader:
            _add(leader, run)
    except (ControllerError, TlsError, RunsError) as error:
        return f"status pages do not show this run: {error}"
    return ""


def _add(leader: LeaderClient, run: Run) -> None:
    for _ in range(_ATTEMPTS):
        found = _get(leader)
        try:
            known = decode(found.value) if found.found else Runs()
        # A newer version may have written it. Overwriting would lose its runs.
        except RunsError as error:
            raise RunsError(
                f"key {KEY!r} of the namespace {NAMESPACE!r} is unreadable and was left unchanged:"
                f" {error}; delete it to start over"
            ) from error
        # Read, append and put under the read version: the record is shared by all runs.
        value = encode(known.followed_by(run))
        result = _put(leader, value, found.version)
        # A retry after a lost response finds the value of the first attempt.
        if result.error == common_pb2.ERROR_CODE_NONE or result.value == value:
            return

    raise ControllerError(f"other runs reported at the same time, {_ATTEMPTS} times. Run again")


def _get(leader: LeaderClient) -> kv_pb2.KVResult:
    answer = leader.call(
        "KVService/GetKVs",
        lambda channel: kv_pb2_grpc.KVServiceStub(channel).GetKVs,
        kv_pb2.GetKVsRequest(keys=[kv_pb2.KVKey(namespace=NAMESPACE, key=KEY)]),
        _CALL_TIMEOUT_S,
    )
    return _single_result(answer.results)


def _put(leader: LeaderClient, value: bytes, version: int) -> kv_pb2.KVResult:
    item = kv_pb2.KVToPut(namespace=NAMESPACE, key=KEY, value=value, expected_version=version)
    answer = leader.call(
        "KVService/PutKVs",
        lambda channel: kv_pb2_grpc.KVServiceStub(channel).PutKVs,
        kv_pb2.PutKVsRequest(items=[item]),
        _CALL_TIMEOUT_S,
    )
    return _single_result(answer.results)


def _single_result(results: Sequence[kv_pb2.KVResult]) -> kv_pb2.KVResult:
    if len(results) != 1:
        raise ControllerError(f"controller returned {len(results)} results for one key, expected 1")
    return results[0]
