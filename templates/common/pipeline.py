"""Stages of the software pipelines of portable kernels that compute score and mask functions."""

from flashtune.core.config import Axis
from flashtune.core.problem import Problem


def stages_of(problem: Problem, stages: int) -> int:
    """Returns the stages of a pipeline: 1 if scores select elements of captured tensors.

    Triton 3.6 moves the loads of a pipeline to earlier steps. On Hopper it fails if one depends on a product.
    """
    return 1 if problem.functions.select_by_score else stages


def stage_axis(problem: Problem, stages: tuple[int, ...], name: str = "num_stages") -> Axis:
    """Returns the axis of the stages that are possible."""
    return Axis(name, tuple(dict.fromkeys(stages_of(problem, count) for count in stages)))
