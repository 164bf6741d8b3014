"""Registries with all metrics of a client, and of a broker, before anything has happened."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from streammeta.brokers.kafka.protocol.tally import BrokerTally
from streammeta.brokers.kafka.service.metrics import KafkaCollector
from streammeta.brokers.kafka.service.state import BrokerState
from streammeta.client import ReaderStats
from streammeta.client.prometheus import ClientCollector
from streammeta.client.resources.tally import ClientMetrics, ClientTally, snapshot


def nothing_yet() -> ClientMetrics:
    return snapshot(ClientTally(), ReaderStats())


def client_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(ClientCollector(nothing_yet))
    return registry


def kafka_registry() -> CollectorRegistry:
    """Return what a broker gives beside the metrics of its client and of the process."""
    registry = CollectorRegistry()
    registry.register(KafkaCollector(BrokerTally(), BrokerState))
    return registry
