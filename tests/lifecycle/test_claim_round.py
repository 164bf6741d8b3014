"""The claim protocol under crashes, deposed leaders, late puts and restores, from one seed.

Each history has one log that all leaders share and one bucket. A leader is stopped for good after
any step; what it was about to put may still arrive, any time later. A restore replaces the log by a
copy made earlier. Invariants: while nothing is restored no leader is refused; after a restore of a
copy that a claim was made after, no id is issued that was issued before.
"""

import random
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import pytest

from streammeta.controller.errors import MapOlderThanBucketError
from streammeta.controller.lifecycle import bucket_claim
from streammeta.controller.lifecycle import bucket_claim as protocol

STEP = 10


@dataclass
class History:
    """The committed log, as what it says, and the claims in the bucket."""

    next_id: int = 0
    issued_below: int = 0
    claims: list[int] = field(default_factory=list)
    late_puts: list[int] = field(default_factory=list)
    issued: set[int] = field(default_factory=set)
    epoch: int = 0


@dataclass
class Leader:
    """One term of one controller: what its map says, which stands still once it is deposed."""

    history: History
    epoch: int
    next_id: int
    issued_below: int
    round: Generator[Any, Any, int] | None = None
    result: int | None = None
    bound: int = 0
    refused: bool = False
    is_stopped: bool = False

    @property
    def is_deposed(self) -> bool:
        return self.history.epoch != self.epoch

    def step(self) -> None:
        """Take one step of a round, or begin one, or issue ids."""
        if self.round is None:
            self.round, self.result = bucket_claim.claim_round(self._map), None
        try:
            step = self.round.send(self.result)
        except StopIteration as end:
            self.bound, self.round = end.value, None
            return
        except MapOlderThanBucketError:
            self.refused = self.is_stopped = True
            return
        self._do(step)

    def issue(self, count: int) -> list[int]:
        """Issue ids, if they may be issued and the log commits that."""
        if self.is_deposed or self.refused or self.next_id + count > self.bound:
            return []
        ids = list(range(self.next_id, self.next_id + count))
        self.next_id = self.history.next_id = self.next_id + count
        return ids

    def _map(self) -> bucket_claim.Issued:
        return bucket_claim.Issued(self.next_id, self.issued_below)

    def _do(self, step: Any) -> None:
        self.result = None
        match step:
            case bucket_claim.ReadClaims():
                self.result = max(self.history.claims, default=0)
            case bucket_claim.ProveLeadership() | bucket_claim.CommitBound() if self.is_deposed:
                self.is_stopped = True
            case bucket_claim.CommitBound(bound):
                self.issued_below = self.history.issued_below = bound
            case bucket_claim.PutClaim(bound):
                self.history.claims.append(bound)
            case bucket_claim.ProveLeadership():
                pass
            case _:
                raise AssertionError(step)


def elected(history: History) -> Leader:
    history.epoch += 1
    return Leader(history, history.epoch, history.next_id, history.issued_below)


def act(rng: random.Random, history: History, leaders: list[Leader]) -> None:
    """Let something happen to an honest history."""
    active = [one for one in leaders if not one.is_stopped]
    what = rng.choices(("elect", "step", "issue", "crash", "late"), (2, 12, 6, 1, 2))[0]
    if what == "elect" or not active:
        leaders.append(elected(history))
    elif what == "step":
        rng.choice(active).step()
    elif what == "issue":
        leader = rng.choice(active)
        ids = leader.issue(rng.randint(1, 4))
        assert history.issued.isdisjoint(ids)
        history.issued.update(ids)
    elif what == "crash":
        leader = rng.choice(active)
        leader.is_stopped = True
        if leader.round is not None and rng.random() < 0.5 and leader.issued_below:
            # It was committed here, so a put of it may be on its way.
            history.late_puts.append(leader.issued_below)
    elif history.late_puts:
        history.claims.append(history.late_puts.pop(rng.randrange(len(history.late_puts))))
    if rng.random() < 0.1:
        history.claims = sorted(set(history.claims))[-3:]


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "CLAIM_STEP", STEP)


def settled(history: History) -> Leader:
    """Return a leader that has finished its first round, or was refused."""
    leader = elected(history)
    while not leader.bound and not leader.is_stopped:
        leader.step()
    return leader


@pytest.mark.parametrize("seed", range(300))
def test_an_honest_history_is_never_refused(seed: int) -> None:
    rng = random.Random(seed)
    history = History()
    leaders = [elected(history)]
    for _ in range(200):
        act(rng, history, leaders)
        assert not any(one.refused for one in leaders), f"seed {seed}"
        assert max(history.claims, default=0) <= history.issued_below, f"seed {seed}"
        assert all(one < history.issued_below for one in history.issued), f"seed {seed}"
    last = settled(history)
    assert last.bound == max(history.claims), f"seed {seed}: ids are issued that nobody claimed"


@pytest.mark.parametrize("seed", range(100))
def test_a_copy_from_before_a_takeover_is_always_found_out(seed: int) -> None:
    rng = random.Random(2_000 + seed)
    history = History()
    leaders = [elected(history)]
    for _ in range(rng.randrange(60)):
        act(rng, history, leaders)
    copy = bucket_claim.Issued(history.next_id, history.issued_below)
    settled(history)
    history.next_id, history.issued_below = copy.next_object_id, copy.issued_below
    assert settled(history).refused, f"seed {seed}"


@pytest.mark.parametrize("seed", range(300))
def test_no_id_is_issued_twice_over_a_restore_that_a_claim_came_after(seed: int) -> None:
    rng = random.Random(1_000 + seed)
    history = History()
    leaders = [elected(history)]
    for _ in range(rng.randrange(120)):
        act(rng, history, leaders)
    copy = bucket_claim.Issued(history.next_id, history.issued_below)
    claims_before = max(history.claims, default=0)
    for _ in range(rng.randrange(1, 120)):
        act(rng, history, leaders)
    for leader in leaders:
        leader.is_stopped = True
    history.next_id, history.issued_below = copy.next_object_id, copy.issued_below
    was_claimed = max(history.claims, default=0) > copy.issued_below
    restored = settled(history)
    if was_claimed:
        assert restored.refused, f"seed {seed}: claims {claims_before}, {history.claims}"
        assert restored.issue(1) == []
        # Whoever leads next is refused as well: nothing was committed that would hide it.
        assert settled(history).refused
    else:
        assert not restored.refused, f"seed {seed}"


def test_restores_are_met_that_claims_can_see_and_that_they_can_not() -> None:
    found = set()
    for seed in range(300):
        rng = random.Random(1_000 + seed)
        history = History()
        leaders = [elected(history)]
        for _ in range(rng.randrange(120)):
            act(rng, history, leaders)
        bound = history.issued_below
        for _ in range(rng.randrange(1, 120)):
            act(rng, history, leaders)
        found.add(max(history.claims, default=0) > bound)
    assert found == {True, False}


@pytest.mark.parametrize(
    ("next_id", "issued_below", "bound"),
    [(0, 0, STEP), (3, STEP, STEP + 3), (3, 50, 51), (2**63 - 2, 2**63 - 3, 2**63 - 1)],
)
def test_bounds_rise_by_what_was_issued_and_at_least_by_one(
    next_id: int, issued_below: int, bound: int
) -> None:
    assert bucket_claim.next_bound(bucket_claim.Issued(next_id, issued_below)) == bound
