"""Metrics of a broker, derived from its counters at each scrape, probes, and their HTTP listener.

Serves `/metrics`, `/livez` and `/readyz` in plain text on a listener separate from Kafka's
protocol. No page names a topic, a group or a client. A running broker is live. It is ready if it
serves Kafka clients and the leading controller has answered recently. `/livez` names the reason why
`/readyz` fails but stays 200: a restart would end the clients' connections and bring no controller
back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.brokers.kafka.protocol.tally import API_NAMES, BrokerTally
from streammeta.client import ClientMetrics
from streammeta.storage.installation import optional_packages

# -- State of a broker for its probes and metrics. Pure

VIEW_AGE_MAX_S = 10.0
"""Age of the broker's cluster view at which it stops being ready, in seconds."""

LEADER_SILENT_MAX_S = 10.0
"""Time without an answer from the leading controller at which a broker stops being ready, in s."""


@dataclass(frozen=True, slots=True)
class BrokerState:
    """Current state of a broker. While the process rejoins the cluster it serves nothing.

    `partitions` counts the partitions it leads, `groups` the groups it coordinates, `recoveries`
    the dead brokers assigned to it, `unavailable` the partitions without a leader plus its own that
    are not open. `certificate_ends_s` is the end of the server certificate's validity in seconds
    since 1970, None without a certificate or without the package cryptography. `leader_silent_s` is
    how long calls to the leading controller have failed without an answer.
    """

    is_serving: bool = False
    view_age_s: float = 0.0
    leader_silent_s: float = 0.0
    connections: int = 0
    partitions: int = 0
    groups: int = 0
    recoveries: int = 0
    unavailable: int = 0
    certificate_ends_s: float | None = None

    @property
    def unready(self) -> str:
        """Reason why clients should use another broker, empty if there is none."""
        if not self.is_serving:
            return "the broker is joining the cluster"
        if self.view_age_s > VIEW_AGE_MAX_S:
            return f"no controller has answered for {self.view_age_s:.0f} s"
        if self.leader_silent_s > LEADER_SILENT_MAX_S:
            return f"the leading controller has not answered for {self.leader_silent_s:.0f} s"
        return ""


with optional_packages("--http-listen", "kafka"):
    from aiohttp import web
    from prometheus_client import (
        CollectorRegistry,
        GCCollector,
        PlatformCollector,
        ProcessCollector,
        disable_created_metrics,
        generate_latest,
    )
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
    from prometheus_client.registry import Collector

    from streammeta.client.prometheus import ClientCollector

_PREFIX = "streammeta_kafka_"
_IDLE_S = 5.0
_STOP_S = 1.0
_HEADER_BYTES_MAX = 8 << 10


class KafkaCollector(Collector):
    """Prometheus collector of a broker's metrics."""

    def __init__(self, tally: BrokerTally, state: Callable[[], BrokerState]) -> None:
        self._tally = tally
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its current values."""
        tally, state = self._tally, self._state()
        yield _gauge("serving", "1 while clients are served.", state.is_serving)
        yield _counter(
            "requests",
            "Requests read, by API.",
            "api",
            ((API_NAMES[key], number) for key, number in tally.requests.items()),
        )
        yield _counter(
            "errors",
            "Errors in answers, one for each topic, partition or group that has an error.",
            "error",
            ((Code(code).name, number) for code, number in tally.errors.items()),
        )
        yield _count("produced_bytes", "Bytes of accepted record batches.", tally.produced_bytes)
        yield _count("fetched_bytes", "Bytes of sent record batches.", tally.fetched_bytes)
        yield _gauge("connections", "Open connections.", state.connections)
        yield _count("connections_opened", "Connections begun.", tally.connections_opened)
        yield _count(
            "connections_refused",
            "Connections ended because they did not authenticate or sent an unreadable request.",
            tally.connections_refused,
        )
        yield _gauge("partitions_led", "Partitions open on this broker.", state.partitions)
        yield _gauge(
            "partitions_unavailable",
            "Partitions without a leader, and partitions led by this broker that are not open.",
            state.unavailable,
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}tls_certificate_not_after_timestamp_seconds",
            "End of validity of the certificate that clients see. Has no value without TLS.",
            value=state.certificate_ends_s,
        )
        yield _gauge("groups", "Consumer groups that this broker coordinates.", state.groups)
        yield _gauge(
            "recoveries_assigned",
            "Dead brokers whose streams this broker has to close.",
            state.recoveries,
        )
        yield _count(
            "recovered_streams",
            "Streams of dead brokers that this broker closed so that others can open them."
            " Controllers of this version close them without a broker.",
            tally.recovered_streams,
        )
        yield _count(
            "joins",
            "Times that the process joined the cluster, also after it was replaced.",
            tally.lives,
        )


def registry_of(
    tally: BrokerTally, state: Callable[[], BrokerState], client: Callable[[], ClientMetrics]
) -> CollectorRegistry:
    """Return a registry with metrics of a broker, its client, process and interpreter."""
    # The `_created` series double the size of a page.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    registry.register(KafkaCollector(tally, state))
    registry.register(ClientCollector(client))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


@asynccontextmanager
async def serve_http(
    address: tuple[str, int], registry: CollectorRegistry, state: Callable[[], BrokerState]
) -> AsyncIterator[int]:
    """Serve probes and metrics, and yield the port, a free one if the address has 0.

    Raises `OSError` if the address is in use or does not belong to this host.
    """

    async def metrics(_: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        return web.Response(body=generate_latest(registry), headers=headers)

    async def livez(_: web.Request) -> web.Response:
        # Always 200: a restart of the broker does not bring a controller back.
        reason = state().unready
        return web.Response(text="[+] live\n" + (f"[-] serving: {reason}\n" if reason else ""))

    async def readyz(_: web.Request) -> web.Response:
        reason = state().unready
        if reason:
            return web.Response(status=503, text=f"[-] serving: {reason}\n")
        return web.Response(text="[+] serving\n")

    pages = web.Application()
    pages.add_routes(
        [web.get("/metrics", metrics), web.get("/livez", livez), web.get("/readyz", readyz)]
    )
    runner = web.AppRunner(
        pages,
        # Scrapes every few seconds would fill the log.
        access_log=None,
        keepalive_timeout=_IDLE_S,
        shutdown_timeout=_STOP_S,
        max_line_size=_HEADER_BYTES_MAX,
        max_field_size=_HEADER_BYTES_MAX,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, *address)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _gauge(name: str, text: str, number: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value=float(number))


def _count(name: str, text: str, number: int) -> Metric:
    return CounterMetricFamily(_PREFIX + name, text, value=number)


def _counter(name: str, text: str, label: str, rows: Iterable[tuple[str, int]]) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, text, labels=[label])
    for value, number in rows:
        family.add_metric([value], number)
    return family
