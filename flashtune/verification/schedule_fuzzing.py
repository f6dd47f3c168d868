"""Kernels that say themselves who waits for whom, made late wherever that matters.

A wait that is missing is seen where data are late, and on an idle GPU they hardly ever are: copies of small
problems arrive long before they are read. So warps fall asleep at random before they copy, read, write,
multiply, wait or tell: what barriers order comes in the right order however long they sleep, and much of what
nothing orders does not. Only warps are late: copies and products that are under way go on, so that whoever
does not wait for those is not seen so. The idea is that of noise makers for concurrent programs (Edelstein
et al., 2002), in PTX.
"""

from __future__ import annotations

import re

import msgspec

from flashtune.core.kernel import Kernel

# What a verdict names beside its probes.
DELAYS = "delays"
# One place in so many at random, and up to so many nanoseconds, of which `nanosleep` makes twice as many at
# most: a copy takes about one thousand. Powers of two both.
ONE_IN = 4
LONGEST_NS = 4096

# A statement that begins with, or assigns, what others may have to come before or after.
_PLACE = re.compile(
    r"^(?P<indent> +)(?:return |[\w, ]+ \+?= )?"
    r"(?:copy_in|copy_out|mbarrier\.(?:wait|arrive)|warpgroup_mma(?:_wait)?|fence_async_shared|tma\.store_wait"
    r"|take_turn|pass_turn|await_turn|add_sums|spread"
    r"|room\.reshape\([^=\n]*\.store|[^=\n]*\.index\([^=\n]*\.(?:store|load))\(",
    re.MULTILINE,
)

# An odd factor spreads the clock's last bits, in which neighbours differ, over all.
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
    """The same kernel with warps that fall behind; None of one whose compiler alone orders its accesses."""
    if "mbarrier.wait(" not in kernel.source:
        return None
    source = _PLACE.sub(lambda place: f"{place['indent']}fall_behind()\n{place[0]}", kernel.source)
    return msgspec.structs.replace(kernel, source=source + _SLEEP)
