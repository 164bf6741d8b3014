"""The wheel claims one name, and the thin client works with nothing else of ours installed."""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.lib import wheelhouse
from tests.kit.real_cluster import STEADY, running_cluster

_IMPORTS = """
import importlib.metadata, pkgutil, sys
import proto                       # proto-plus
from google.cloud import storage   # brings proto-plus along in other libraries
import streammeta
from streammeta.storage.errors import MissingPackageError

class Point(proto.Message):
    x = proto.Field(proto.INT32, number=1)

assert Point(x=3).x == 3
assert "proto-plus" in str(importlib.metadata.packages_distributions()["proto"])
loaded, missing = [], {}
for package in ("v1", "rpc", "tls", "storage", "client"):
    parent = importlib.import_module(f"streammeta.{package}")
    for found in pkgutil.walk_packages(parent.__path__, f"{parent.__name__}."):
        try:
            loaded.append(importlib.import_module(found.name))
        except ModuleNotFoundError as error:
            missing[found.name] = error.name
        except MissingPackageError as error:
            missing[found.name] = error.package
print(sorted(set(missing.values())), len(loaded))
"""

_BROKER = """
import asyncio, sys
from streammeta.client import StreamClient

async def main(endpoint, bucket):
    async with await StreamClient.open([endpoint], bucket, node_id=7) as client:
        (stream,) = await client.create_streams([{"topic": "wheel"}])
        await client.open_streams([stream])
        for payload in (b"one", b"two"):
            await client.append(stream, payload)
        print([bytes(record.payload) async for record in client.iterate(stream)])

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built without a network."""
    place = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)],
        cwd=wheelhouse.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(
    scope="module",
    params=[
        wheelhouse.VERSIONS[0],
        *(pytest.param(newer, marks=pytest.mark.slow) for newer in wheelhouse.VERSIONS[1:]),
    ],
)
def python(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """A new environment with the wheel, without extras, beside Google's libraries."""
    interpreter = wheelhouse.interpreters().get(request.param)
    if interpreter is None:
        pytest.skip(f"there is no Python {request.param} on this machine")
    place = tmp_path_factory.mktemp("environment")
    subprocess.run([interpreter, "-m", "venv", "--without-pip", place], check=True)
    installed = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install"),
            *("--quiet", "--no-index", "--find-links", wheelhouse.wheels_for(request.param)),
            *(wheel, *wheelhouse.NEIGHBOURS),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert installed.returncode == 0, installed.stderr
    return place / "bin" / "python"


@pytest.fixture(scope="module")
def endpoint_and_bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    root = tmp_path_factory.mktemp("cluster")
    with running_cluster(root, 1, STEADY) as cluster:
        yield cluster.endpoints[0], f"file://{root / 'bucket'}"


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run that Python with nothing of this repository on its path."""
    return subprocess.run(
        [str(python), "-I", *arguments],
        cwd=python.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_the_wheel_claims_one_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"streammeta"}
    assert "streammeta/__init__.py" not in names  # a namespace that further wheels may extend
    packages = {name.split("/")[1] for name in names if name.startswith("streammeta/")}
    assert packages == {
        *(
            "v1",
            "rpc",
            "tls",
            "storage",
            "reconcile",
            "controller",
            "client",
            "brokers",
            "cli",
            "shell",
        )
    }
    assert {f"streammeta/{package}/py.typed" for package in packages} <= set(names)
    assert "streammeta/v1/common.proto" in names


@pytest.mark.process
def test_everything_of_the_thin_client_is_imported_beside_google_cloud(python: Path) -> None:
    said = run(python, "-c", _IMPORTS)
    assert said.returncode == 0, said.stderr
    missing, count = said.stdout.rsplit(" ", 1)
    wanted = "['botocore', 'prometheus_client']"
    assert missing == wanted, "only stores in S3 and a registry of metrics need an extra"
    assert int(count) > 100


@pytest.mark.process
def test_a_broker_runs_on_the_thin_client(
    python: Path, endpoint_and_bucket: tuple[str, str]
) -> None:
    said = run(python, "-c", _BROKER, *endpoint_and_bucket)
    assert said.returncode == 0, said.stderr
    assert said.stdout == "[b'one', b'two']\n"


@pytest.mark.process
def test_what_an_extra_would_bring_is_named_with_the_extra(python: Path) -> None:
    said = run(
        python,
        "-c",
        "from streammeta.storage.object_store.opening import open_object_store;"
        "open_object_store('s3://bucket')",
    )
    assert said.returncode == 1
    assert "botocore" in said.stderr
    assert "streammeta[s3]" in said.stderr

    said = run(python, "-c", "import streammeta.client.prometheus")
    assert said.returncode == 1
    assert "streammeta[metrics]" in said.stderr

    command = subprocess.run(
        [python.parent / "streammeta", "--help"], capture_output=True, text=True, check=False
    )
    assert command.returncode == 2
    assert "streammeta[cli]" in command.stderr
