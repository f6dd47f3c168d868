"""The launch code of rendered modules, without a GPU and without descriptors of Triton."""

import types
from types import SimpleNamespace

from flashtune.core.kernel import Kernel
from flashtune.launch.compilation import load_module
from flashtune.launch.symbols import SymbolicDescriptor

SMS = 132


def launch_code(kernel: Kernel) -> SimpleNamespace:
    """The launch code of a rendered module, with a GPU's number of multiprocessors."""
    module = vars(load_module(kernel))
    count = SimpleNamespace(multi_processor_count=SMS)
    fake = SimpleNamespace(cuda=SimpleNamespace(get_device_properties=lambda device: count))
    names = {**module, "torch": fake, "TensorDescriptor": SymbolicDescriptor}
    for name, value in module.items():
        if isinstance(value, types.FunctionType) and value.__module__ == module["__name__"]:
            names[name] = types.FunctionType(value.__code__, names, name)
    return SimpleNamespace(**names)
