"""YAML files of the tests, read by libyaml: the parser in Python is ten times slower."""

from typing import Any

import yaml


def load_yaml(text: str) -> Any:
    """Return the one document of a text."""
    return yaml.load(text, Loader=yaml.CSafeLoader)
