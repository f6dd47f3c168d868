"""`Config`: one point of a family's search space. `Space` and `Axis` define the space."""

import enum
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

if TYPE_CHECKING:
    # Sizes are computed at run time, and type checkers cannot follow that.
    BlockSize = int
    Warps = int
else:
    # Triton requires powers of two for sides of tiles and numbers of warps.
    BlockSize = Literal[16, 32, 64, 128, 256, 512, 1024]
    Warps = Literal[1, 2, 4, 8, 16, 32]

Stages = Annotated[int, msgspec.Meta(ge=1, le=8)]
RegisterCap = Annotated[int, msgspec.Meta(ge=0, le=255)]

AxisValue = int | bool | enum.Enum


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base of every family's config: a flat record of ints, bools and enums.

    Each family has a subclass. Ties are broken in field order.
    """

    num_warps: Warps
    num_stages: Stages

    def label(self) -> str:
        """Returns a short line for tables: `block_m=128 block_n=64 ...`."""
        return " ".join(f"{name}={_plain(value)}" for name, value in self.items())

    def items(self) -> Iterator[tuple[str, AxisValue]]:
        """Yields the fields and their values, in order."""
        for name in self.__struct_fields__:
            yield name, getattr(self, name)

    def sort_key(self) -> tuple[Any, ...]:
        """Returns a key for a total order of a family's configs."""
        return tuple(_plain(value) for _, value in self.items())


def _plain(value: AxisValue) -> int | str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    return int(value)


class Axis(msgspec.Struct, frozen=True):
    """One tunable parameter."""

    name: str  # The config's field.
    values: tuple[AxisValue, ...]  # All values, in ascending order if they have an order.
    # Whether neighbouring values are similar, as for block sizes but not for enums. The surrogate then uses
    # their positions.
    ordered: bool = True
    # Returns whether the axis is searched, given the values of earlier axes. If it is not, the field has the
    # value `values[0]`.
    only_if: Callable[[dict[str, AxisValue]], bool] | None = None

    def is_active(self, chosen: dict[str, AxisValue]) -> bool:
        """Returns whether this axis is searched, given the earlier axes' values."""
        return self.only_if is None or self.only_if(chosen)


class Space(msgspec.Struct, frozen=True):
    """All configs of one family for one problem and target, before limits of memory apply."""

    config_type: type[Config]  # The family's `Config` subclass.
    axes: tuple[Axis, ...]  # The axes. Each depends only on earlier ones.
    # Returns False for configs that cannot be fast, such as tiles that exceed the registers of their warps.
    # Such configs are not in the space.
    admits: Callable[[Config], bool] = lambda config: True

    def build(self, values: dict[str, AxisValue]) -> Config:
        """Returns the config for a full assignment."""
        return self.config_type(**values)  # type: ignore[arg-type]

    def choose(self, pick: Callable[[Axis], AxisValue]) -> Config:
        """Returns the config with one choice for each searched axis. It can be outside of the space."""
        chosen: dict[str, AxisValue] = {}
        for axis in self.axes:
            chosen[axis.name] = pick(axis) if axis.is_active(chosen) else axis.values[0]
        return self.build(chosen)

    def contains(self, config: Config) -> bool:
        """Returns whether a config, from a table or another shape, is in this space."""
        if type(config) is not self.config_type:
            return False
        chosen: dict[str, AxisValue] = {}
        for axis in self.axes:
            value = getattr(config, axis.name)
            allowed = axis.values if axis.is_active(chosen) else axis.values[:1]
            if value not in allowed:
                return False
            chosen[axis.name] = value
        # Fields without an axis must have their defaults.
        return config == self.build(chosen) and self.admits(config)

    def configs(self) -> Iterator[Config]:
        """Yields every config once, in axis order."""
        return filter(self.admits, map(self.build, self._assignments({})))

    def _assignments(self, chosen: dict[str, AxisValue]) -> Iterator[dict[str, AxisValue]]:
        """Yields the full assignments that extend `chosen`. Inactive axes have one value."""
        if len(chosen) == len(self.axes):
            yield chosen
            return
        axis = self.axes[len(chosen)]
        for value in axis.values if axis.is_active(chosen) else axis.values[:1]:
            yield from self._assignments({**chosen, axis.name: value})

    def size(self) -> int:
        """Returns the number of configs."""
        return sum(1 for _ in self.configs())


class LaunchOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the compiler in addition to the source."""

    num_warps: Warps  # Warps of a CTA.
    num_stages: Stages  # Depth of the software pipeline.
    # Register cap; 0 means none.
    # Digests of kernels have the name of the first versions.
    maxnreg: RegisterCap = msgspec.field(name="max_registers", default=0)
    # Whether the kernel may start before the preceding kernel ends (programmatic dependent launch). It then
    # waits for that kernel's results itself. Left out of digests if unset.
    early: Literal[True] | msgspec.UnsetType = msgspec.UNSET
