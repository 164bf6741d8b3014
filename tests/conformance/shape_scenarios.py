"""All shapes that scenarios may have, in the order of their families."""

from __future__ import annotations

from tests.conformance import (
    automq_logs,
    kafka_formats,
    kafka_logs,
    kafka_producers,
    kafka_wire,
    pulsar_formats,
    pulsar_indexes,
    pulsar_ledger_shapes,
    pulsar_offload,
    pulsar_streams,
    pulsar_values,
    rocketmq_flat_files,
    rocketmq_formats,
    rocketmq_index,
    rocketmq_metadata,
    rocketmq_reads,
    rocketmq_segments,
    rocketmq_tiers,
)
from tests.conformance.shape_vocabulary import Shape

SHAPES: tuple[Shape, ...] = (
    *rocketmq_formats.SHAPES,
    *rocketmq_segments.SHAPES,
    *rocketmq_flat_files.SHAPES,
    *rocketmq_index.SHAPES,
    *rocketmq_reads.SHAPES,
    *rocketmq_tiers.SHAPES,
    *rocketmq_metadata.SHAPES,
    *pulsar_formats.SHAPES,
    *pulsar_indexes.SHAPES,
    *pulsar_values.SHAPES,
    *pulsar_offload.SHAPES,
    *pulsar_streams.SHAPES,
    *pulsar_ledger_shapes.SHAPES,
    *kafka_formats.SHAPES,
    *kafka_logs.SHAPES,
    *kafka_producers.SHAPES,
    *kafka_wire.SHAPES,
    *automq_logs.SHAPES,
)
