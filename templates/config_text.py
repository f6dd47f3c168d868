"""Short texts of configs for tables: the axes that differ from the family's default."""

from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.core.target import TARGETS, Target
from flashtune.templates.registry import find_family


def differing_axes(label: str, default: str) -> str:
    """Returns `default with block_m=64 ...`: the axes of a label that differ from the default's.

    Returns all axes if the default is empty.
    """
    if not default:
        return label
    different = [axis for axis in label.split() if axis not in default.split()]
    return " ".join(("default with", *different)) if different else "default"


def config_text(record: Record, target: Target | None = None) -> str:
    """Returns the axes of a record's config that differ from its family's default; empty without a config.

    The text has all axes if the table of GPUs lacks the record's target and no target is given.
    """
    if record.config is None:
        return ""
    default = default_label(record.family, record.problem, target or record.target)
    return differing_axes(record.config.label(), default)


def default_label(family: str, problem: Problem, target: Target | str) -> str:
    """Returns the label of a family's default config; empty if the table of GPUs lacks the named target."""
    if isinstance(target, str):
        listed = [entry for entry in TARGETS if entry.name == target]
        if not listed:
            return ""
        target = listed[0]
    return find_family(family).default(problem, target).label()
