"""Run-time arguments of the split kernel and of the combine kernel."""

from __future__ import annotations

from flashtune.core.kernel import Argument, Specialization, Step
from flashtune.core.problem import Problem
from flashtune.templates.common.args.arguments import forward_arguments
from flashtune.templates.common.args.feature_context import asked_arguments
from flashtune.templates.decode_split_kv.space import DecodeConfig, combine_options

# Partial results of every program: outputs, and log-sum-exps in units of log2.
WORKSPACES = ("partial_out", "partial_lse")
COMBINED = ("out", "lse", *WORKSPACES, "stride_ob", "stride_oh", "stride_os", "heads", "seqlen_q")


def split_arguments(
    problem: Problem, config: DecodeConfig, specialization: Specialization
) -> tuple[Argument, ...]:
    """Returns the kernel's arguments; if keys are split, with workspaces and the number of splits."""
    if config.num_splits == 1:
        return asked_arguments(problem, specialization, ())
    return (*asked_arguments(problem, specialization, WORKSPACES), Argument("splits", "i32"))


def combine_step(problem: Problem, config: DecodeConfig, specialization: Specialization) -> Step | None:
    """Returns the combine kernel's launch if keys are split."""
    if config.num_splits == 1:
        return None
    plain = {
        argument.name: argument for argument in forward_arguments(problem.dtype, specialization, WORKSPACES)
    }
    arguments = (*(plain[name] for name in COMBINED), Argument("rows", "i32"), Argument("splits", "i32"))
    return Step("combine", arguments, combine_options(problem, config))
