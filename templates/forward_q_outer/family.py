"""Portable Triton forward pass in FlashAttention-2's loop order: an outer loop over queries."""

from flashtune.core.config import Space
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Direction, Dtype, Feature, Problem
from flashtune.core.target import Target
from flashtune.templates.common.args.arguments import forward_arguments
from flashtune.templates.common.args.portable_context import portable_values, refusal
from flashtune.templates.common.model.sram import chunks_of, widest_tile
from flashtune.templates.common.precision import float32_width, input_precisions
from flashtune.templates.family import Arguments, Context, FamilyOf
from flashtune.templates.forward_q_outer.perf_model import QOuterModel
from flashtune.templates.forward_q_outer.space import HOPPER, Loads, QOuterConfig, q_outer_space

SMALL_SRAM = 128 * 1024
# Queries, keys, warps and stages of float32 on Hopper, by the width of the head dim.
HOPPER_TILES = {64: (128, 64, 8, 3), 128: (64, 64, 4, 1), 256: (64, 32, 4, 1)}


class ForwardQOuter(QOuterModel, FamilyOf[QOuterConfig]):
    """The family, without state."""

    name = "forward_q_outer"
    config_type = QOuterConfig
    features = frozenset[Feature]()
    direction = Direction.FORWARD
    interpreted = True

    def supports(self, problem: Problem, target: Target) -> str | None:
        return refusal(self.name, problem)

    def can_load(self, config: QOuterConfig, dtype: Dtype, specialization: Specialization) -> bool:
        # With several tiles for a head dim and loads of few bytes, the ptxas of Triton 3.6 reads tiles at
        # addresses from unwritten registers. On an H200, fp16 with 80 columns gave NaN, and bf16 with 96
        # columns illegal accesses.
        return not config.split_head_dim or specialization.takes_descriptors(dtype)

    def space(self, problem: Problem, target: Target) -> Space:
        return q_outer_space(problem, target)

    def default(self, problem: Problem, target: Target) -> QOuterConfig:
        """Returns a tile that fits every target of the table, for untuned shapes."""
        width = widest_tile(problem) * problem.dtype.itemsize
        lpt = problem.causal is not Causal.NONE
        if target.capability == HOPPER and not problem.dtype.is_float32:
            # The fastest measured config of long sequences on an H200 for these head dims.
            return QOuterConfig(
                block_m=128,
                block_n=64,
                num_warps=4 if width == 256 else 8,
                num_stages=3 if width < 256 else 2,
                loads=Loads.POINTER if width < 256 else Loads.DESCRIPTOR,
                lpt=lpt,
            )
        small = target.sram_per_block < SMALL_SRAM
        if target.capability == HOPPER:
            block_m, block_n, warps, stages = HOPPER_TILES[float32_width(problem)]
        elif width > 512:
            block_m, block_n, warps, stages = 32, 16, 4, 1
        else:
            block_m, warps, stages = 128 if width <= 256 else 64, 4, 2
            block_n = 64 if width <= 128 or not small else 32
        return QOuterConfig(
            block_m=block_m,
            block_n=block_n,
            num_warps=warps,
            num_stages=stages,
            lpt=lpt,
            input_precision=input_precisions(problem, target)[-1],
        )

    def arguments(self, problem: Problem, config: QOuterConfig, specialization: Specialization) -> Arguments:
        return forward_arguments(problem.dtype, specialization, ())

    def context(self, problem: Problem, config: QOuterConfig, specialization: Specialization) -> Context:
        chunks = chunks_of(problem, config.split_head_dim)
        uses_descriptors = config.loads is Loads.DESCRIPTOR and specialization.takes_descriptors(
            problem.dtype
        )
        return portable_values(problem, specialization, chunks) | {
            "loads": Loads.DESCRIPTOR if uses_descriptors else Loads.POINTER,
            # Keys and values are loaded with TMA.
            "uses_descriptors": uses_descriptors,
            "overlap_qk": config.overlap_qk and uses_descriptors,
        }


FAMILY = ForwardQOuter()
