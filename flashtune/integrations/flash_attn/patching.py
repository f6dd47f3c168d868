"""`patch` and `unpatch`: flashtune in place of the module `flash_attn`, in `sys.modules`."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from flashtune.integrations.flash_attn.distributions import VERSION, announce, withdraw
from flashtune.runtime.session import SESSION

# The modules that `patch` installs, and the modules of this package from which their names come.
MODULES = {
    "flash_attn": ("flash_attn_2",),
    "flash_attn.flash_attn_interface": ("flash_attn_2", "low_level_2"),
    "flash_attn.bert_padding": ("bert_padding",),
    "flash_attn.layers": (),
    "flash_attn.layers.rotary": ("rotary",),
    "flash_attn.cute": ("flash_attn_4",),
    "flash_attn.cute.interface": ("flash_attn_4",),
    "flash_attn_interface": ("flash_attn_3",),
    "flash_attn_3": (),
    "flash_attn_3.flash_attn_interface": ("flash_attn_3",),
}
TOP = ("flash_attn", "flash_attn_interface", "flash_attn_3")
PACKAGES = ("flash_attn", "flash_attn.layers", "flash_attn.cute", "flash_attn_3")
# Names of private functions that other libraries call, and names that flash_attn gives twice.
PRIVATE = {
    "flash_attn.flash_attn_interface": {
        "_flash_attn_forward": "_flash_attn_forward",
        "_flash_attn_backward": "_flash_attn_backward",
        "_flash_attn_varlen_forward": "_flash_attn_varlen_forward",
        "_flash_attn_varlen_backward": "_flash_attn_varlen_backward",
        "_wrapped_flash_attn_forward": "_flash_attn_forward",
        "_wrapped_flash_attn_backward": "_flash_attn_backward",
        "_wrapped_flash_attn_varlen_forward": "_flash_attn_varlen_forward",
        "_wrapped_flash_attn_varlen_backward": "_flash_attn_varlen_backward",
        "_get_block_size_n": "_get_block_size_n",
        "flash_attn_gpu": "Extension",
        "USE_TRITON_ROCM": "USE_TRITON_ROCM",
    },
    "flash_attn.cute.interface": {
        "_flash_attn_fwd": "_flash_attn_fwd",
        "_flash_attn_fwd_combine": "_flash_attn_fwd_combine",
        "_flash_attn_bwd": "_flash_attn_bwd",
        "_flash_attn_bwd_sparse_mla": "_flash_attn_bwd_sparse_mla",
    },
    "flash_attn_interface": {
        "_flash_attn_forward": "_flash_attn_forward",
        "_flash_attn_backward": "_flash_attn_backward",
    },
    "flash_attn_3.flash_attn_interface": {
        "_flash_attn_forward": "_flash_attn_forward",
        "_flash_attn_backward": "_flash_attn_backward",
    },
}
# Names of functions that are not in the package itself.
PUBLIC = ("flash_attn", "get_scheduler_metadata", "index_", "pad_", "unpad_", "apply_rotary")


def patch() -> None:
    """Installs flashtune as `flash_attn`, `flash_attn_interface` and `flash_attn_3`.

    Modules that have imported functions of flash_attn before keep them. So call it first. A second call has
    no effect.
    """
    with SESSION.changing:
        if is_patched():
            return
        made = {name: _module(name) for name in MODULES}
        SESSION.replaced_modules = _removed()
        announce()
        sys.modules.update(made)
        for name, module in made.items():
            package, _, last = name.rpartition(".")
            if package:
                setattr(made[package], last, module)


def unpatch() -> None:
    """Restores the modules that were there before `patch`. Without a patch it has no effect."""
    with SESSION.changing:
        if SESSION.replaced_modules is not None:
            withdraw()
            _removed()
            sys.modules.update(SESSION.replaced_modules)
            SESSION.replaced_modules = None


def is_patched() -> bool:
    """Returns whether flashtune is installed as `flash_attn`."""
    return SESSION.replaced_modules is not None


def _removed() -> dict[str, ModuleType]:
    """Removes the modules of flash_attn from `sys.modules`, and returns them."""
    names = [name for name in sys.modules if name.partition(".")[0] in TOP]
    return {name: sys.modules.pop(name) for name in names}


def _module(name: str) -> ModuleType:
    module = ModuleType(name, f"flashtune in place of {name}.")
    # Libraries look for the specification of a module to find out whether it is there.
    module.__spec__ = ModuleSpec(name, None, is_package=name in PACKAGES)
    if name in PACKAGES:
        module.__path__ = []
    module.__dict__["__version__"] = VERSION
    names: dict[str, Any] = {}
    for source in MODULES[name]:
        names |= vars(importlib.import_module(f"flashtune.integrations.flash_attn.{source}"))
    own = {key: value for key, value in names.items() if key.startswith(PUBLIC) and callable(value)}
    own |= {key: names[value] for key, value in PRIVATE.get(name, {}).items()}
    module.__dict__.update(own)
    return module
