"""`Config`: one point of a family's space, and the `Space` and `Axis` that span it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

if TYPE_CHECKING:
    # Sizes are computed, which type checkers cannot follow.
    BlockSize = int
    Warps = int
else:
    # Triton takes no others: sides of tiles and numbers of warps are powers of two.
    BlockSize = Literal[16, 32, 64, 128, 256, 512, 1024]
    Warps = Literal[1, 2, 4, 8, 16, 32]

Stages = Annotated[int, msgspec.Meta(ge=1, le=8)]
RegisterCap = Annotated[int, msgspec.Meta(ge=0, le=255)]

AxisValue = int | bool | enum.Enum


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every family's config: a flat record of ints, bools and enums.

    Families subclass it; the field order is the order in which ties are broken.
    """

    num_warps: Warps
    num_stages: Stages

    def label(self) -> str:
        """A short line for tables: `block_m=128 block_n=64 ...`."""
        return " ".join(f"{name}={_plain(value)}" for name, value in self.items())

    def items(self) -> Iterator[tuple[str, AxisValue]]:
        """The fields and their values, in order."""
        for name in self.__struct_fields__:
            yield name, getattr(self, name)

    def sort_key(self) -> tuple[Any, ...]:
        """A total order over the configs of one family."""
        return tuple(_plain(value) for _, value in self.items())


def _plain(value: AxisValue) -> int | str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    return int(value)


class Axis(msgspec.Struct, frozen=True):
    """One searched dimension.

    Attributes:
        name: The config's field.
        values: All values, ascending where they have an order.
        ordered: Whether neighbours are alike (a sampler then learns over positions), as block
            sizes are and an enum's members are not.
        only_if: Given the values chosen so far for earlier axes, whether this axis is searched;
            where it is not, the field takes `values[0]`.
    """

    name: str
    values: tuple[AxisValue, ...]
    ordered: bool = True
    only_if: Callable[[dict[str, AxisValue]], bool] | None = None

    def is_active(self, chosen: dict[str, AxisValue]) -> bool:
        """Whether this axis is searched, given the earlier axes' values."""
        return self.only_if is None or self.only_if(chosen)


class Space(msgspec.Struct, frozen=True):
    """All configs of one family for one problem and target, before capacity is considered.

    Attributes:
        config_type: The family's `Config` subclass.
        axes: In an order in which each axis depends on earlier ones alone.
        admits: False for configs that cannot be any good, such as tiles beyond the registers of
            their warps: they are no points of the space.
    """

    config_type: type[Config]
    axes: tuple[Axis, ...]
    admits: Callable[[Config], bool] = lambda config: True

    def build(self, values: dict[str, AxisValue]) -> Config:
        """The config of a full assignment."""
        return self.config_type(**values)  # type: ignore[arg-type]

    def choose(self, pick: Callable[[Axis], AxisValue]) -> Config:
        """The config of one choice for each axis that is searched; whether it is a point is not asked."""
        chosen: dict[str, AxisValue] = {}
        for axis in self.axes:
            chosen[axis.name] = pick(axis) if axis.is_active(chosen) else axis.values[0]
        return self.build(chosen)

    def contains(self, config: Config) -> bool:
        """Whether a config, from a table or another shape, is a point of this space."""
        if type(config) is not self.config_type:
            return False
        chosen: dict[str, AxisValue] = {}
        for axis in self.axes:
            value = getattr(config, axis.name)
            allowed = axis.values if axis.is_active(chosen) else axis.values[:1]
            if value not in allowed:
                return False
            chosen[axis.name] = value
        # Fields without an axis have their defaults.
        return config == self.build(chosen) and self.admits(config)

    def configs(self) -> Iterator[Config]:
        """Every config once, in axis order."""
        return filter(self.admits, map(self.build, self._assignments({})))

    def _assignments(self, chosen: dict[str, AxisValue]) -> Iterator[dict[str, AxisValue]]:
        """The full assignments that begin as chosen; axes that are not searched are not walked."""
        if len(chosen) == len(self.axes):
            yield chosen
            return
        axis = self.axes[len(chosen)]
        for value in axis.values if axis.is_active(chosen) else axis.values[:1]:
            yield from self._assignments({**chosen, axis.name: value})

    def size(self) -> int:
        """How many configs there are."""
        return sum(1 for _ in self.configs())


class LaunchOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the compiler is told besides the source.

    Attributes:
        num_warps: Warps of a block.
        num_stages: Depth of the software pipeline.
        max_registers: Register cap; 0 means none.
        early: Whether it may be launched before the kernel in front of it has ended, for whose results it
            then waits by itself (programmatic dependent launch). Left out of digests where it may not.
    """

    num_warps: Warps
    num_stages: Stages
    max_registers: RegisterCap = 0
    early: Literal[True] | msgspec.UnsetType = msgspec.UNSET
