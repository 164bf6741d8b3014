"""Registries with all metrics of a client, as they stand before anything has happened."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from streammeta.client import ReaderStats
from streammeta.client.prometheus import ClientCollector
from streammeta.client.tally import ClientMetrics, ClientTally, snapshot


def nothing_yet() -> ClientMetrics:
    return snapshot(ClientTally(), ReaderStats())


def client_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(ClientCollector(nothing_yet))
    return registry
