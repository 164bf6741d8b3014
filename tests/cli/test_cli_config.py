"""Settings of a controller from options, environment and file: precedence, and what is refused."""

from pathlib import Path
from typing import Any

import click
import pytest

from streammeta.cli.controller.controller_command import controller
from streammeta.cli.framework.config_file import settings
from streammeta.cli.framework.output import run_cli
from streammeta.cli.root import cli
from tests.kit.real_cluster import controller_command, format_data, streammeta

NEEDED = {
    "node-id": 1,
    "cluster-id": "demo",
    "listen": "127.0.0.1:9091",
    "data-dir": "data",
    "store": "file:///bucket",
}


def another(key: str, option: click.Option, number: int) -> Any:
    """Return the `number`-th of three values that an option takes."""
    if option.is_flag:
        return True
    if isinstance(option.type, click.Choice):
        return option.type.choices[number]
    return 100 + number if option.type is click.INT else f"{key}-{number}"


def written(path: Path, values: dict[str, Any]) -> Path:
    """Write settings as TOML."""
    lines = (
        f"{key} = {str(value).lower() if isinstance(value, bool | int) else repr(value)}"
        for key, value in values.items()
    )
    path.write_text("\n".join(lines) + "\n")
    return path


def shown(*words: str) -> dict[str, tuple[str, str]]:
    """Return value and origin of each setting."""
    answer = streammeta("config", "show", *words)
    assert answer["exit_code"] == 0, answer
    return {row["setting"]: (row["value"], row["origin"]) for row in answer["settings"]}


@pytest.mark.parametrize("key", settings(controller))
def test_a_setting_is_taken_from_the_option_then_the_environment_then_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    option = settings(controller)[key]
    by_file, by_variable, by_option = (another(key, option, number) for number in range(3))
    file = str(written(tmp_path / "c.toml", {**NEEDED, key: by_file}))
    assert shown("--config", file)[key] == (str(by_file), "file")

    variable = option.envvar or f"STREAMMETA_CONTROLLER_{key.replace('-', '_').upper()}"
    monkeypatch.setenv(str(variable), str(by_variable))
    assert shown("--config", file)[key] == (str(by_variable), "environment")

    words = (f"--{key}",) if option.is_flag else (f"--{key}", str(by_option))
    assert shown("--config", file, *words)[key] == (str(by_option), "option")


def test_what_nobody_sets_is_the_default(tmp_path: Path) -> None:
    found = shown("--config", str(written(tmp_path / "c.toml", NEEDED)))
    assert {key for key, (_, origin) in found.items() if origin == "file"} == set(NEEDED)
    assert found["election-timeout-ms"] == ("1000", "default")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("noda-id = 1", "noda-id: no such setting. Did you mean node-id?"),
        ("zzz = 1", "zzz: no such setting. Known are advertise, "),
        ("node_id = 1", "node_id: no such setting. Did you mean node-id?"),
        ("check-config = true", "check-config: no such setting"),
        ('node-id = "1"', "node-id: '1', must be a whole number"),
        ("node-id = true", "node-id: True, must be a whole number"),
        ("listen = 9091", "listen: 9091, must be a text in quotes"),
        ("reflection = 1", "reflection: 1, must be true or false"),
        ("seeds = [1]", "seeds: [1], must be a text in quotes"),
        ("listen =", "must be TOML"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    answer = streammeta("config", "show", "--config", str(file))
    assert (answer["exit_code"], answer["error"]["code"]) == (2, "USAGE")
    assert told in answer["error"]["message"]
    assert str(file) in answer["error"]["message"]


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    answer = streammeta("config", "show", "--config", str(tmp_path / "none.toml"))
    assert answer["exit_code"] == 2
    assert "none.toml: No such file or directory" in answer["error"]["message"]


def test_lists_are_what_commas_divide_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    written(file, NEEDED)
    with file.open("a") as more:
        more.write('seeds = ["1@127.0.0.1:1", "2@127.0.0.1:2"]\n')
    assert shown("--config", str(file))["seeds"][0] == "1@127.0.0.1:1,2@127.0.0.1:2"


def test_secrets_of_the_store_are_not_shown(tmp_path: Path) -> None:
    store = "s3://bucket?endpoint=http://127.0.0.1:1&secretKey=hidden"
    found = shown("--config", str(written(tmp_path / "c.toml", {**NEEDED, "store": store})))
    assert found["store"] == ("s3://bucket?endpoint=http://127.0.0.1:1", "file")


def test_a_controller_can_be_run_from_a_file_alone(tmp_path: Path) -> None:
    format_data(tmp_path)
    words = controller_command(tmp_path)
    pairs = zip(words[3::2], words[4::2], strict=True)
    values: dict[str, Any] = {name.lstrip("-"): value for name, value in pairs}
    file = written(tmp_path / "c.toml", values | {"node-id": int(values["node-id"])})
    assert run_cli(cli, ["controller", "--config", str(file), "--check-config"]) == 0
