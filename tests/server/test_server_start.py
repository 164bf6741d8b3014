"""What stops a controller from starting is said in words that help, and nothing is touched."""

import http.server
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from streammeta.cli.local.local_cluster import ChildFailedError
from tests.kit.real_cluster import controller_command, format_data, start_python
from tests.storage.s3_servers import running_ministack

pytestmark = pytest.mark.process


def refusal(root: Path, **options: str) -> str:
    """Start a controller that can't start; return what it says."""
    child = start_python("refused", controller_command(root, **options), root)
    with pytest.raises(ChildFailedError):
        child.wait_ready()
    assert child.process.returncode in (1, 2)
    return child.log_tail()


def contents(root: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


@pytest.mark.parametrize("option", ["listen", "peer_listen"])
def test_a_port_in_use(tmp_path: Path, option: str) -> None:
    format_data(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refusal(tmp_path, **{option: where})
    assert where in said
    assert f"Choose another with --{option.replace('_', '-')}" in said


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"node_id": "2"}, "belongs to node 1, this controller is node 2"),
        ({"cluster_id": "other"}, "belongs to cluster 'test', this controller to 'other'"),
    ],
)
def test_a_data_directory_of_another(tmp_path: Path, options: dict[str, str], names: str) -> None:
    format_data(tmp_path)
    before = contents(tmp_path / "data")
    assert names in refusal(tmp_path, **options)
    assert contents(tmp_path / "data") == before


@pytest.mark.parametrize("is_there", [True, False])
def test_a_directory_that_is_not_formatted(tmp_path: Path, is_there: bool) -> None:
    data = tmp_path / "data"
    if is_there:
        data.mkdir()

    said = refusal(tmp_path)

    assert str(data) in said
    assert "streammeta storage format" in said
    assert "Traceback" not in said
    assert not any(data.iterdir()) if is_there else not data.exists()


def test_a_directory_with_files_that_are_not_ours(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "letter.txt").write_text("dear reader")

    said = refusal(tmp_path)

    assert str(data) in said
    assert [path.name for path in data.iterdir()] == ["letter.txt"]


def test_a_missing_bucket_directory(tmp_path: Path) -> None:
    assert f"{tmp_path}/absent" in refusal(tmp_path, store=f"file://{tmp_path}/absent")


@pytest.mark.s3
def test_a_missing_bucket(tmp_path: Path) -> None:
    with running_ministack() as endpoint:
        said = refusal(tmp_path, store=endpoint.uri("absent"))

    assert "absent" in said
    assert "create it" in said


def test_an_endpoint_that_refuses_connections(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        store = f"s3://bucket?endpoint={endpoint}&pathStyle=true&accessKey=a&secretKey=b"
        assert endpoint in refusal(tmp_path, store=store)


@pytest.fixture
def forbidding_s3() -> Iterator[str]:
    """An S3 endpoint that knows nobody's secret."""

    class Forbid(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(403)
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forbid)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_wrong_credentials(tmp_path: Path, forbidding_s3: str) -> None:
    store = f"s3://bucket?endpoint={forbidding_s3}&pathStyle=true&accessKey=a&secretKey=unguessed"

    said = refusal(tmp_path, store=store)

    assert "credentials" in said or "AWS_ACCESS_KEY_ID" in said
    assert "unguessed" not in said


@pytest.mark.parametrize(
    ("option", "value", "names"),
    [
        ("seeds", "1@nowhere", "seeds"),
        ("peer_override", "1@nowhere", "peer-override"),
        ("advertise", "0.0.0.0:9090", "advertise"),
        ("listen", "0.0.0.0:9090", "advertise"),
        ("peer_advertise", "0.0.0.0:9090", "peer-advertise"),
        ("peer_listen", "0.0.0.0:9090", "peer-advertise"),
        ("cluster_id", "a/b", "cluster-id"),
        ("store", "ftp://x", "ftp"),
    ],
)
def test_an_option_that_cannot_work(tmp_path: Path, option: str, value: str, names: str) -> None:
    said = refusal(tmp_path, **{option: value})

    assert names in said
    assert "Traceback" not in said
    assert not (tmp_path / "data").exists()


# -- --check-config


class Checked(NamedTuple):
    """What a command said, and how it ended."""

    returncode: int
    stdout: str
    stderr: str


def checked(root: Path, **options: str) -> Checked:
    with tempfile.TemporaryDirectory() as elsewhere:
        command = [*controller_command(root, **options), "--check-config"]
        child = start_python("checked", command, Path(elsewhere))
        assert child.process.stdout is not None
        with child.process.stdout as output:
            said = output.read()
        return Checked(child.process.wait(60), said, child.log_path.read_text())


def test_a_configuration_that_works_is_valid_and_nothing_is_changed(tmp_path: Path) -> None:
    format_data(tmp_path)
    (tmp_path / "bucket").mkdir()
    before = contents(tmp_path)

    done = checked(tmp_path)

    assert (done.returncode, done.stdout) == (0, "the configuration is valid\n")
    assert contents(tmp_path) == before


def test_a_check_makes_no_audit_log(tmp_path: Path) -> None:
    format_data(tmp_path)
    (tmp_path / "bucket").mkdir()
    before = contents(tmp_path)

    assert checked(tmp_path, audit_log=str(tmp_path / "logs" / "audit.log")).returncode == 0
    assert contents(tmp_path) == before


def test_a_controller_that_runs_can_be_checked(tmp_path: Path) -> None:
    format_data(tmp_path)
    child = start_python("served", controller_command(tmp_path), tmp_path)
    child.wait_ready()
    done = checked(tmp_path)
    assert child.stop() == 0

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"store": "file:///absent/bucket"}, "/absent/bucket"),
        ({"data_dir": "/absent/data"}, "/absent/data is not formatted"),
        ({"node_id": "2"}, "belongs to node 1, this controller is node 2"),
        ({"cluster_id": "other"}, "belongs to cluster 'test', this controller to 'other'"),
        ({"audit_log": "/dev/null/audit"}, "audit-log: /dev/null/audit can't be opened"),
        ({"audit_log": "/"}, "'/' is a directory"),
        ({"policy": "/absent/policy"}, "/absent/policy"),
        ({"tls_ca": "/absent/ca"}, "tls-c"),
        ({"backup_store": "file:///absent/backups"}, "/absent/backups"),
    ],
)
def test_a_check_finds_what_would_stop_a_start(
    tmp_path: Path, options: dict[str, str], names: str
) -> None:
    format_data(tmp_path)
    (tmp_path / "bucket").mkdir()
    before = contents(tmp_path)

    done = checked(tmp_path, **options)

    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert names in done.stderr
    assert "Traceback" not in done.stderr
    assert contents(tmp_path) == before
