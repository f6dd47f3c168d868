"""`Candidate`, a config of a family; search spaces; and the capacity check that prunes candidates."""

from collections.abc import Iterator

import msgspec

from flashtune.core.config import Config, Space
from flashtune.core.errors import ProblemError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import Resources
from flashtune.core.target import Target
from flashtune.templates.family import Family, unsupported_reason
from flashtune.templates.registry import family_names, find_family
from flashtune.tuner.binary.resources import overflow


class Candidate(msgspec.Struct, frozen=True):
    """A config and its family's name."""

    family: str
    config: Config

    def order(self) -> tuple[str, tuple[object, ...]]:
        """Returns a sort key that orders all candidates."""
        return self.family, self.config.sort_key()


class FamilySpace(msgspec.Struct, frozen=True):
    """A family and the space to search."""

    family: Family
    space: Space

    def candidates(self) -> Iterator[Candidate]:
        """Yields every candidate once."""
        return (Candidate(self.family.name, config) for config in self.space.configs())


class SearchTask(msgspec.Struct, frozen=True):
    """The problem, GPU, specialization and search spaces of one search."""

    problem: Problem
    target: Target
    specialization: Specialization
    spaces: tuple[FamilySpace, ...]
    driver: str | None = None  # Version of the driver of the GPU's machine. None if that is this machine.

    def contains(self, candidate: Candidate) -> bool:
        """Returns whether a candidate is in one of the spaces."""
        return any(
            entry.family.name == candidate.family and entry.space.contains(candidate.config)
            for entry in self.spaces
        )

    def candidates(self) -> Iterator[Candidate]:
        """Yields every candidate of every space once."""
        for entry in self.spaces:
            yield from entry.candidates()

    def defaults(self) -> tuple[Candidate, ...]:
        """Returns the default candidate of each family, also if its space does not contain it."""
        return tuple(
            Candidate(entry.family.name, entry.family.default(self.problem, self.target))
            for entry in self.spaces
        )


class Demand(msgspec.Struct, frozen=True):
    """The minimum demand of a candidate on the target, by the models."""

    sram_bytes: int  # Shared memory of a block.
    # Demand beyond a capacity, as a fraction of the capacity; 0 if the candidate fits.
    excess: float
    message: str  # The exceeded capacity; empty if the candidate fits.


def demand(scope: SearchTask, candidate: Candidate) -> Demand:
    """Compares a candidate with the target's SRAM and tensor memory, without compiling it."""
    family, target = find_family(candidate.family), scope.target
    items = family.sram_items(scope.problem, candidate.config, target, scope.specialization)
    sram = sum(item.bytes for item in items)
    columns = family.tensor_memory_columns(scope.problem, candidate.config, target)
    shares = sram / target.sram_per_block, columns / max(target.tensor_memory_columns, 1)
    # The message names SRAM if both are exceeded.
    excess = next((share for share in shares if share > 1.0), 1.0) - 1
    return Demand(sram, excess, overflow(Resources(sram, columns), target, "needs at least"))


def open_spaces(
    problem: Problem, target: Target, families: tuple[str, ...], forced: tuple[tuple[str, Space], ...] = ()
) -> tuple[FamilySpace, ...]:
    """Returns the spaces to search.

    These are the spaces in `forced`, else those of the named families, else those of all families that
    compute the problem.
    """
    if forced:
        return tuple(FamilySpace(find_family(name), space) for name, space in forced)
    for name in families:
        find_family(name)
    reasons = []
    spaces = []
    assumed = contiguous_specialization(problem)
    for name in families or family_names():
        family = find_family(name)
        reason = unsupported_reason(family, problem, target, assumed)
        if reason:
            reasons.append(reason)
        else:
            spaces.append(FamilySpace(family, family.space(problem, target)))
    if not spaces:
        raise ProblemError(f"no family computes {problem.key} on {target.name}: {'; '.join(reasons)}")
    return tuple(spaces)


def contiguous_specialization(problem: Problem, *, lse: bool = False) -> Specialization:
    """Returns the specialization for contiguous tensors. Gradients have the layout of their tensors.

    `lse` is whether a forward pass returns the log-sum-exp, or a backward pass receives its gradient.
    """
    import torch

    from flashtune.core.kernel import specialization_of

    rows = (problem.batch, problem.heads, problem.seqlen_q)
    keys = (problem.batch, problem.kv_heads, problem.seqlen_kv)
    sizes = (
        (*rows, problem.head_dim),
        (*keys, problem.head_dim),
        (*keys, problem.value_head_dim),
        (*rows, problem.value_head_dim),
    )
    return specialization_of(tuple(torch.empty(size, device="meta") for size in sizes), lse=lse)
