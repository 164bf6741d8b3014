"""`streammeta s3`: write or explain the address of a bucket, and precheck a store.

Talks to no controller. `storage.object_store.precheck` does the checks; this module prints them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeVar

import click

from streammeta.cli.framework.output import CommandError, Output, OutputFormat, with_output
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.precheck import (
    STEP_S,
    PrecheckReport,
    StepOutcome,
    run_precheck,
)
from streammeta.storage.object_store.protocol.address import DEFAULT_REGION, Checksum, S3Config
from streammeta.storage.object_store.protocol.base import ObjectStore

T = TypeVar("T")

_CHECKSUM_OPTION = "checksum"


@click.group()
def s3() -> None:
    """Write the address of a bucket, and check that its server can be built upon."""


@s3.command("check")
@click.argument("address")
@click.option(
    "--step-timeout",
    "step_s",
    type=click.FloatRange(min=0, min_open=True),
    default=STEP_S,
    show_default=True,
    help="Seconds that a step may take, with its retries.",
)
@with_output
def check_command(*, address: str, step_s: float, output: Output) -> None:
    """Try out a store: write, read and delete an object, the same in parts, and create one once.

    ADDRESS is that of a bucket in either form (see `streammeta s3 url --help`) or a directory,
    file:///absolute/path. All is done below streammeta-precheck/ under names never used before, and
    deleted again; other objects are not touched. The last step lets many create the same object at
    the same time: a server that lets more than one succeed is unsuitable. Exit code 0: all steps
    are OK; 1: one failed; 2: the address is wrong.

    \b
    Example:
      streammeta s3 check 's3://data?endpoint=http://127.0.0.1:9000&accessKey=id&secretKey=key'
      [ OK ] Write object
      [ OK ] Read object
      [ OK ] Delete object
      [ OK ] Write object to copy from
      [ OK ] Upload multipart object
      [ OK ] Read multipart object
      [ OK ] Delete multipart object
      [ OK ] Create an object once
    """
    store, configured = _understood(lambda: _open(address))
    with closing(store):
        report = run_precheck(store, lambda step: output.note(_line(step)), step_s=step_s)
        _tell(output, report, configured)


@s3.command("url")
@click.argument("address", required=False)
@click.option("--bucket", help="The bucket's name.")
@click.option("--endpoint", help="The server, http://host:port or https://..  [default: Amazon's]")
@click.option("--region", default=DEFAULT_REGION, show_default=True, help="The bucket's region.")
@click.option(
    "--path-style/--host-style",
    default=None,
    help="The bucket is named in the path, or in the host.  [default: path with --endpoint]",
)
@click.option("--access-key", help="Id of the key.  [default: from the environment when used]")
@click.option("--secret-key", help="The secret key that belongs to it.")
@click.option(
    f"--{_CHECKSUM_OPTION}",
    type=click.Choice([checksum.value for checksum in Checksum]),
    default=Checksum.MD5.value,
    show_default=True,
    help="What uploads are checked by; `streammeta s3 check` tells what the server looks at.",
)
@with_output
def url_command(*, address: str | None, output: Output, **parts: Any) -> None:
    """Write the address of a bucket, or explain ADDRESS. Nothing is asked of the server.

    Two forms of address are understood wherever an address is, and both are printed. The first is
    that of streammeta; values are percent-encoded. The second begins with the server, as other
    tools write it; its s3-ops-bucket and cluster-id are not used, and it has no checksum. Addresses
    are printed with the keys that were given: keep them as secret as the keys.

    \b
    Forms:
      s3://BUCKET?endpoint=..&region=..&pathStyle=true|false&accessKey=..&secretKey=..&checksum=..
      s3://HOST:PORT?s3-data-bucket=..&s3-endpoint-protocol=http|https&s3-region=..
        &s3-path-style=true|false&s3-access-key=..&s3-secret-key=..

    \b
    Example:
      streammeta s3 url --bucket data --endpoint http://127.0.0.1:9000 \\
        --access-key id --secret-key key
      streammeta s3 url 's3://127.0.0.1:9000?s3-data-bucket=data&s3-endpoint-protocol=http'
    """
    given = parts["bucket"] is not None
    if given == (address is not None):
        raise click.UsageError("give an ADDRESS to explain, or --bucket to write one")
    config = _understood(lambda: S3Config.from_uri(address) if address else _config(**parts))
    server_form = None if config.endpoint_url is None else config.to_server_uri()
    output.summary(
        {
            "address": config.to_uri(),
            "server_form": server_form,
            "bucket": config.bucket,
            "endpoint": config.endpoint_url or "Amazon S3",
            "region": config.region,
            "path_style": config.path_style,
            "access_key": config.access_key or "from the environment",
            "secret_key": "given" if config.secret_key else "from the environment",
            "checksum": config.checksum.value,
        }
    )


def _understood(read: Callable[[], T]) -> T:
    try:
        return read()
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _open(address: str) -> tuple[ObjectStore, Checksum | None]:
    store = open_object_store(address)
    is_s3 = address.startswith("s3://")
    return store, S3Config.from_uri(address).checksum if is_s3 else None


def _config(
    *, endpoint: str | None, path_style: bool | None, checksum: str, **parts: Any
) -> S3Config:
    if path_style is None:
        path_style = endpoint is not None
    config = S3Config(
        endpoint_url=endpoint, path_style=path_style, checksum=Checksum(checksum), **parts
    )
    return S3Config.from_uri(config.to_uri())  # which says what is wrong with a part


def _line(step: StepOutcome) -> str:
    return f"[ OK ] {step.name}" if step.is_ok else f"[FAILED] {step.name}: {step.reason}"


def _tell(output: Output, report: PrecheckReport, configured: Checksum | None) -> None:
    """Print the verdict; raise `CommandError` on a failed step."""
    facts = {
        "steps": [
            {"name": step.name, "ok": step.is_ok, "reason": step.reason} for step in report.steps
        ],
        "enforced_checksums": report.enforced and [one.value for one in report.enforced],
        "left_behind": report.left_behind,
    }
    if output.format is OutputFormat.JSON:
        output.summary(facts)
    elif report.left_behind:
        output.note(f"not cleaned up: {report.left_behind}")
    if report.failures:
        names = ", ".join(step.name.lower() for step in report.failures)
        raise CommandError(
            "UNSUITABLE",
            f"this store can't be used: {len(report.failures)} of {len(report.steps)} steps failed"
            f" ({names})",
            "the reasons are with the steps; mend what they name, or use another server",
            details=facts,
        )
    if configured is not None and report.enforced is not None:
        output.note(_advice(configured, report.enforced))


def _advice(configured: Checksum, enforced: tuple[Checksum, ...]) -> str:
    names = ", ".join(enforced) or "none"
    verdict = f"checksums that this server refuses damaged bytes by: {names}; in use: {configured}"
    if configured not in enforced:
        other = f" add {_CHECKSUM_OPTION}={enforced[-1]} to the address" if enforced else ""
        return f"{verdict}. Damage on the way to it would be stored.{other}"
    if not configured.is_stored and Checksum.CRC32C in enforced:
        return f"{verdict}. Faster, and checked on reading too: {_CHECKSUM_OPTION}=crc32c"
    return verdict
