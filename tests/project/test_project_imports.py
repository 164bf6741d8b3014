"""No import cycle: the graph of all modules, built from the source.

Every import counts, those under `TYPE_CHECKING` and inside functions included. Importing a
submodule runs the `__init__` of its packages first, so it counts as an import of them too, except
for importers inside the same package: there `__init__` has begun already, and it counts only if a
name is imported from it that is no submodule.
"""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("proto", "storage", "reconcile", "controller", "broker_client", "brokers", "commands")

# The parts of the simulator and its world refer to each other by design, in type hints alone.
SIMULATOR = "tests.sim."


def find_modules() -> dict[str, Path]:
    """Return the files of all modules that people wrote, by dotted name."""
    roots = {ROOT / part: ROOT / part for part in PARTS}
    roots |= {ROOT / "scripts": ROOT, ROOT / "tests": ROOT}
    found = {}

    for folder, root in roots.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    return {name: path for name, path in found.items() if "_pb2" not in name}


def list_packages(module: str) -> Iterator[str]:
    """Return the packages around a module, outermost first."""
    parts = module.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts)))


def list_named(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Return what the import statements name: a module, and a name in it or None."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, "imports are absolute"
            yield from ((node.module, alias.name) for alias in node.names)


def build_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return the imports of every module. `sources` has the text of all modules by name."""
    graph: dict[str, set[str]] = {}

    for module, source in sources.items():
        imported = set()
        for parent, name in list_named(ast.parse(source)):
            target = f"{parent}.{name}"
            target = target if target in sources else parent
            imported.add(target)
            imported |= {
                package
                for package in list_packages(target)
                if not f"{module}.".startswith(f"{package}.")
            }
        graph[module] = imported & set(sources) - {module}

    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return one cycle, its first module at its end again, or nothing."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_module_imports_itself_through_others() -> None:
    sources = {
        name: path.read_text()
        for name, path in find_modules().items()
        if not name.startswith(SIMULATOR)
    }
    graph = build_graph(sources)

    assert "streammeta.client.errors" in graph["streammeta.client.nodes.session"]
    assert len(graph) > 1_000
    cycle = find_cycle(graph)
    assert cycle == [], "import cycle: " + " -> ".join(cycle)


def test_a_cycle_is_found_by_type_hints_and_imports_in_functions() -> None:
    graph = build_graph(
        {
            "a": "if TYPE_CHECKING:\n    from b import B",
            "b": "def f():\n    import c",
            "c": "from a import A",
            "d": "from a import A\nfrom b import B",
        }
    )

    assert find_cycle(graph) in (
        ["a", "b", "c", "a"],
        ["b", "c", "a", "b"],
        ["c", "a", "b", "c"],
    )


def test_a_package_counts_for_importers_outside_it_and_for_names_that_it_defines() -> None:
    graph = build_graph(
        {
            "p": "from p.inner import f",
            "p.inner": "from p import other",
            "p.other": "from p import f",
            "q": "import p.other",
        }
    )

    assert graph["p.inner"] == {"p.other"}
    assert graph["p.other"] == {"p"}
    assert graph["q"] == {"p", "p.other"}
    assert set(find_cycle(graph)) == {"p", "p.inner", "p.other"}
