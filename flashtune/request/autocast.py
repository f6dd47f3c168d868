"""Types of inputs under `torch.autocast`, which are those of SDPA."""

import torch
from torch import Tensor

# SDPA also leaves float64 as it is. 8-bit inputs, which it does not compute, keep their type here.
CASTED = (torch.float32, torch.float16, torch.bfloat16)
# Bound once, because each call uses them. torch has no public function for all devices.
any_autocast = torch._C._is_any_autocast_enabled
is_available, is_enabled, dtype_of_kind = (
    torch._C._is_autocast_available,
    torch.is_autocast_enabled,
    torch.get_autocast_dtype,
)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the type to which autocast casts tensors of a device, or None."""
    kind = device.type
    if any_autocast() and is_available(kind) and is_enabled(kind):
        return dtype_of_kind(kind)
    return None


def autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor in autocast's type, if autocast casts its own type. Other values stay."""
    # An argument of another type is reported later.
    is_cast = isinstance(tensor, Tensor) and tensor.dtype is not dtype and tensor.dtype in CASTED
    return tensor.to(dtype) if is_cast else tensor
