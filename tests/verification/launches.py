"""Launches of verified kernels that a test computes."""

from collections.abc import Callable
from typing import Any

import pytest

from flashtune.verification import comparison


def launch_by(monkeypatch: pytest.MonkeyPatch, launch: Callable[..., object]) -> None:
    """Lets each launch call a function with the tensors, the scale, the extra inputs and the allocator."""

    def bind(*_: object, allocate: Any = None, **__: object) -> Callable[..., object]:
        return lambda *arguments: launch(*arguments, allocate)

    monkeypatch.setattr(comparison, "bind", bind)
