"""The interface of kernel families. Each folder here implements it."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from flashtune.core.config import Config, LaunchOptions, Space
from flashtune.core.kernel import Argument, Kernel, Specialization, Step
from flashtune.core.problem import Direction, Dtype, Feature, Problem
from flashtune.core.target import Target

C_contra = TypeVar("C_contra", bound=Config, contravariant=True)


# The values that a template gets in addition to its config's fields, which they replace. They are ints,
# bools, enums, and tuples, structs and further contexts of these, never text.
Context: TypeAlias = Mapping[str, object]


class BytesItem(msgspec.Struct, frozen=True):
    """One line of an explanation: bytes and their use."""

    name: str
    bytes: int


Arguments: TypeAlias = tuple[Argument, ...]
BytesItems: TypeAlias = tuple[BytesItem, ...]


# Keys of a split of batch-invariant kernels. With fewer keys prompts are slower, with more keys decoding is.
ORDERED_KEYS = 2048


class NumericOrder(msgspec.Struct, frozen=True):
    """The order of a kernel's arithmetic on one row, which determines the bits of its result.

    A row sees blocks of keys in descending order. Blocks and splits are counted from key 0 of its sequence.
    """

    split_keys: int  # Keys of a split, which is summed alone. Splits are then combined one by one.
    block_n: int  # Keys of a block, of which one maximum is taken.
    conditional_rescale: bool  # Sums are rescaled only if a maximum grew by much.
    split_head_dim: bool  # Products sum over several tiles of the head dim.

    def __str__(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.__struct_fields__)


class PerformanceModel(Protocol[C_contra]):
    """The performance model of a family: minimum SRAM, makespan and HBM traffic of each config."""

    def sram_items(
        self, problem: Problem, config: C_contra, target: Target, specialization: Specialization
    ) -> BytesItems:
        """Returns the SRAM model, item by item, in bytes: a lower bound of the compiler's SRAM."""
        ...

    def tensor_memory_columns(self, problem: Problem, config: C_contra, target: Target) -> int:
        """Returns the minimum columns of tensor memory of a config (0 without such memory)."""
        return 0

    def makespan_ms(self, problem: Problem, config: C_contra, target: Target) -> float:
        """Returns the makespan of a launch, in ms: from its tiles, their programs and the traffic.

        Use it for ratios between shapes and between configs; other parameters of a config are ignored. Fast
        enough for dispatch: under 100 µs.
        """
        ...

    def schedule_variants(self, problem: Problem, config: C_contra, target: Target) -> Iterable[Config]:
        """Returns configs of the space that differ from one only in the schedule of work on the GPU."""
        return ()

    def hbm_items(self, problem: Problem, config: C_contra, target: Target | None = None) -> BytesItems:
        """Returns HBM traffic of the loop order, item by item, in bytes.

        Without a target, every load of a tile counts, as if there were no cache. With one, repeated loads
        count by the fraction that misses its last-level cache, which is continuous in the lengths.
        """
        ...


class FamilyOf(PerformanceModel[C_contra], Protocol[C_contra]):
    """An implementation of attention with one type of config: template, search space, arguments, model.

    The template renders a module that depends only on torch and triton. It holds the jitted kernel `name`,
    `launch_plan(q, k, v, out)` and `attention(q, k, v, scale)`. If the kernel's arguments are descriptors, it
    also holds `descriptors(q, k, v, out)`, which makes them, tensor by tensor. Extra inputs of the kernel are
    further arguments of all of these, in the order of `ExtraInputs`.

    A backward family renders `launch_plan(q, k, v, out, dout, dq, dk, dv)`, followed by the side tensors of
    all its steps. It also renders `attention_backward(q, k, v, out, lse, dout, scale)`, which returns dq, dk
    and dv. Its `descriptors` gets the arguments of `launch_plan` and then the workspaces. It returns a
    dictionary by the tensors' names, in the order of the kernel's arguments.
    """

    name: str  # Its folder's name.
    config_type: type[Config]
    direction: Direction  # Forward or backward.
    # Features beyond shapes, types and causality. `supports` may reject combinations.
    features: frozenset[Feature]
    interpreted: bool  # Whether Triton's interpreter runs its kernels, which excludes Gluon.

    def supports(self, problem: Problem, target: Target) -> str | None:
        """Returns the reason why the family does not compute this problem on this target, None if it does."""
        ...

    def can_address(self, dtype: Dtype, specialization: Specialization) -> bool:
        """Returns whether its kernels can address tensors with only these known properties.

        A kernel for tensors without known properties can address all tensors.
        """
        return True

    def can_load(self, config: C_contra, dtype: Dtype, specialization: Specialization) -> bool:
        """Returns whether the kernel of a config is correct for tensors with only these known properties.

        Called only for tensors that the family can address.
        """
        return True

    def space(self, problem: Problem, target: Target) -> Space:
        """Returns the search space of the problem on the target."""
        ...

    def default(self, problem: Problem, target: Target) -> Config:
        """Returns a config that fits the target's SRAM, for untuned shapes."""
        ...

    def context(self, problem: Problem, config: C_contra, specialization: Specialization) -> Context:
        """Returns the values for the template, without the fields of the config."""
        ...

    def arguments(self, problem: Problem, config: C_contra, specialization: Specialization) -> Arguments:
        """Returns the kernel's run-time arguments, in order, for this specialisation."""
        ...

    def numeric_order(self, problem: Problem, config: C_contra | None = None) -> NumericOrder | None:
        """Returns the order of a config's arithmetic, by default that of all batch-invariant kernels.

        It does not depend on extents, masks, packing and pages. None if the family promises none.
        """
        return None

    def options(self, config: C_contra) -> LaunchOptions:
        """Returns the compiler's options."""
        return LaunchOptions(config.num_warps, config.num_stages, getattr(config, "maxnreg", 0))

    def prologue(self, problem: Problem, config: C_contra, specialization: Specialization) -> Step | None:
        """Returns the step before the kernel, None if none; its module then also holds `prologue_plan`."""
        return None

    def epilogue(self, problem: Problem, config: C_contra, specialization: Specialization) -> Step | None:
        """Returns the step after the kernel, None if none; its module then also holds `epilogue_plan`."""
        return None


# Any family, where the type of its configs is not known.
Family: TypeAlias = FamilyOf[Any]


def kernel_of_source(
    family: Family, problem: Problem, config: Config, specialization: Specialization, source: str
) -> Kernel:
    """Returns the kernel of a family from its rendered source."""
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


def unsupported_reason(
    family: Family,
    problem: Problem,
    target: Target,
    specialization: Specialization,
    config: Config | None = None,
) -> str | None:
    """Returns why a family, or its kernel of a config, does not compute a problem for such tensors.

    Returns None if it does.
    """
    if problem.direction is not family.direction:
        return f"{family.name} computes the {family.direction} pass"
    unknown = problem.features - family.features
    if unknown:
        return f"{family.name} has no {', '.join(sorted(unknown))}"
    reason = family.supports(problem, target)
    narrowest = Dtype.E4M3 if problem.kv_dtype else problem.dtype
    if reason is None and not family.can_address(narrowest, specialization):
        return f"{family.name} cannot address tensors with such strides or addresses"
    if reason is None and config is not None and not family.can_load(config, narrowest, specialization):
        return f"{family.name} has another config for tensors with such strides or addresses"
    if reason is None and problem.batch_invariant and config is not None:
        order = family.numeric_order(problem)
        if order is None or family.numeric_order(problem, config) != order:
            return f"{family.name} has a config of another order of arithmetic than {order}"
    return reason
