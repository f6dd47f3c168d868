"""Results that every worker needs. The server of processes computes them once, and workers inherit them.

Nothing is compiled here, because the compiler starts threads, which processes do not inherit.
"""

from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.cache import triton_key

from flashtune.templates.registry import family_names, template_hash
from flashtune.templates.rendering import parse_templates

HOPPER = 90

triton_key()
get_ptxas(HOPPER)
parse_templates()
for name in family_names():
    template_hash(name)
