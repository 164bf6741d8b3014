"""The container files are well-formed and speak of things that exist.

No Docker daemon is needed: linters read the files, and every command line in them is parsed by the
command it is for. The broker example runs for real against controllers on loopback.
"""

import asyncio
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from streammeta.cli.root import cli
from streammeta.controller.monitoring.http.http_listener import HttpPlane, Page, Route
from streammeta.controller.trust.authenticator import HTTP_RULES, Authenticator
from streammeta.storage.object_store.protocol.address import S3Config
from streammeta.tls.listener import ListenerTls
from tests.kit.real_cluster import running_cluster

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
CONTROLLERS = sorted(name for name in SERVICES if name.startswith("controller-"))
TARGETS = re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.M)
COMPOSE_SCHEMA = ("--builtin-schema", "vendor.compose-spec")
YAML_RULES = "{extends: default, rules: {line-length: {max: 100}}}"


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command from the root of the repository; its output is captured."""
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def tool(name: str) -> Path:
    """Return a command that was installed beside this Python."""
    return BIN / name


@pytest.mark.parametrize(
    "command",
    [
        [tool("hadolint"), "docker/Dockerfile"],
        [tool("yamllint"), "--strict", "-d", YAML_RULES, "docker/compose.yaml"],
        [tool("check-jsonschema"), *COMPOSE_SCHEMA, "docker/compose.yaml"],
    ],
    ids=lambda command: command[0].name,
)
def test_linter_finds_nothing(command: list[str | Path]) -> None:
    result = run(*command)

    assert result.returncode == 0, result.stdout + result.stderr


def copied_from_context() -> list[str]:
    """Every path that the Dockerfile copies out of the build context."""
    copies = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.M)
    return sorted({source for line in copies for source in shlex.split(line)[:-1]})


@pytest.mark.parametrize("path", copied_from_context())
def test_copied_path_exists_and_is_not_ignored(path: str) -> None:
    kept = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()

    assert (ROOT / path).exists()
    assert f"!{path}" in kept


def test_copied_packages_are_all_that_the_project_installs() -> None:
    installed = {path.parent.name for path in ROOT.glob("*/py.typed")}

    assert installed <= set(copied_from_context())


STAGES = {name: DOCKERFILE.split(f" AS {name}\n")[1].split("\nFROM ")[0] for name in TARGETS}


def test_each_stage_copies_from_one_before_it() -> None:
    for position, (name, stage) in enumerate(STAGES.items()):
        sources = re.findall(r"^COPY --from=(\S+)", stage, re.M)
        assert set(sources) <= set(TARGETS[:position]), name


def test_last_stage_is_the_controller_and_no_image_runs_as_root() -> None:
    started = [image for image in STAGES.values() if "\nENTRYPOINT" in image]
    assert TARGETS[-1] == "controller"
    assert len(started) == 3
    assert all("\nUSER 10001\n" in image for image in started)


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_writes_to_its_volumes_alone_and_gains_no_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True


def test_command_line_of_the_compactor_is_valid() -> None:
    words = list(SERVICES["compactor"]["command"])
    command: click.Command | None = cli
    with contextlib.ExitStack() as contexts:
        context = None
        while isinstance(command, click.Group):
            context = contexts.enter_context(command.make_context("", list(words), context))
            command = command.get_command(context, words.pop(0))
        assert command is not None
        command.make_context("", list(words), parent=context)


IMAGE_ENVIRONMENT = dict(
    line.split("=") for line in re.findall(r"STREAMMETA_CONTROLLER_HTTP_\S+", DOCKERFILE)
)


@pytest.mark.parametrize(("status", "exit_code"), [(200, 0), (503, 1)])
async def test_health_check_asks_the_listener_that_the_image_opens(
    status: int, exit_code: int
) -> None:
    (health_check,) = re.findall(r'CMD (\["python", .*readyz.*\])', DOCKERFILE)
    _, *options, program = json.loads(health_check)
    assert IMAGE_ENVIRONMENT["STREAMMETA_CONTROLLER_HTTP_PLAIN_TEXT"] == "true"
    at = IMAGE_ENVIRONMENT["STREAMMETA_CONTROLLER_HTTP_LISTEN"]
    host, opened = at.split(":")
    asked = f"('{host}', {opened})"
    assert asked in program

    async def readyz(_: object) -> Page:
        return Page(b"", status)

    pages = {"/readyz": Route("readyz", readyz)}
    served = HttpPlane(ListenerTls(), Authenticator("test", rules=HTTP_RULES), pages)
    port = await served.start("127.0.0.1:0")
    try:
        program = program.replace(asked, f"('127.0.0.1', {port})")
        done = await asyncio.to_thread(run, tool("python"), *options, program)
    finally:
        await served.stop()
    assert done.returncode == exit_code


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give what the volume of certificates holds after a start, and after another."""
    folder = tmp_path_factory.mktemp("certificates")
    (script,) = (
        volume for volume in SERVICES["certificates"]["volumes"] if volume.startswith("./")
    )
    for _ in range(2):
        done = run("sh", DOCKER / script.split(":")[0], folder, PATH=f"{BIN}:{os.environ['PATH']}")
        assert done.returncode == 0, done.stderr
    return folder


def test_everything_that_is_mentioned_of_the_certificates_is_made(certificates: Path) -> None:
    named = set(re.findall(r"/etc/streammeta/(\S+)", (DOCKER / "compose.yaml").read_text()))
    assert len(named) > 10
    assert all((certificates / name).is_file() for name in named)


@pytest.mark.parametrize("name", CONTROLLERS)
def test_controller_formats_once_and_accepts_its_configuration(
    name: str, tmp_path: Path, certificates: Path
) -> None:
    """The entrypoint as it is, but for the places of files and bucket; ends after the check."""
    service = SERVICES[name]
    S3Config.from_uri(service["environment"]["STREAMMETA_CONTROLLER_STORE"])
    shell, flags, script = service["entrypoint"]
    settings = {
        **IMAGE_ENVIRONMENT,
        **{
            name: value.replace("/etc/streammeta", str(certificates))
            for name, value in service["environment"].items()
        },
        "STREAMMETA_STORAGE_FORMAT_DATA_DIR": str(tmp_path / "data"),
        "STREAMMETA_CONTROLLER_DATA_DIR": str(tmp_path / "data"),
        "STREAMMETA_CONTROLLER_STORE": f"file://{tmp_path}",
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }

    first = run(shell, flags, f"{script} --check-config", **settings)
    identity = (tmp_path / "data" / "meta.json").read_bytes()
    assert first.returncode == 0, first.stderr
    if name == CONTROLLERS[0]:
        second = run(shell, flags, f"{script} --check-config", **settings)
        assert second.returncode == 0, second.stderr
        assert (tmp_path / "data" / "meta.json").read_bytes() == identity


def test_voters_are_the_controllers_of_the_file() -> None:
    ports = re.search(r"EXPOSE (9\d+) (9\d+)", DOCKERFILE)
    assert ports is not None
    wanted = {f"{name.partition('-')[2]}@{name}:{ports[2]}" for name in CONTROLLERS}

    assert len(CONTROLLERS) == 3
    for name in CONTROLLERS:
        settings, node_id = SERVICES[name]["environment"], name.partition("-")[2]
        assert set(settings["STREAMMETA_STORAGE_FORMAT_VOTERS"].split(",")) == wanted
        assert settings["STREAMMETA_STORAGE_FORMAT_NODE_ID"] == node_id
        assert settings["STREAMMETA_CONTROLLER_NODE_ID"] == node_id
        assert f"{node_id}@{settings['STREAMMETA_CONTROLLER_PEER_ADVERTISE']}" in wanted
        assert settings["STREAMMETA_CONTROLLER_PEER_LISTEN"].endswith(f":{ports[2]}")
        assert settings["STREAMMETA_CONTROLLER_ADVERTISE"] == f"{name}:{ports[1]}"
        assert settings["STREAMMETA_CONTROLLER_LISTEN"].endswith(f":{ports[1]}")
        for option in ("CLUSTER_ID", "DATA_DIR"):
            formatted = settings[f"STREAMMETA_STORAGE_FORMAT_{option}"]
            assert formatted == settings[f"STREAMMETA_CONTROLLER_{option}"]


def test_every_service_builds_a_target_or_runs_an_image_that_another_builds() -> None:
    built = {service["image"] for service in SERVICES.values() if "build" in service}

    for name, service in SERVICES.items():
        assert service["image"] in built, name
        if "build" in service:
            assert service["build"]["target"] in TARGETS, name


def test_every_controller_has_a_volume_of_its_own() -> None:
    mounts = [SERVICES[name]["volumes"][0] for name in CONTROLLERS]

    assert len(set(mounts)) == len(CONTROLLERS)
    for mount in mounts:
        volume, _, path = mount.partition(":")
        assert volume in COMPOSE["volumes"]
        assert path == "/var/lib/streammeta"


def test_status_pages_are_published_on_loopback_alone_by_a_listener_that_shows_them() -> None:
    published = [SERVICES[name]["ports"] for name in CONTROLLERS]
    assert len({port for (port,) in published}) == len(CONTROLLERS)
    readme = (DOCKER / "README.md").read_text()
    for name, (port,) in zip(CONTROLLERS, published, strict=True):
        host, outside, inside = port.split(":")
        assert host == "127.0.0.1"
        assert f"<http://{host}:{outside}/>" in readme
        settings = SERVICES[name]["environment"]
        assert settings["STREAMMETA_CONTROLLER_HTTP_LISTEN"] == f"0.0.0.0:{inside}"
        assert settings["STREAMMETA_CONTROLLER_HTTP_PLAIN_TEXT_PAGES"] == "true"
    others = {name for name, service in SERVICES.items() if "ports" in service}
    assert others == set(CONTROLLERS)


@pytest.mark.process
def test_broker_example_writes_and_reads_back(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        at = ("--connect", cluster.connect, "--store", cluster.store_uri)
        result = run(sys.executable, "docker/broker_example.py", *at)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("committed 100 records") == 3
    assert result.stdout.count("read 100 records") == 3
    assert result.stdout.count("read 100 records") == 3
