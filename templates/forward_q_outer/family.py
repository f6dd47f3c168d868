"""Portable Triton forward pass in FlashAttention-2's loop order: an outer loop over queries."""

from flashtune.core.config import Space
from flashtune.core.kernel import Argument, Specialization
from flashtune.core.problem import MAX_HEAD_DIM, Causal, Direction, Feature, Problem
from flashtune.core.target import Target
from flashtune.templates.common.args.arguments import forward_arguments
from flashtune.templates.common.args.portable_context import PortableContext, portable_fields
from flashtune.templates.common.model.sram import head_chunks, power_of_two
from flashtune.templates.common.precision import float32_width, input_precisions
from flashtune.templates.family import Context, FamilyOf
from flashtune.templates.forward_q_outer.perf_model import QOuterModel
from flashtune.templates.forward_q_outer.space import HOPPER, Loads, QOuterConfig, q_outer_space

SMALL_SRAM = 128 * 1024
# Queries, keys, warps and stages of float32 on Hopper, by the width of the head dim.
HOPPER_TILES = {64: (128, 64, 8, 3), 128: (64, 64, 4, 1), 256: (64, 32, 4, 1)}


class QOuterContext(PortableContext, frozen=True):
    """The values for the template in addition to the config."""

    loads: Loads
    overlap_qk: bool

    @property
    def uses_descriptors(self) -> bool:
        """Whether keys and values are loaded with TMA."""
        return self.loads is Loads.DESCRIPTOR


class ForwardQOuter(QOuterModel, FamilyOf[QOuterConfig]):
    """The family, without state."""

    name = "forward_q_outer"
    config_type = QOuterConfig
    features = frozenset[Feature]()
    direction = Direction.FORWARD
    interpreted = True

    def supports(self, problem: Problem, target: Target) -> str | None:
        if max(problem.head_dim, problem.value_head_dim) > MAX_HEAD_DIM:
            return f"forward_q_outer takes head dims up to {MAX_HEAD_DIM}"
        if problem.dtype.is_quantized:
            return f"forward_q_outer takes no {problem.dtype}"
        return None

    def space(self, problem: Problem, target: Target) -> Space:
        return q_outer_space(problem, target)

    def default(self, problem: Problem, target: Target) -> QOuterConfig:
        """Returns a tile that fits every target of the table, for untuned shapes."""
        width = power_of_two(max(problem.head_dim, problem.value_head_dim)) * problem.dtype.itemsize
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
        precision = input_precisions(problem, target)[-1]
        if target.capability == HOPPER:
            block_m, block_n, warps, stages = HOPPER_TILES[float32_width(problem)]
            return QOuterConfig(
                block_m=block_m,
                block_n=block_n,
                num_warps=warps,
                num_stages=stages,
                lpt=lpt,
                input_precision=precision,
            )
        if width > 512:
            return QOuterConfig(
                block_m=32, block_n=16, num_warps=4, num_stages=1, lpt=lpt, input_precision=precision
            )
        small = target.sram_per_block < SMALL_SRAM
        return QOuterConfig(
            block_m=128 if width <= 256 else 64,
            block_n=64 if width <= 128 or not small else 32,
            num_warps=4,
            num_stages=2,
            lpt=lpt,
            input_precision=precision,
        )

    def arguments(
        self, problem: Problem, config: QOuterConfig, specialization: Specialization
    ) -> tuple[Argument, ...]:
        return forward_arguments(problem.dtype, specialization, ())

    def context(self, problem: Problem, config: QOuterConfig, specialization: Specialization) -> Context:
        qk_chunks = head_chunks(problem.head_dim, config.split_head_dim)
        v_chunks = head_chunks(problem.value_head_dim, config.split_head_dim)
        descriptors = config.loads is Loads.DESCRIPTOR and specialization.takes_descriptors(problem.dtype)
        return QOuterContext(
            **portable_fields(problem, specialization, qk_chunks, v_chunks),
            loads=Loads.DESCRIPTOR if descriptors else Loads.POINTER,
            overlap_qk=config.overlap_qk and descriptors,
        )


FAMILY = ForwardQOuter()
