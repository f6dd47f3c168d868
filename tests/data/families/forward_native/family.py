"""A Gluon family for sm_90 that addresses tensors by descriptors."""

from flashtune.core.config import Axis, BlockSize, Config, Space
from flashtune.core.problem import Feature
from flashtune.core.kernel import Argument, Specialization
from flashtune.core.problem import Direction, Dtype, Problem
from flashtune.core.target import Target
from flashtune.templates.common.args.arguments import forward_arguments
from flashtune.templates.common.model.makespan import portable_span
from flashtune.templates.family import BytesItem, Context, FamilyOf

HOPPER = 90
WIDTHS = (64, 128, 256)


class NativeConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of the space; `lead` counts only where tiles are exchanged by turns."""

    block_m: BlockSize
    block_n: BlockSize
    by_turns: bool = False
    lead: int = 0


class ForwardNative(FamilyOf[NativeConfig]):
    name = "forward_native"
    config_type = NativeConfig
    features = frozenset[Feature]()
    direction = Direction.FORWARD
    interpreted = False

    def supports(self, problem: Problem, target: Target) -> str | None:
        if target.capability != HOPPER:
            return f"forward_native runs on sm_90 alone, and {target.name} is {target.arch}"
        if problem.dtype is Dtype.FP32:
            return "forward_native takes no fp32"
        if problem.head_dim not in WIDTHS or problem.heads > 64:
            return "forward_native takes head dims 64, 128 and 256 and up to 64 heads"
        return None

    def can_address(self, dtype: Dtype, specialization: Specialization) -> bool:
        return specialization.takes_descriptors(dtype)

    def space(self, problem: Problem, target: Target) -> Space:
        axes = (
            Axis("block_m", (64, 128, 256)),
            Axis("block_n", (32, 64, 128)),
            Axis("num_warps", (4,)),
            Axis("num_stages", (1, 2, 3)),
            Axis("by_turns", (False, True), False),
            Axis("lead", (0, 1, 2, 3), only_if=lambda chosen: bool(chosen["by_turns"])),
        )
        return Space(NativeConfig, axes)

    def default(self, problem: Problem, target: Target) -> NativeConfig:
        return NativeConfig(block_m=128, block_n=128, num_warps=4, num_stages=2)

    def sram_items(
        self, problem: Problem, config: NativeConfig, target: Target, specialization: Specialization
    ) -> tuple[BytesItem, ...]:
        row = problem.head_dim * problem.dtype.itemsize
        return (
            BytesItem("q", config.block_m * row),
            BytesItem("k and v", 2 * config.num_stages * config.block_n * row),
        )

    def makespan_ms(self, problem: Problem, config: NativeConfig, target: Target) -> float:
        return 0.8 * portable_span(problem, config.block_m, config.block_n, target)

    def hbm_items(
        self, problem: Problem, config: NativeConfig, target: Target | None = None
    ) -> tuple[BytesItem, ...]:
        return (BytesItem("all of it once", problem.minimal_bytes()),)

    def context(self, problem: Problem, config: NativeConfig, specialization: Specialization) -> Context:
        return {}  # The template needs only the config's fields.

    def arguments(
        self, problem: Problem, config: NativeConfig, specialization: Specialization
    ) -> tuple[Argument, ...]:
        return forward_arguments(problem.dtype, specialization, ())


FAMILY = ForwardNative()
