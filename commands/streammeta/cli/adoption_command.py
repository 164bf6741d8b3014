"""`streammeta restore finish`: the end of a restored cluster's recovery mode."""

from __future__ import annotations

import click

from streammeta.cli.client import ControllerClient
from streammeta.cli.connecting import with_client
from streammeta.cli.output import Output, with_output
from streammeta.v1 import admin_pb2
from streammeta.v1.admin_pb2_grpc import AdminServiceStub


@click.command()
@with_client()
@with_output
def finish(client: ControllerClient, output: Output) -> None:
    """End recovery mode: brokers may write again, from the streams' ends as they are now.

    What lies in the bucket and is not in the map stays there, and is not taken back any more.
    Harmless if recovery mode is over.

    \b
    Example:
      streammeta restore finish --connect 127.0.0.1:9091
    """
    answer = client.call(
        lambda channel: AdminServiceStub(channel).FinishRestore, admin_pb2.FinishRestoreRequest()
    )
    output.summary({"was_recovering": answer.was_recovering})
