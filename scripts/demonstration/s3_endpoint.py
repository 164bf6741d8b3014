"""S3 endpoint of the demo: an embedded server on loopback, or any given URL.

Owns the server's process and the demo's bucket. `ministack` is the default and `moto` the
alternative. Both keep objects in memory and accept any secret.
"""

import sys
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import botocore.config
import botocore.exceptions

from streammeta.cli.local.local_cluster import Child, free_ports, start_child

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

BUCKET = "streammeta-demo"
READY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """Position of the bucket. Credentials are in the environment, never in a URI."""

    url: str
    env: Mapping[str, str]
    server: Child | None

    @property
    def store_uri(self) -> str:
        """Address of the bucket for `--store`."""
        query = urllib.parse.urlencode(
            {"endpoint": self.url, "region": "us-east-1", "pathStyle": "true"}, safe=":/"
        )
        return f"s3://{BUCKET}?{query}"

    def client(self) -> "S3Client":
        """Return a plain S3 client that adds and counts keys without the product."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=self.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.env["AWS_SECRET_ACCESS_KEY"],
            config=botocore.config.Config(s3={"addressing_style": "path"}),
        )


def start_embedded(kind: str, root: Path) -> S3Endpoint:
    """Start `kind` ("ministack" or "moto") on a free port and create the bucket."""
    (port,) = free_ports(1)
    env = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    commands = {
        "ministack": [str(Path(sys.executable).parent / "ministack")],
        "moto": [
            *(sys.executable, "-c", "from moto.server import main; main()"),
            *("-H", "127.0.0.1", "-p", str(port)),
        ],
    }
    settings = {"BIND_HOST": "127.0.0.1", "SERVICES": "s3", "GATEWAY_PORT": str(port)}
    server = start_child(kind, commands[kind], root / f"{kind}.log", settings)
    endpoint = S3Endpoint(f"http://127.0.0.1:{port}", env, server)
    _create_bucket(endpoint)
    return endpoint


def use_existing(url: str, env: Mapping[str, str]) -> S3Endpoint:
    """Use the S3 server at `url` with the credentials in `env`, and create the demo's bucket."""
    endpoint = S3Endpoint(url, env, None)
    _create_bucket(endpoint)
    return endpoint


def _create_bucket(endpoint: S3Endpoint) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            endpoint.client().create_bucket(Bucket=BUCKET)
        except botocore.exceptions.EndpointConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        except botocore.exceptions.ClientError as error:
            if error.response["Error"]["Code"] != "BucketAlreadyOwnedByYou":
                raise
            return
        else:
            return
