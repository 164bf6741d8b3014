"""`streammeta health`: ask one controller the standard gRPC health question."""

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from streammeta.cli.output import CommandError, OutputFormat, command_output, format_option
from streammeta.rpc.connections import operator_channel

SERVICES = ("serving", "leader")


@click.command()
@click.option("--connect", required=True, metavar="HOST:PORT", help="The controller to ask.")
@click.option(
    "--service",
    type=click.Choice(SERVICES),
    default="serving",
    show_default=True,
    help="serving: it answers requests; leader: it leads and takes writes.",
)
@click.option("--timeout", "timeout_s", default=3.0, show_default=True, help="Seconds to wait.")
@format_option
def health(connect: str, service: str, timeout_s: float, output_format: OutputFormat) -> None:
    """Exit 0 if a controller is healthy, 1 if not.

    \b
    Example:
      streammeta health --connect 127.0.0.1:9090 --service leader
    """
    with command_output(output_format) as output:
        status = _ask(connect, service, timeout_s)
        if status != "SERVING":
            raise CommandError(
                status, f"{connect} answers {status} for {service}", "see the controller's log"
            )
        output.summary({"endpoint": connect, "service": service, "status": status})


def _ask(endpoint: str, service: str, timeout_s: float) -> str:
    with operator_channel(endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            raise CommandError(
                "NO_CONTROLLER",
                f"no controller answers at {endpoint} ({error.details()})",
                "start it, or correct --connect",
            ) from error
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name
