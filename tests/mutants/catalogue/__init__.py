"""All mutants by name, in files of one area each. `tests.mutants.mutant_files` says their form."""

from pathlib import Path

from tests.mutants.mutant_files import read_mutants

MUTANTS = read_mutants(Path(__file__).parent)
"""The mutants, by area."""
