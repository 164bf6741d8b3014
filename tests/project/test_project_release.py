"""A release: what is built of a commit, what stands in its way, and manual pages that read well."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from scripts.lib.man_pages import pages
from scripts.lib.wheelhouse import ROOT
from streammeta.cli.root import cli
from tests.kit.tools import needs, path_of

pytestmark = pytest.mark.timeout(1200)

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
_GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")


def git(place: Path, *words: str) -> str:
    done = subprocess.run([*_GIT, *words], cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of its own with the files of this tree, in one commit."""
    place = tmp_path_factory.mktemp("release") / "tree"
    listed = git(ROOT, "ls-files", "-co", "--exclude-standard").splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    (place / ".venv").symlink_to(ROOT / ".venv")
    git(place, "init", "-q")
    (place / ".git" / "info" / "exclude").write_text(".venv\n")
    git(place, "add", "-A")
    git(place, "commit", "-qm", "Everything")
    return place


HAS_JAVA = (
    subprocess.run([ROOT / "scripts/java", "--check"], capture_output=True, check=False).returncode
    == 0
)
PARTS = () if HAS_JAVA else ("--without-java",)
needs_java = pytest.mark.skipif(not HAS_JAVA, reason="there is no JDK or no Maven")


def release(checkout: Path, *words: str, **environment: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [ROOT / ".venv" / "bin" / "python", "scripts/release", "--format", "json", *words],
        cwd=checkout,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def built(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    code, answer = release(checkout, "--trial", *PARTS, str(folder))
    assert code == 0, answer
    sums = (folder / "SHA256SUMS").read_text().split()
    assert dict(zip(sums[1::2], sums[::2], strict=True)) == answer["files"]
    return folder


def test_the_wheel_installs_a_manual_page_for_every_command(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    found = {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if "/man1/" in name}
    assert {"streammeta.1", "streammeta-dev.1", "streammeta-s3-check.1"} <= found
    assert found == pages("1.0", "2026-01-01").keys()


def test_the_source_distribution_holds_the_product_and_can_be_built(built: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
        settings = files.extractfile(
            next(n for n in files.getnames() if n.endswith("pyproject.toml"))
        )
        assert settings is not None
        assert b"shared-data" not in settings.read(), "what it names is not in there"
    assert {"pyproject.toml", "LICENSE", "commands/streammeta/cli/root.py"} <= names


def bill_of(built: Path, product: str) -> dict[str, Any]:
    (file,) = (
        path for path in built.glob("*.cdx.json") if path.name.startswith(f"{product}-{VERSION}")
    )
    bill: dict[str, Any] = json.loads(file.read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    return bill


def test_the_bill_names_every_package_that_users_install(built: Path) -> None:
    bill = bill_of(built, "streammeta")
    refs = {component["bom-ref"] for component in bill["components"]}
    assert {"grpcio", "numpy", "boto3", "botocore", "pyarrow", "prompt-toolkit", "pyspark"} <= refs
    assert refs.isdisjoint({"pytest", "mypy", "ruff"})
    known = refs | {"streammeta"}
    for entry in bill["dependencies"]:
        assert {entry["ref"], *entry["dependsOn"]} <= known
    assert all(component["version"] in component["purl"] for component in bill["components"])


def sums_of(folder: Path) -> set[str]:
    return set((folder / "SHA256SUMS").read_text().splitlines())


def test_the_same_commit_gives_the_same_files_with_or_without_a_jdk(
    checkout: Path, built: Path, tmp_path: Path
) -> None:
    words = ("--trial", "--without-java", str(tmp_path))
    code, answer = release(checkout, *words, JAVA_HOME="/nonexistent")
    assert code == 0, answer
    assert sums_of(tmp_path) <= sums_of(built)
    of_java = [line.split()[1] for line in sums_of(built) - sums_of(tmp_path)]
    assert all(name.endswith((".jar", ".nar")) or "-java-" in name for name in of_java), of_java


@needs_java
@pytest.mark.slow
def test_the_same_commit_gives_the_same_jars(checkout: Path, built: Path, tmp_path: Path) -> None:
    code, answer = release(checkout, "--trial", str(tmp_path))
    assert code == 0, answer
    assert sums_of(tmp_path) == sums_of(built)


@needs_java
def test_a_release_has_the_jars_of_clients_and_plug_ins_and_their_sources(built: Path) -> None:
    archives = {path.name for path in (*built.glob("*.jar"), *built.glob("*.nar"))}
    modules = ("client", "store", "kafka-tiered", "rocketmq-tiered", "automq")
    expected = {f"streammeta-{module}-{VERSION}.jar" for module in modules}
    expected.add(f"streammeta-pulsar-offloader-{VERSION}.nar")
    sources = {f"{Path(name).stem}-sources.jar" for name in expected}
    assert archives == expected | sources

    with zipfile.ZipFile(built / f"streammeta-kafka-tiered-{VERSION}.jar") as jar:
        manifest = jar.read("META-INF/MANIFEST.MF").decode()
        assert f"Implementation-Version: {VERSION}\r\n" in manifest
        assert {
            "io/streammeta/kafka/StreammetaRemoteStorageManager.class",
            "io/streammeta/client/StreammetaClient.class",
        } <= set(jar.namelist())
    with zipfile.ZipFile(built / f"streammeta-pulsar-offloader-{VERSION}.nar") as nar:
        bundled = "META-INF/bundled-dependencies/streammeta-"
        names = [name for name in nar.namelist() if name.startswith(bundled)]
        assert names == [f"{bundled}{part}-{VERSION}.jar" for part in ("client", "store")]


@needs_java
def test_the_bill_of_the_jars_names_what_is_in_them(built: Path) -> None:
    names = {component["name"] for component in bill_of(built, "streammeta-java")["components"]}
    assert {"streammeta-client", "grpc-netty", "protobuf-java", "guava", "s3"} <= names
    assert names.isdisjoint({"junit-jupiter", "streammeta-testkit", "kafka_2.13", "pulsar-broker"})


@needs_java
def test_a_release_without_a_jdk_needs_the_word_that_leaves_out_the_jars(
    checkout: Path, tmp_path: Path
) -> None:
    code, answer = release(checkout, "--trial", str(tmp_path), JAVA_HOME="/nonexistent")
    assert code == 1
    assert "--without-java" in answer["error"]["message"]
    assert not any(tmp_path.iterdir())


def test_the_source_of_the_go_client_is_a_module(built: Path) -> None:
    with zipfile.ZipFile(built / f"streammeta-go-{VERSION}.zip") as archive:
        names = archive.namelist()
    root = f"streammeta.io/go@v{VERSION}/"
    assert all(name.startswith(root) for name in names)
    assert {root + name for name in ("LICENSE", "go.mod", "client.go", "v1/kv.pb.go")} <= set(names)


@pytest.fixture
def undone(checkout: Path) -> Iterator[Path]:
    """The checkout, for a change; it is as before afterwards."""
    before = git(checkout, "rev-parse", "HEAD").strip()
    yield checkout
    git(checkout, "reset", "-q", "--hard", before)
    git(checkout, "clean", "-qfd")
    for tag in git(checkout, "tag").split():
        git(checkout, "tag", "-d", tag)


def refusal(checkout: Path, folder: Path) -> str:
    code, answer = release(checkout, *PARTS, str(folder))
    assert (code, answer["ok"]) == (1, False)
    assert not any(folder.iterdir())
    message: str = answer["error"]["message"]
    return message


def test_a_release_wants_a_commit_a_dated_changelog_and_a_tag(undone: Path, tmp_path: Path) -> None:
    changelog = undone / "CHANGELOG.md"
    assert "(YYYY-MM-DD)" in refusal(undone, tmp_path)
    changelog.write_text(changelog.read_text().replace("(unreleased)", "(2026-12-01)", 1))
    assert "CHANGELOG.md" in refusal(undone, tmp_path)
    git(undone, "commit", "-qam", "Dated")
    assert "tags none" in refusal(undone, tmp_path)
    git(undone, "tag", "v0.0.1")
    assert "tags v0.0.1" in refusal(undone, tmp_path)


def test_a_folder_with_files_is_left_as_it_is(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    code, answer = release(checkout, "--trial", str(tmp_path))
    assert code == 1
    assert "not empty" in answer["error"]["message"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def options(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Yield the page's name and the first form of each visible option, with subcommands."""
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            yield f"{context.command_path.replace(' ', '-')}.1", parameter.opts[0]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from options(inner, click.Context(inner, info_name=name, parent=context))


def test_every_option_is_in_the_page_of_its_command() -> None:
    texts = pages("1.0", "2026-01-01")
    for page, option in options(cli, click.Context(cli, info_name="streammeta")):
        assert option in texts[page].replace(r"\-", "-"), (page, option)


@needs("groff")
def test_the_formatter_has_no_warning_for_any_page() -> None:
    for name, text in pages("1.0", "2026-01-01").items():
        done = subprocess.run(
            [path_of("groff"), "-man", "-ww", "-Tutf8"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), name
