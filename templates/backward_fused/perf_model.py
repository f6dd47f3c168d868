"""Performance model of the fused backward kernel: minimum SRAM and makespan."""

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.backward_fused.space import FusedConfig, Reduction, can_copy
from flashtune.templates.common.model.makespan_backward import PRODUCTS_OF_ALL, delta_span, keys_span
from flashtune.templates.common.model.sram import ASYNC_BYTES, Engine, backward_chunks, columns, engine_of
from flashtune.templates.common.model.traffic import summed_items, unpacked
from flashtune.templates.common.precision import InputPrecision, at_rate
from flashtune.templates.family import BytesItem, BytesItems, PerformanceModel

FLOAT32 = 4
# From this many stages on, blocks are prefetched.
PIPELINED = 2


class FusedModel(PerformanceModel[FusedConfig]):
    """The model, without state."""

    def sram_items(
        self, problem: Problem, config: FusedConfig, target: Target, specialization: Specialization
    ) -> BytesItems:
        """Returns the items that are live at one point of the main loop; none for unknown architectures."""
        ieee = config.input_precision is InputPrecision.IEEE
        engine = engine_of(target, problem.dtype, config.block_n, config.num_warps, ieee)
        if engine is not Engine.WARPGROUP:
            return ()
        size = problem.dtype.itemsize
        qk_chunks, v_chunks = backward_chunks(problem, config.split_head_dim)
        row = (columns(qk_chunks) + columns(v_chunks)) * size
        streamed = config.num_stages if specialization.alignment * size >= ASYNC_BYTES else 0
        held = BytesItem("k and v", config.block_n * row)
        flight = BytesItem(f"q and dout, {streamed} in flight", streamed * config.block_m * row)
        if streamed < PIPELINED:
            # Without prefetching, gradients can take the place of tiles.
            return held, flight
        copied = config.reduction is Reduction.COPY_ENGINE and can_copy(problem)
        staged = config.block_m * qk_chunks[0].width * FLOAT32 if copied else 0
        return (
            held,
            flight,
            BytesItem("gradients of scores", config.block_m * config.block_n * size),
            BytesItem("dq to be added", staged),
        )

    def makespan_ms(self, problem: Problem, config: FusedConfig, target: Target) -> float:
        """Returns the time of the prologue and the kernel, in ms."""
        problem = unpacked(problem)
        keys = keys_span(
            problem,
            config.block_m,
            config.block_n,
            at_rate(problem, config.input_precision, target),
            heads_innermost=config.heads_innermost,
            products=PRODUCTS_OF_ALL,
        )
        return delta_span(problem, target) + keys

    def hbm_items(self, problem: Problem, config: FusedConfig, target: Target | None = None) -> BytesItems:
        problem = unpacked(problem)
        inner = config.heads_innermost
        return summed_items(problem, config.block_m, config.block_n, problem.head_dim, target, inner=inner)
