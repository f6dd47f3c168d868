"""A fake GPU: the properties that torch reports of a device, without one."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch

from flashtune.core.target import Target, find_target


@contextlib.contextmanager
def fake_gpu(name: str = "h100") -> Iterator[Target]:
    """Lets torch report one GPU of this name (`flashtune targets`), for code that only asks for properties.

    Kernels can be selected, rendered and compiled for it. They cannot be launched.

    Raises:
        TargetError: There is no target of this name.
    """
    target = find_target(name)
    capability = divmod(target.capability, 10)
    properties = SimpleNamespace(
        name=target.name.upper().replace("-", " "),
        major=capability[0],
        minor=capability[1],
        multi_processor_count=target.sm_count,
        shared_memory_per_block_optin=target.sram_per_block,
        L2_cache_size=target.l2_bytes,
        gcnArchName=target.arch,
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "get_device_capability": capability,
    }
    functions = {name: mock.Mock(return_value=answer) for name, answer in answers.items()}
    with mock.patch.multiple(torch.cuda, **functions):
        yield target
