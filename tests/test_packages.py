"""Tests of the docstrings and import cycles of packages."""

import ast
import graphlib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("flashtune", "tuner", "db", "templates", "benchmarks")
DATA = ("tests/data",)


def modules(*folders: str) -> list[Path]:
    """The modules of folders, without symbolic links and `__init__`."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    names = (path.relative_to(ROOT) for path in paths if not any(part.is_symlink() for part in path.parents))
    return sorted(
        name for name in names if name.name != "__init__.py" and not name.as_posix().startswith(DATA)
    )


def test_packages_have_docstrings() -> None:
    folders = {module.parent for module in modules(*PRODUCT)}
    silent = [
        folder.as_posix()
        for folder in sorted(folders)
        if not ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text("utf-8")))
    ]
    assert silent == []


def test_modules_have_no_import_cycles() -> None:
    graph = grimp.build_graph("flashtune", cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imported) > 300
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")
