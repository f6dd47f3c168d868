"""The contract of a kernel family, which each folder beside this file fulfils."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from flashtune.core.config import Config, LaunchOptions, Space
from flashtune.core.kernel import Argument, Kernel, Specialization, Step
from flashtune.core.problem import Direction, Dtype, Feature, Problem
from flashtune.core.target import Target


class Context(msgspec.Struct, frozen=True):
    """Base of what a family hands to its template: ints, bools and enums only, never text."""


class TrafficItem(msgspec.Struct, frozen=True):
    """One line of an explanation: bytes and what they are for."""

    name: str
    bytes: int


class Family(Protocol):
    """One way to compute attention: a template, its space, its SRAM model, its arguments.

    The template renders a module that depends on torch and triton alone and holds the jitted
    kernel `name`, `launch_plan(q, k, v, out)` and `attention(q, k, v, scale)`; where its arguments are
    descriptors, also `descriptors(q, k, v, out)`, which makes them, tensor by tensor. Side inputs that its
    kernel takes are further arguments of all of these, in the order of `Side`.

    A family of the backward pass renders `launch_plan(q, k, v, out, dout, dq, dk, dv)`, with the side tensors
    of all its steps behind these, and `attention_backward(q, k, v, out, lse, dout, scale)`, which returns dq,
    dk and dv. Its `descriptors` takes what `launch_plan` does and then the workspaces, and returns them in a
    dictionary by the tensors' names, in the order in which the kernel takes them.

    Attributes:
        name: Its folder's name.
        config_type: What its configs are.
        direction: Which pass it computes.
        features: What it computes beside shapes, types and causality; `supports` may refuse combinations.
        interpreted: Whether Triton's interpreter runs its kernels; it runs none that are in Gluon.
    """

    name: str
    config_type: type[Config]
    direction: Direction
    features: frozenset[Feature]
    interpreted: bool

    def supports(self, problem: Problem, target: Target) -> str | None:
        """None when the family computes this problem on this target, else the reason why not."""
        ...

    def takes(self, dtype: Dtype, specialization: Specialization) -> bool:
        """Whether its kernels can address tensors of which no more than this may be assumed.

        Who takes tensors of which nothing may be assumed takes all of them.
        """
        ...

    def space(self, problem: Problem, target: Target) -> Space:
        """All configs worth trying for the problem on the target."""
        ...

    def default(self, problem: Problem, target: Target) -> Config:
        """A config that fits the target's SRAM, for shapes that nobody tuned."""
        ...

    def sram_items(
        self, problem: Problem, config: Config, target: Target, specialization: Specialization
    ) -> tuple[TrafficItem, ...]:
        """The SRAM model, item by item, in bytes: never more in sum than the compiler asks for."""
        ...

    def tensor_memory_columns(self, problem: Problem, config: Config, target: Target) -> int:
        """Columns of tensor memory that a config takes at the least (0 without such memory)."""
        ...

    def programs(self, problem: Problem, config: Config) -> int:
        """Programs of one launch: the size of the kernel's grid."""
        ...

    def overlap(self, config: Config) -> float | None:
        """Share of the shorter of products and softmax that the kernel's own schedule hides.

        None where it has none of its own, and only other warps of the multiprocessor hide something.
        """
        ...

    def span(self, problem: Problem, config: Config, target: Target) -> float:
        """What a launch takes by its schedule, in ms: how tiles are cut, who computes them, what is moved.

        Good for ratios, between shapes and between configs; what else a config decides it leaves out. Cheap
        enough for dispatch: under 100 µs.
        """
        ...

    def spread_otherwise(self, problem: Problem, config: Config, target: Target) -> Iterable[Config]:
        """Configs worth trying that differ from one in how work is spread over the GPU alone."""
        ...

    def hbm_items(
        self, problem: Problem, config: Config, target: Target | None = None
    ) -> tuple[TrafficItem, ...]:
        """HBM traffic that the loop order causes, item by item, in bytes.

        Without a target every load of a tile counts, as if there were no cache. With one, repeated
        loads count by the share that misses its last-level cache, which is continuous in the lengths.
        """
        ...

    def context(self, problem: Problem, config: Config, specialization: Specialization) -> Context:
        """The typed values that the template renders from."""
        ...

    def arguments(
        self, problem: Problem, config: Config, specialization: Specialization
    ) -> tuple[Argument, ...]:
        """The kernel's run-time arguments, in order, for this specialisation."""
        ...

    def options(self, config: Config) -> LaunchOptions:
        """What the compiler is told besides the source."""
        ...

    def prologue(self, problem: Problem, config: Config, specialization: Specialization) -> Step | None:
        """What is launched before the kernel, if anything; its module then holds `prologue_plan` too."""
        ...

    def epilogue(self, problem: Problem, config: Config, specialization: Specialization) -> Step | None:
        """What is launched after the kernel, if anything; its module then holds `epilogue_plan` too."""
        ...


def kernel_of_source(
    family: Family, problem: Problem, config: Config, specialization: Specialization, source: str
) -> Kernel:
    """The kernel of a family whose rendered source is at hand."""
    return Kernel(
        family=family.name,
        entry=family.name,
        source=source,
        arguments=family.arguments(problem, config, specialization),
        options=family.options(config),
        specialization=specialization,
        prologue=family.prologue(problem, config, specialization),
        epilogue=family.epilogue(problem, config, specialization),
    )


def why_not(family: Family, problem: Problem, target: Target, specialization: Specialization) -> str | None:
    """None when a family computes a problem on a target for tensors like these, else the reason why not."""
    if problem.direction is not family.direction:
        return f"{family.name} computes the {family.direction} pass"
    unknown = problem.features - family.features
    if unknown:
        return f"{family.name} has no {', '.join(sorted(unknown))}"
    reason = family.supports(problem, target)
    if reason is None and not family.takes(problem.dtype, specialization):
        return f"{family.name} cannot address tensors with such strides or addresses"
    return reason
