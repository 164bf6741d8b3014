"""Bill of materials of a release, as CycloneDX 1.6: what the product needs, in which versions.

Goes from the product through the requirements of all its extras for users; versions and licenses
are those installed here, which scripts/constraints.txt pins.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

PRODUCT = "streammeta"
EXTRAS = ("all",)

_NAMESPACE = uuid.UUID("6f6d6a1e-7a4f-5c52-9a55-6d1f5a1f9e0b")


def bill(version: str, created: str) -> dict[str, Any]:
    """Return the bill for a version of the product; `created` is a time in ISO 8601."""
    needs = _needs()
    components = [_component(name) for name in sorted(needs) if name != PRODUCT]
    product = {
        "type": "application",
        "bom-ref": PRODUCT,
        "name": PRODUCT,
        "version": version,
        "purl": f"pkg:pypi/{PRODUCT}@{version}",
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(_NAMESPACE, f"{version} {created}").urn,
        "version": 1,
        "metadata": {"timestamp": created, "component": product},
        "components": components,
        "dependencies": [
            {"ref": name, "dependsOn": sorted(needed)} for name, needed in sorted(needs.items())
        ],
    }


def _needs() -> dict[str, set[str]]:
    """Return the names that each package needs, from the product on."""
    needs: dict[str, set[str]] = {}
    left = [(PRODUCT, frozenset(EXTRAS))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while left:
        name, extras = left.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        wanted = list(_requirements(name, extras))
        needs.setdefault(name, set()).update(need for need, _ in wanted if need != name)
        left.extend(wanted)
    return needs


def _requirements(name: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield _normal(requirement.name), frozenset(requirement.extras)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _component(name: str) -> dict[str, Any]:
    found = metadata.metadata(name)
    version = found["Version"]
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": name,
        "name": found["Name"],
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
    }
    if "License-Expression" in found:
        component["licenses"] = [{"expression": found["License-Expression"]}]
    return component
