"""Mutants with errors that the rounding of 16-bit inputs can hide. Tests on the CPU run them, and no GPU."""

from tests.mutants.backward_hopper import backward_hopper
from tests.mutants.core import Mutant, Part, mutants_of
from tests.mutants.forward_hopper import hopper
from tests.mutants.portable import backward_size
from tests.mutants.portable.portable import INTERPRETED, QUERIES_OUTER, Bench

LOG2_E = ("log2(e) with 5 digits", "constexpr(1.4426950408889634)", "constexpr(1.4427)")
MASKED_BLOCKS = Part("for start in tl.range(n_full_max, n_max, BLOCK_N):", "# Rows that saw no key")


def forward() -> tuple[Mutant, ...]:
    """Returns those of a portable forward kernel, for the interpreter."""
    return mutants_of(Bench(QUERIES_OUTER, INTERPRETED).subject(), (
        LOG2_E,
        ("outputs 0.1 % too small", "accumulator / divisor", "accumulator * 0.999 / divisor"),
        ("sum rescaled 0.01 % too much", "running_sum * rescale", "running_sum * rescale * 1.0001"),
        ("weights of masked blocks 0.1 % too small", "p_low = p.to(", "p_low = (p * 0.999).to(",
         MASKED_BLOCKS),
    ), prefix="small: ")  # fmt: skip


def backward() -> tuple[Mutant, ...]:
    """Returns those of a portable backward kernel, for the interpreter."""
    return mutants_of(backward_size.INTERPRETED.subject(), (
        ("lse: log2(e) with 5 digits", "other=0.0) * LOG2_E", "other=0.0) * 1.4427", backward_size.DELTA),
        ("delta 0.1 % too large", "row_delta, mask", "row_delta * 1.001, mask", backward_size.DELTA),
        ("dk 0.1 % too small", "(dk_sum * scale)", "(dk_sum * (scale * 0.999))", backward_size.KEYS),
        ("dq: delta lower by 1e-4",
         backward_size.QUERIES_DELTA, "(dp - row_delta[:, None] + 1e-4)",
         backward_size.QUERIES, backward_size.LOOPS),
    ), prefix="small: ")  # fmt: skip


def gluon() -> tuple[Mutant, ...]:
    """Returns those of the main kernels in Gluon, for the emulator."""
    return (
        *mutants_of(hopper.CAUSAL_LSE, (
            LOG2_E,
            ("epsilon in the divisor", "gl.where(row_sum == 0.0, 1.0, row_sum)", "row_sum + 1e-6"),
            ("outputs rescaled 0.1 % too little",
             "= rescale_output(rescale,", "= rescale_output(rescale * 0.999,"),
            ("sum rescaled 0.01 % too much", "* sum_rescale[:, None]", "* (sum_rescale * 1.0001)[:, None]"),
        ), prefix="small: "),
        *mutants_of(backward_hopper.CAUSAL, (
            LOG2_E,
            ("dk 0.1 % too small", "(dk * scale)", "(dk * (scale * 0.999))"),
            ("dv 0.1 % too small", "dv.to(DTYPE)", "(dv * 0.999).to(DTYPE)"),
        ), prefix="small: "),
    )  # fmt: skip


def steps() -> tuple[Mutant, ...]:
    """Returns those of the prologue and the epilogue of `backward_hopper`, for the interpreter."""
    return mutants_of(backward_hopper.CAUSAL, (
        ("delta 0.1 % too large", ", -row_delta)", ", -row_delta * 1.001)", backward_hopper.PREPARE),
        ("lse 0.01 % too large", "-row_lse / scale", "-row_lse * 1.0001 / scale", backward_hopper.PREPARE),
        ("dq 0.1 % too small", "* scale).to(dq", "* (scale * 0.999)).to(dq", backward_hopper.FINISH),
    ), prefix="small: ")  # fmt: skip
