"""Filters that Spark pushes down never drop a row, or a range of keys, that satisfies them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from streammeta.reconcile.listing.shards import Shard
from tests.kit.seeds import seeds

pytestmark = pytest.mark.spark

VALUES = [*range(-2, 4), None]
WORDS = ["", "a", "ab", "b", "ba", "é", "z", None]
ROWS = pa.RecordBatch.from_pydict(
    {
        "n": pa.array([n for n in VALUES for _ in WORDS], pa.int64()),
        "key": pa.array([word for _ in VALUES for word in WORDS], pa.string()),
    }
)


def holds(filter_: Any, row: dict[str, Any]) -> bool:
    """Whether SQL lets a row pass."""
    value = row[filter_.attribute[0]]
    kind = type(filter_).__name__
    if kind in ("IsNull", "IsNotNull"):
        return (value is None) == (kind == "IsNull")
    if value is None:
        return False
    wanted = filter_.value
    judges: dict[str, Callable[[], bool]] = {
        "EqualTo": lambda: value == wanted,
        "GreaterThan": lambda: value > wanted,
        "GreaterThanOrEqual": lambda: value >= wanted,
        "LessThan": lambda: value < wanted,
        "LessThanOrEqual": lambda: value <= wanted,
        "In": lambda: value in wanted,
        "StringStartsWith": lambda: value.startswith(wanted),
    }
    return judges[kind]()


def filters(rng: random.Random) -> list[Any]:
    from pyspark.sql import datasource as of

    found: list[Any] = []
    for _ in range(rng.randrange(1, 4)):
        column: tuple[str, ...] = rng.choice([("n",), ("key",)])
        pool: list[Any] = [v for v in (VALUES if column == ("n",) else WORDS) if v is not None]
        compare = [of.EqualTo, of.GreaterThan, of.GreaterThanOrEqual, of.LessThan]
        made = [kind(column, rng.choice(pool)) for kind in (*compare, of.LessThanOrEqual)]
        made += [of.In(column, tuple(rng.sample(pool, 2))), of.IsNull(column), of.IsNotNull(column)]
        if column == ("key",):
            made.append(of.StringStartsWith(column, rng.choice(pool)))
        found.append(rng.choice(made))
    return found


@pytest.mark.parametrize("seed", seeds(66, slow=134))
def test_rows_that_satisfy_all_filters_pass_and_others_do_not(seed: int) -> None:
    from streammeta.reconcile.listing.source_filters import row_filter

    given = filters(random.Random(seed))
    expression = row_filter(given, ROWS.schema)
    rows = ROWS.to_pylist()
    expected = [row for row in rows if all(holds(rule, row) for rule in given)]
    assert ROWS.filter(expression).to_pylist() == expected, given


@pytest.mark.parametrize("seed", seeds(66, slow=134))
def test_a_shard_is_left_out_only_if_none_of_its_keys_may_pass(seed: int) -> None:
    from streammeta.reconcile.listing.source_filters import shard_may_pass

    given = [filter_ for filter_ in filters(random.Random(seed)) if filter_.attribute == ("key",)]
    cuts = [None, "a", "ab", "b", "z", None]
    for after, last in itertools.pairwise(cuts):
        keys = [
            word
            for word in WORDS
            if word is not None
            and (after is None or word.encode() > after.encode())
            and (last is None or word.encode() <= last.encode())
        ]
        if any(all(holds(rule, {"key": key}) for rule in given) for key in keys):
            assert shard_may_pass(given, Shard(after, last)), (given, after, last)


def test_shards_are_left_out() -> None:
    from pyspark.sql import datasource as of

    from streammeta.reconcile.listing.source_filters import shard_may_pass

    shards = [Shard(None, "a"), Shard("a", "b"), Shard("b", "c"), Shard("c", None)]
    kept = {
        of.EqualTo(("key",), "b"): [1],
        of.StringStartsWith(("key",), "b"): [1, 2],
        of.GreaterThan(("key",), "bb"): [2, 3],
        of.LessThanOrEqual(("key",), "a"): [0],
        of.EqualTo(("owner",), 0): [0, 1, 2, 3],
        of.IsNotNull(("key",)): [0, 1, 2, 3],
    }
    for filter_, wanted in kept.items():
        passing = [at for at, shard in enumerate(shards) if shard_may_pass([filter_], shard)]
        assert passing == wanted, filter_


def test_what_is_not_understood_is_left_to_spark() -> None:
    from pyspark.sql import datasource as of

    from streammeta.reconcile.listing.source_filters import row_filter

    strange = [
        of.Not(of.EqualTo(("n",), 1)),
        of.EqualTo(("n", "within"), 1),
        of.EqualTo(("other",), 1),
        of.EqualTo(("n",), "1"),
        of.EqualTo(("key",), 1),
        of.EqualTo(("n",), True),
        of.In(("n",), (1, "2")),
        of.StringEndsWith(("key",), "a"),
        of.EqualNullSafe(("n",), None),
    ]
    assert row_filter(strange, ROWS.schema) is None
