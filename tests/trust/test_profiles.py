"""Profiles: their file, what counts before what, and the commands that connect by them."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import click
import pytest

import streammeta.cli.root
import streammeta.reconcile
from streammeta.cli.framework.connecting import Connection, Endpoints, resolve
from streammeta.cli.framework.output import run_cli
from streammeta.cli.framework.profiles import ProfileError, profiles_path, read_profiles
from streammeta.cli.root import cli
from streammeta.tls.files import TlsError, TlsFiles, TokenFiles
from tests.kit.certificates import Authority

NOTHING: Mapping[str, Path | None] = {"tls_ca": None, "tls_cert": None, "tls_key": None}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the place of the file of profiles, in a folder of the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = profiles_path()
    assert path == tmp_path / "streammeta" / "profiles.toml"
    path.parent.mkdir()
    return path


def written(tls: TlsFiles, endpoints: str = '"one:1"') -> str:
    return (
        f"[profiles.one]\nendpoints = [{endpoints}]\n"
        f'tls_ca = "{tls.ca}"\ntls_cert = "{tls.certificate}"\ntls_key = "{tls.key}"\n'
    )


@pytest.mark.parametrize("base", ["", "relative"])
def test_without_a_valid_folder_of_settings_the_file_is_in_the_users_own(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", base)
    assert profiles_path() == Path.home() / ".config" / "streammeta" / "profiles.toml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[profiles", "not TOML"),
        ("profile = 1", "profile: unknown, must be one of default, profiles"),
        ("profiles = 1", "profiles: must be tables [profiles.NAME]"),
        ("[profiles]\none = 1", "profile 'one': must be a table [profiles.one]"),
        ("[profiles.one]\nendpoint = []", "profile 'one': endpoint: unknown, must be one of"),
        (
            '[profiles.one]\nendpoints = "one:1"',
            "profile 'one': endpoints: 'one:1', must be a list",
        ),
        (
            '[profiles.one]\nendpoints = ["one"]',
            "profile 'one': endpoints: 'one', must be HOST:PORT",
        ),
        ("[profiles.one]\ntls_ca = 1", "profile 'one': tls_ca: 1, must be the path of a file"),
        ('[profiles.one]\ntls_ca = "x"', "profile 'one': tls_cert: missing; set tls_ca, "),
        (
            '[profiles.one]\ntoken_file = "x"',
            "profile 'one': tls_ca: missing; set tls_ca, token_file, or none",
        ),
        (
            '[profiles.one]\ntls_ca = "x"\ntls_cert = "x"\ntoken_file = "x"',
            "profile 'one': token_file: replaces tls_cert and tls_key. Use one of both",
        ),
        ("[profiles.none]", "profile 'none': means no profile. Choose another name"),
        ('default = "two"\n[profiles.one]', "default: 'two', must be one of: one"),
    ],
)
def test_a_file_that_is_of_no_use_is_named_with_profile_and_key(
    file: Path, text: str, said: str
) -> None:
    file.write_text(text)
    with pytest.raises(ProfileError) as caught:
        read_profiles(file)
    assert str(caught.value).startswith(f"{file}: {said}")


def test_the_default_profile_counts_unless_another_or_none_is_named(file: Path) -> None:
    file.write_text(
        'default = "one"\n[profiles.one]\nendpoints = ["one:1"]\n'
        '[profiles.two]\nendpoints = ["two:2", "two:3"]\n'
    )
    assert resolve(None, NOTHING, None) == Connection(("one:1",), None)
    assert resolve(None, NOTHING, "two") == Connection(("two:2", "two:3"), None)
    assert resolve(("x:1",), NOTHING, "two") == Connection(("x:1",), None)
    assert resolve(None, NOTHING, "none", Endpoints.OPTIONAL) == Connection(None, None)
    assert resolve(None, NOTHING, None, Endpoints.KNOWN) == Connection(None, None)
    assert resolve(None, NOTHING, "two", Endpoints.KNOWN).endpoints == ("two:2", "two:3")
    assert resolve(None, NOTHING, None, Endpoints.ONE).endpoints == ("one:1",)
    with pytest.raises(click.UsageError, match="two:2,two:3"):
        resolve(None, NOTHING, "two", Endpoints.ONE)
    with pytest.raises(click.UsageError, match="endpoint"):
        resolve(None, NOTHING, "none")
    with pytest.raises(ProfileError, match="'three'"):
        resolve(None, NOTHING, "three")


def test_a_profile_that_is_named_needs_a_file(file: Path) -> None:
    with pytest.raises(ProfileError, match=r"profiles.toml.*'one'"):
        resolve(("x:1",), NOTHING, "one")


def test_files_are_those_given_and_the_rest_the_profiles(
    file: Path, authority: Authority, stranger: Authority
) -> None:
    ours, another = authority.issue("admin/alice"), authority.issue("reader/bob")
    file.write_text(written(ours))
    assert resolve(None, NOTHING, "one") == Connection(("one:1",), ours)
    mixed = {**NOTHING, "tls_cert": another.certificate, "tls_key": another.key}
    assert resolve(None, mixed, "one").tls == another
    with pytest.raises(TlsError, match=r"^tls-key"):
        resolve(("x:1",), {**NOTHING, "tls_ca": ours.ca, "tls_cert": ours.certificate}, None)
    with pytest.raises(ProfileError, match=f"{file}.*'one'.*tls_cert"):
        resolve(None, {**NOTHING, "tls_key": another.key}, "one")
    with pytest.raises(TlsError, match=r"^tls-cert: "):
        resolve(None, {**NOTHING, "tls_cert": stranger.issue("admin/eve").certificate}, "one")


def test_paths_are_relative_to_the_file(file: Path, authority: Authority) -> None:
    tls = authority.issue("admin/alice")
    for path, name in ((tls.ca, "ca.pem"), (tls.certificate, "a.pem"), (tls.key, "a.key")):
        (file.parent / name).symlink_to(path)
    file.write_text('[profiles.one]\ntls_ca = "ca.pem"\ntls_cert = "a.pem"\ntls_key = "a.key"\n')
    found = resolve(("x:1",), NOTHING, "one").tls
    assert isinstance(found, TlsFiles)
    assert found.key == file.parent / "a.key"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("a.b.c")
    return path


def test_a_token_stands_in_place_of_a_certificate(
    file: Path, authority: Authority, token: Path
) -> None:
    tls = authority.issue("admin/alice")
    by_token = TokenFiles(tls.ca, token)
    given: Mapping[str, Path | None] = {**NOTHING, "token_file": token}
    file.write_text(written(tls))
    assert resolve(None, given, "one").tls == by_token, "given, before the profile's certificate"
    assert resolve(None, {**given, "tls_ca": tls.ca}, None, Endpoints.OPTIONAL).tls == by_token
    file.write_text(
        f'[profiles.one]\nendpoints = ["one:1"]\ntls_ca = "{tls.ca}"\ntoken_file = "{token}"\n'
    )
    assert resolve(None, NOTHING, "one").tls == by_token
    pair = {"tls_cert": tls.certificate, "tls_key": tls.key}
    assert resolve(("x:1",), {**NOTHING, **pair}, "one").tls == tls, (
        "given, before the profile's token"
    )


def test_a_token_that_is_of_no_use_is_told(file: Path, authority: Authority, token: Path) -> None:
    tls = authority.issue("admin/alice")
    given: Mapping[str, Path | None] = {**NOTHING, "token_file": token}
    for more, why in (
        ({"tls_cert": tls.certificate}, "token-file: replaces --tls-cert and --tls-key"),
        ({}, "tls-ca: missing; a token is only sent over TLS"),
    ):
        with pytest.raises(TlsError, match=why):
            resolve(("x:1",), {**given, **more}, None)
    token.chmod(0o644)
    file.write_text(f'[profiles.one]\ntls_ca = "{tls.ca}"\ntoken_file = "{token}"\n')
    with pytest.raises(ProfileError, match=r"'one'.*token_file.*0644"):
        resolve(("x:1",), NOTHING, "one")


def test_a_profile_with_a_token_is_shown(
    file: Path, authority: Authority, token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ca = authority.ca
    file.write_text(f'[profiles.one]\ntls_ca = "{ca}"\ntoken_file = "{token}"\n')
    assert run_cli(cli, ["profile", "show", "one", "--format", "json"]) == 0
    said = capsys.readouterr().out
    assert json.loads(said)["token_file"] == str(token)
    assert "a.b.c" not in said
    token.unlink()
    assert run_cli(cli, ["profile", "show", "one"]) == 1
    assert "token-file: can't read" in capsys.readouterr().err


def test_an_option_counts_before_its_variable_and_that_before_the_profile(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked(*words: str) -> str:
        assert run_cli(cli, ["quorum", "describe", *words, "--format", "json"]) == 1
        message: str = json.loads(capsys.readouterr().out)["error"]["message"]
        return message.split()[4].rstrip(":")

    file.write_text('default = "one"\n[profiles.one]\nendpoints = ["127.0.0.1:1"]\n')
    assert asked() == "127.0.0.1:1"
    monkeypatch.setenv("STREAMMETA_CONNECT", "127.0.0.1:2")
    assert asked() == "127.0.0.1:2"
    assert asked("--connect", "127.0.0.1:3") == "127.0.0.1:3"


def test_a_profile_is_shown_with_whom_its_certificate_names(
    file: Path, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    tls = authority.issue("admin/alice")
    file.write_text(f'default = "one"\n{written(tls)}[profiles.two]\n')
    assert run_cli(cli, ["profile", "list", "--format", "json"]) == 0
    one, two = json.loads(capsys.readouterr().out)["profiles"]
    assert (one["name"], one["default"], one["endpoints"], one["tls"]) == (
        "one",
        True,
        "one:1",
        True,
    )
    assert (two["name"], two["default"], two["endpoints"], two["tls"]) == (
        "two",
        False,
        None,
        False,
    )
    assert run_cli(cli, ["profile", "show", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["identity"] == "streammeta://test/admin/alice"
    file.write_text(written(TlsFiles(tls.ca, tls.certificate, authority.files.key)))
    assert run_cli(cli, ["profile", "show", "one", "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "PROFILE"
    assert run_cli(cli, ["profile", "show"]) == 1


def leaves(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    with click.Context(group) as context:
        names = group.list_commands(context)
        for name in names:
            command = group.get_command(context, name)
            assert command is not None
            if isinstance(command, click.Group):
                yield from leaves(command, *path, name)
            else:
                yield (*path, name), command


CONNECTING = {"connect", "tls_ca", "tls_cert", "tls_key", "profile"}


def test_every_command_that_takes_endpoints_takes_files_for_tls_and_a_profile() -> None:
    names = {path: {param.name for param in command.params} for path, command in leaves(cli)}
    connecting = {path for path, options in names.items() if "connect" in options}
    assert {("health",), ("shell",), ("cluster", "hash"), ("reconcile", "apply")} <= connecting
    assert len(connecting) > 15
    for path in connecting:
        assert names[path] >= CONNECTING, path


CONNECTS = ("operator_channel", "client_channel", "ControllerClient", "LeaderClient")


@pytest.mark.parametrize("module", [streammeta.cli.root, streammeta.reconcile])
def test_no_command_connects_without_a_word_on_tls(module: ModuleType) -> None:
    folder = Path(str(module.__file__)).parent
    calls = [
        (path.name, ast.unparse(node))
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CONNECTS
    ]
    assert len(calls) > 2
    assert not [call for call in calls if "tls" not in call[1]]
