"""Runners of the scenarios about shapes of brokers, by the scenario's name.

Inputs of these scenarios are sentences and steps of a test; what a runner does with the numbers in
them is its own, so a scenario that no runner knows is not run, and fails.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.conformance import (
    pulsar_formats,
    pulsar_ledgers,
    pulsar_offload,
    rocketmq_files,
    rocketmq_formats,
    rocketmq_index,
    rocketmq_store,
)
from tests.conformance.shape_answers import Runner

SHAPE_RUNNERS: Mapping[str, Runner] = {
    **rocketmq_formats.RUNNERS,
    **rocketmq_index.RUNNERS,
    **rocketmq_files.RUNNERS,
    **rocketmq_store.RUNNERS,
    **pulsar_formats.RUNNERS,
    **pulsar_offload.RUNNERS,
    **pulsar_ledgers.RUNNERS,
}
