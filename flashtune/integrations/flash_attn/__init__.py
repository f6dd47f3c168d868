"""The functions of flash_attn 2.8, 3 and 4, computed by flashtune.

    from flashtune.integrations.flash_attn import flash_attn_func

- The functions of flash_attn 2.8 are here. Those of version 3 are in `flash_attn_3`, and those of version 4
  in `flash_attn_4`.
- `patch()` installs them as the modules `flash_attn`, `flash_attn_interface` and `flash_attn_3`, for
  libraries that import these. `unpatch()` restores the modules that were there before.

Calls that flashtune has no kernels for raise `UnsupportedError`.
"""

from flashtune.integrations.flash_attn.features import UnsupportedError
from flashtune.integrations.flash_attn.flash_attn_2 import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flashtune.integrations.flash_attn.patching import is_patched, patch, unpatch

__all__ = [
    "UnsupportedError",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "is_patched",
    "patch",
    "unpatch",
]
