"""Prints the lines of Python and Jinja of each package, and fails where a package exceeds its budget.

    python -m scripts.lines

Budgets stand in `line_budget.toml`. A package has the lines of its folder without those of folders that
have a budget of their own. A folder of more than 20 modules gets a warning.
"""

import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from flashtune.tuner.cli.output import table

ROOT = Path(__file__).resolve().parent.parent
BUDGET = Path(__file__).with_name("line_budget.toml")
SUFFIXES = (".py", ".jinja", ".sh")
MAX_MODULES = 20
HEADS = ("package", "lines", "budget")


def budgets() -> dict[str, dict[str, int]]:
    """Returns the greatest number of lines by package, for each section of the budget file."""
    return tomllib.loads(BUDGET.read_text(encoding="utf-8"))


def find_files(packages: frozenset[str]) -> Iterator[Path]:
    """Yields the files below the top folders of packages, but not those behind links."""
    for top in sorted({package.split("/")[0] for package in packages}):
        for path in (ROOT / top).rglob("*"):
            file = path.relative_to(ROOT)
            if path.suffix in SUFFIXES and not any((ROOT / parent).is_symlink() for parent in file.parents):
                yield file


def count_lines(packages: frozenset[str]) -> Counter[str]:
    """Returns the lines of each package."""
    lines: Counter[str] = Counter()
    for file in find_files(packages):
        owners = [parent.as_posix() for parent in file.parents if parent.as_posix() in packages]
        if not owners:
            raise ValueError(f"{file.as_posix()} belongs to no package of {BUDGET.name}: add one")
        lines[owners[0]] += (ROOT / file).read_bytes().count(b"\n")
    return lines


def main() -> int:
    """Prints a table for each section and returns 1 where a package exceeds its budget."""
    sections = budgets()
    packages = frozenset(package for section in sections.values() for package in section)
    lines = count_lines(packages)
    larger = []
    for name, section in sections.items():
        rows = [(package, str(lines[package]), str(budget)) for package, budget in section.items()]
        total = (name, str(sum(lines[package] for package in section)), str(sum(section.values())))
        print("\n".join(table(HEADS, (*rows, total))), end="\n\n")
        larger += [package for package, budget in section.items() if lines[package] > budget]
    modules = Counter(file.parent for file in find_files(packages) if file.suffix == ".py")
    for folder, count in modules.items():
        if count > MAX_MODULES:
            print(f"warning: {folder.as_posix()} has {count} modules: a folder of one topic has fewer.")
    for package in larger:
        print(f"{package} exceeds its budget: remove lines, or raise {BUDGET.name} and say what that buys.")
    return int(bool(larger))


if __name__ == "__main__":
    sys.exit(main())
