"""Schedule fuzzing: random sleeps at the synchronisation points of kernels with explicit barriers.

A missing wait has an effect only if data are late. On an idle GPU, copies of small problems usually arrive
long before they are read. Here warps sleep at random before they copy, read, write, multiply, wait or signal.
Barriers keep the order of accesses for any delay; accesses without a barrier often change their order.

Only warps are delayed. Copies and products in flight continue, so a missing wait for these is not found. The
method is noise injection for concurrent programs (Edelstein et al., 2002), in PTX.
"""

import re

import msgspec

from flashtune.core.kernel import Kernel

# The name of schedule fuzzing among the probes of a verdict.
DELAYS = "delays"
# Probability of a sleep as one in so many, and its longest time in ns; both powers of two. `nanosleep` may
# sleep twice as long. A copy takes about 1000 ns.
ONE_IN = 4
LONGEST_NS = 4096

# A statement that starts with, or assigns the result of, an operation that needs an order between warps.
_PLACE = re.compile(
    r"^(?P<indent> +)(?:return |[\w, ]+ \+?= )?"
    r"(?:copy_in|copy_out|mbarrier\.(?:wait|arrive)|warpgroup_mma(?:_wait)?|fence_async_shared|tma\.store_wait"
    r"|take_turn|pass_turn|wait_named_barrier|signal_named_barrier|wait_counter|atomic_add|broadcast_row"
    r"|p_tile\.store|room\.reshape\([^=\n]*\.store|[^=\n]*\.index\([^=\n]*\.(?:store|load))\(",
    re.MULTILINE,
)

# The odd factor spreads the low bits of the clock, in which neighbours differ, over all bits.
_SLEEP = f'''

@gluon.jit
def fall_behind():
    """Lets a warp sleep for a while, now and then."""
    gl.inline_asm_elementwise(
        """{{ .reg .b32 chance; .reg .pred late;
        mov.u32 $0, %clock;
        mul.lo.u32 $0, $0, 2654435761;
        shr.u32 $0, $0, 16;
        and.b32 chance, $0, {ONE_IN - 1};
        setp.eq.u32 late, chance, 0;
        and.b32 $0, $0, {LONGEST_NS - 1};
        @late nanosleep.u32 $0; }}""",
        "=r,r",
        [0],
        gl.int32,
        False,
        1,
    )
'''


def delayed(kernel: Kernel) -> Kernel | None:
    """Returns the kernel with random delays of its warps, or None if the compiler inserts all barriers."""
    if "mbarrier.wait(" not in kernel.source:
        return None
    source = _PLACE.sub(lambda match: f"{match['indent']}fall_behind()\n{match[0]}", kernel.source)
    return msgspec.structs.replace(kernel, source=source + _SLEEP)
