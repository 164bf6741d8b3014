"""Rows of the report as Spark expressions, computed in the JVM without passing through Python.

Uses the rules of `verdicts`.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from streammeta.reconcile.vocabulary import verdicts
from streammeta.reconcile.vocabulary.tables import VERDICT_COLUMNS, arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def judged_table(joined: DataFrame, rules: verdicts.Rules, namespace: str) -> DataFrame:
    """Return the rows of the report, without rows that need no report."""
    from pyspark.sql import functions as sql

    key = sql.coalesce("key", _key_of("object_id", namespace)).alias("key")
    made = {"key": key, "verdict": _verdict(rules).alias("verdict")}
    columns = (made.get(name, sql.col(name)) for name in arrow_schema(VERDICT_COLUMNS).names)
    return joined.select(*columns).where(sql.col("verdict") != "")


def _verdict(rules: verdicts.Rules) -> Column:
    """The first verdict of the ladder whose condition holds."""
    from pyspark.sql import functions as sql

    def column(name: str) -> Column:
        return sql.coalesce(sql.col(name), sql.lit(verdicts.ABSENT))

    rows = verdicts.JoinedColumns(
        **{name: column(name) for name in verdicts.JoinedColumns.__dataclass_fields__}
    )
    return reduce(
        lambda below, rule: sql.when(rule[0], sql.lit(str(rule[1]))).otherwise(below),
        reversed(verdicts.ladder(rows, rules)),
        sql.lit(str(verdicts.OTHERWISE)),
    )


def _key_of(object_id: str, namespace: str) -> Column:
    """Return the key of an object, like `key_for`."""
    from pyspark.sql import functions as sql

    digits = sql.lower(sql.hex(sql.col(object_id)))
    zeros = sql.repeat(sql.lit("0"), sql.lit(8) - sql.length(digits))
    prefix = sql.concat(sql.reverse(digits), zeros)
    return sql.concat_ws("/", prefix, sql.lit(namespace), sql.col(object_id).cast("string"))
