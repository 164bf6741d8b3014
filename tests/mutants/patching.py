"""Loads modules with edited source, for the rest of the process.

Works on import, so that constants, default values and names imported elsewhere are all of the
edited module. No bytecode is written.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable, Sequence
from types import CodeType, ModuleType

from tests.mutants.mutant import Edit


def install(edits: Iterable[Edit]) -> None:
    """Edit modules as they are imported from now on; they must not be imported yet.

    Raises ValueError if one is, or if an edit does not fit its module.
    """
    by_module: dict[str, list[Edit]] = {}
    for edit in edits:
        by_module.setdefault(edit.module, []).append(edit)
    for module in by_module:
        if module in sys.modules:
            raise ValueError(f"{module} is imported already; edits need a fresh process")
    sys.meta_path.insert(0, _EditingFinder(by_module))
    for module in by_module:
        importlib.import_module(module)


class _EditingLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, edits: Sequence[Edit]) -> None:
        super().__init__(name, path)
        self._edits = edits

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname)
        assert source is not None
        for edit in self._edits:
            source = edit.apply(source)
        code: CodeType = compile(source, self.path, "exec", dont_inherit=True)
        return code


class _EditingFinder(importlib.abc.MetaPathFinder):
    def __init__(self, edits: dict[str, list[Edit]]) -> None:
        self._edits = edits

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._edits:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        spec.loader = _EditingLoader(fullname, spec.origin, self._edits[fullname])
        return spec
