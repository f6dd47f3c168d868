"""Problems with score and mask functions that the command line names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from flashtune.core.block_mask import BLOCK_SIZE
from flashtune.core.canonical import normal_form
from flashtune.core.errors import UsageError, quoted
from flashtune.core.problem import BlockLists

if TYPE_CHECKING:
    from flashtune.core.problem import Problem
    from flashtune.request.functions.tracing import Traced


def with_functions(
    problems: Sequence[Problem], score_mod: str | None, mask_mod: str | None
) -> tuple[Problem, ...]:
    """Returns problems with a score function and a mask function, each `module:function` or None.

    Functions that are recognised as features become these, as in calls, unless the shape has a block mask or
    another feature. A mask function has a block mask, except with pages. All heads share its lists unless the
    shape has `block_mask`.

    Raises:
        UsageError: A function cannot be imported, or a shape has functions already.
        ProblemError: A function has an operation that kernels do not compute.
    """
    from flashtune.request.functions.tracing import trace

    score, mask = (
        None if name is None else imported(f"--{option}", name)
        for option, name in (("score-mod", score_mod), ("mask-mod", mask_mod))
    )
    traced = trace(score, mask)
    if not traced.functions:
        raise UsageError(
            "--score-mod and --mask-mod change no score: name other functions, or leave them out"
        )
    return tuple(_with(problem, traced) for problem in problems)


def _with(problem: Problem, traced: Traced) -> Problem:
    from flashtune.request.functions.built_in import Extents, built_in

    if problem.functions:
        raise UsageError("a shape has functions: leave out --score-mod and --mask-mod, or functions=")
    if not (problem.features or problem.is_causal):
        extents = Extents(problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_kv)
        found = built_in(traced, extents, problem.is_backward, is_call=False)
        if found is not None:
            return normal_form(msgspec.structs.replace(problem, **found.fields))
    functions = traced.functions
    changes: dict[str, Any] = {"functions": functions}
    if functions.mask >= 0 and not (problem.block_mask or problem.page_size):
        is_grouped = problem.kv_heads < problem.heads
        changes |= {
            "block_mask": BLOCK_SIZE,
            "block_lists": BlockLists.GROUP if is_grouped else BlockLists.HEAD,
        }
    changed: Problem = msgspec.structs.replace(problem, **changes)
    return changed


def imported(option: str, name: str) -> Callable[..., Any]:
    """Returns the function `module:function`. Modules are searched in the present folder first.

    Raises:
        UsageError: There is no such function, or its module cannot be imported.
    """
    module_name, _, path = name.partition(":")
    if not (module_name and path):
        raise UsageError(f"{option} cannot be {quoted(name)}: pass module:function, as in masks:window")
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        function: Any = importlib.import_module(module_name)
    # The module is the user's.
    except Exception as error:
        raise UsageError(
            f"{option}: the module {quoted(module_name)} cannot be imported: {error!r}"
        ) from error
    finally:
        # Later imports of libraries do not search the present folder.
        sys.path.remove(folder)
    for part in path.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise UsageError(f"{option}: {quoted(module_name)} has no function {quoted(path)}")
    return function  # type: ignore[no-any-return]
