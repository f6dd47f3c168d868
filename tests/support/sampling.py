"""Selects the cases of parametrised tests for `pytest --sample` by the marker `sampled`."""

from collections.abc import Mapping, Sequence

import pytest


def covering(cases: Sequence[Mapping[str, str]]) -> set[int]:
    """Returns the positions of a few cases that hold every value of every parameter.

    Args:
        cases: For each case, its values by the names of parameters.
    """
    missing = {value for case in cases for value in case.items()}
    chosen: set[int] = set()
    while missing:
        # `max` returns the first of equals, so that equal lists of cases give equal samples.
        best = max(range(len(cases)), key=lambda position: len(missing & cases[position].items()))
        chosen.add(best)
        missing -= cases[best].items()
    return chosen


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Returns the cases that a sample of the collected tests does without.

    Raises:
        pytest.UsageError: A marker has arguments other than `every`, or a test without cases has the marker.
    """
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {item for name, cases in functions.items() for item in _left_out_of(name, cases)}


def _left_out_of(name: str, cases: list[pytest.Item]) -> list[pytest.Item]:
    marker = cases[0].get_closest_marker("sampled")
    assert marker is not None
    every = marker.kwargs.get("every")
    if marker.args or marker.kwargs.keys() - {"every"} or not (every is None or every > 1):
        raise pytest.UsageError(f"{name}: write sampled() or sampled(every=N) with N above 1")
    kept = set(range(0, len(cases), every)) if every else covering([_values(case) for case in cases])
    return [case for position, case in enumerate(cases) if position not in kept]


def _values(case: pytest.Item) -> dict[str, str]:
    """Returns a case's values by the names of parameters; names that share one list of values are one."""
    spec = getattr(case, "callspec", None)
    if spec is None:
        raise pytest.UsageError(f"{case.nodeid}: a test without parameters has the marker sampled, remove it")
    lists = [mark.args[0] for mark in case.iter_markers("parametrize")]
    named = [
        [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names] for names in lists
    ]
    listed = {name for names in named for name in names}
    fixtures = [[name] for name in spec.params if name not in listed]
    return {",".join(names): repr([spec.params[name] for name in names]) for names in (*named, *fixtures)}
