"""`streammeta check`: short tests of a running cluster that remove their data."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from streammeta.cli.framework.connecting import connection_options
from streammeta.cli.framework.output import CommandError, Duration, Output, with_output
from streammeta.tls.files import CallerFiles, TlsFiles

if TYPE_CHECKING:
    from streammeta.cli.quorum.speed_check import Load, Measured

_COLUMNS = ("figure", "measured", "threshold", "verdict")
_RATE_MAX = 5_000
_DURATION_MAX_MS = 60_000
_LATENCIES = (("p50_ms", 0.5), ("p99_ms", 0.99), ("slowest_ms", 1.0))


@click.group()
def check() -> None:
    """Test a running cluster for a few seconds and remove all test data.

    \b
    Example:
      streammeta check perf --connect 127.0.0.1:9091
    """


@check.command()
@connection_options()
@click.option("--rate", type=click.IntRange(1, _RATE_MAX), default=200, help="Writes per second.")
@click.option(
    "--duration",
    "duration_ms",
    type=Duration(),
    default="10s",
    help="Duration of the load, 1s to 60s.",
)
@with_output
def perf(
    connect: tuple[str, ...],
    tls: CallerFiles | None,
    timeout_s: float,
    rate: int,
    duration_ms: int,
    output: Output,
) -> None:
    """Write small values at a fixed rate, and measure how fast they are acknowledged.

    Like a commit, each write is on the disks of a majority before it is acknowledged. At most 64
    are in flight, to keys of 256 bytes in the namespace streammeta.check-perf, which are removed
    afterwards. Latencies count from the scheduled time of a write. Needs the role broker or admin.

    The check passes, with exit code 0, if nine tenths of the rate are acknowledged, 99 of 100
    writes within 100 ms, all within 1 s, and no write fails.

    \b
    Example:
      streammeta check perf --connect 127.0.0.1:9091 --rate 1000 --duration 30s
    """
    # The broker client loads slowly.
    from streammeta.cli.quorum.speed_check import Load, judge

    if not 1_000 <= duration_ms <= _DURATION_MAX_MS:
        raise click.BadParameter("must be 1s to 60s", param_hint="--duration")
    # Writes go through the broker client, which supports no tokens.
    if tls is not None and not isinstance(tls, TlsFiles):
        raise click.UsageError("this command needs a certificate: set --tls-cert and --tls-key")
    load = Load(rate, duration_ms / 1000)
    measured = asyncio.run(_run(connect, tls, timeout_s, load))
    judged = judge(load, measured)
    rows = [
        (figure.name, figure.measured, figure.threshold, _word(figure.passed)) for figure in judged
    ]
    # All figures are printed before the failure, to show how far off they are.
    output.summary(
        {
            "writes": len(measured.latencies_ms),
            **{name: round(measured.quantile_ms(share), 1) for name, share in _LATENCIES},
            "verdict": _word(all(figure.passed for figure in judged)),
        }
    )
    output.rows("figures", _COLUMNS, rows)
    missed = [figure.name for figure in judged if not figure.passed]
    if missed:
        # One cause is enough, because failures under load mostly share it.
        causes = f" ({measured.failures[0]})" if measured.failures else ""
        raise CommandError(
            "TOO_SLOW",
            f"the cluster misses {', '.join(missed)}{causes}",
            "check flush times and lag in /metrics or `streammeta quorum describe`, check"
            " that this machine and the network are idle, and repeat",
        )


async def _run(
    connect: tuple[str, ...], tls: TlsFiles | None, timeout_s: float, load: Load
) -> Measured:
    from streammeta.cli.quorum.speed_check import run
    from streammeta.client.controllers.controller_client import ControllerClient
    from streammeta.client.errors import BrokerClientError

    async with ControllerClient(connect, deadline_s=timeout_s, tls=tls) as client:
        try:
            return await run(client, load)
        except BrokerClientError as error:
            raise CommandError(
                "CALL_FAILED", str(error), "`streammeta quorum describe` shows the controllers"
            ) from error


def _word(passed: bool) -> str:
    return "pass" if passed else "fail"
