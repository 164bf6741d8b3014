"""`streammeta s3`: format or explain the address of a bucket, and check a store.

It connects to no controller. `storage.object_store.precheck` runs the checks. This module prints
them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeVar

import click

from streammeta.cli.framework.output import CommandError, Output, OutputFormat, with_output
from streammeta.storage.object_store import opening, precheck
from streammeta.storage.object_store.protocol.address import (
    DEFAULT_REGION,
    Checksum,
    S3Config,
    StoreAddress,
)
from streammeta.storage.object_store.protocol.base import ObjectStore

T = TypeVar("T")

_CHECKSUM_OPTION = "checksum"


@click.group()
def s3() -> None:
    """Format the address of a bucket, and check that its server is suitable."""


@s3.command("check")
@click.argument("address")
@click.option(
    "--step-timeout",
    "step_s",
    type=click.FloatRange(min=0, min_open=True),
    default=precheck.STEP_S,
    help="Timeout of a step in seconds, including retries.",
)
@with_output
def check_command(*, address: str, step_s: float, output: Output) -> None:
    """Check a store: write, read and delete an object, the same in parts, and create one once.

    ADDRESS is a bucket in either form (see `streammeta s3 url --help`) or a directory,
    file:///absolute/path. All steps use new names below streammeta-precheck/ and delete them again.
    They touch no other objects. In the last step many clients create the same object at the same
    time: a server that lets more than one succeed is unsuitable. Exit code 0: all steps are OK. 1:
    a step failed. 2: the address is wrong.

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
    store, configured = _parse(lambda: _open(address))
    with closing(store):
        # Each step is printed as it ends, since a slow server takes up to `step_s` for every one.
        report = precheck.run_precheck(store, lambda step: output.note(_line(step)), step_s=step_s)
        _show_report(output, report, configured)


@s3.command("url")
@click.argument("address", required=False)
@click.option("--bucket", help="Name of the bucket.")
@click.option("--endpoint", help="Server, http://host:port or https://.. [default: Amazon's]")
@click.option("--region", default=DEFAULT_REGION, help="Region of the bucket.")
@click.option(
    "--path-style/--host-style",
    default=None,
    help="Name the bucket in the path instead of the host. [default: path with --endpoint]",
)
@click.option("--access-key", help="Access key id. [default: from the environment at run time]")
@click.option("--secret-key", help="Secret key of the access key id.")
@click.option(
    f"--{_CHECKSUM_OPTION}",
    type=click.Choice([checksum.value for checksum in Checksum]),
    default=Checksum.MD5.value,
    help="Checksum of uploads. `streammeta s3 check` lists the checksums that the server verifies.",
)
@with_output
def url_command(*, address: str | None, output: Output, **parts: Any) -> None:
    """Format the address of a bucket, or explain ADDRESS, without calling the server.

    Every command accepts two forms of address, and this one prints both. The first is streammeta's
    own, with percent-encoded values. The second begins with the server, as other tools write it.
    Its s3-ops-bucket and cluster-id are ignored, and it has no checksum. The output contains the
    given keys: treat it as a secret.

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
        raise click.UsageError("give an ADDRESS to explain, or --bucket to format one")
    config = _parse(lambda: S3Config.from_uri(address) if address else _config(**parts))
    # Amazon's server is not part of an address, so the form that begins with the server is missing.
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


def _parse(read: Callable[[], T]) -> T:
    try:
        return read()
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _open(address: str) -> tuple[ObjectStore, Checksum | None]:
    parsed = StoreAddress.parse(address)
    # A directory has no checksum setting.
    checksum = parsed.target.checksum if isinstance(parsed.target, S3Config) else None
    return opening.open_object_store(parsed), checksum


def _config(
    *, endpoint: str | None, path_style: bool | None, checksum: str, **parts: Any
) -> S3Config:
    # Servers other than Amazon's seldom have host names for buckets.
    if path_style is None:
        path_style = endpoint is not None
    config = S3Config(
        endpoint_url=endpoint, path_style=path_style, checksum=Checksum(checksum), **parts
    )
    return S3Config.from_uri(config.to_uri())  # which names the wrong part


def _line(step: precheck.StepOutcome) -> str:
    return f"[ OK ] {step.name}" if step.is_ok else f"[FAILED] {step.name}: {step.reason}"


def _show_report(
    output: Output, report: precheck.PrecheckReport, configured: Checksum | None
) -> None:
    """Print the verdict. Raise `CommandError` on a failed step."""
    facts = {
        "steps": [
            {"name": step.name, "ok": step.is_ok, "reason": step.reason} for step in report.steps
        ],
        "enforced_checksums": report.enforced and [checksum.value for checksum in report.enforced],
        "left_behind": report.left_behind,
    }
    # People have seen the steps already.
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
            "correct the reasons listed with the steps, or use another server",
            details=facts,
        )

    if configured is not None and report.enforced is not None:
        output.note(_advice(configured, report.enforced))


def _advice(configured: Checksum, enforced: tuple[Checksum, ...]) -> str:
    names = ", ".join(enforced) or "none"
    verdict = (
        f"checksums with which this server rejects damaged bytes: {names}; configured: {configured}"
    )
    if configured not in enforced:
        other = f" add {_CHECKSUM_OPTION}={enforced[-1]} to the address" if enforced else ""
        return f"{verdict}. The server would store bytes damaged in transit.{other}"
    # A checksum that the server stores also protects reads.
    if not configured.is_stored and Checksum.CRC32C in enforced:
        return f"{verdict}. Faster, and also checked when reading: {_CHECKSUM_OPTION}=crc32c"
    return verdict
