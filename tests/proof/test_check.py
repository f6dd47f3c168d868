"""What a check does to its process: threads."""

from __future__ import annotations

import pytest
import torch

from flashtune.errors import KernelError
from flashtune.proof.check import one_thread


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_come_back_whatever_happens(threads: int) -> None:
    inside = []

    @one_thread()
    def fail() -> None:
        inside.append(torch.get_num_threads())
        raise KernelError("does not launch")

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.raises(KernelError):
            fail()
        assert (*inside, torch.get_num_threads()) == (1, threads)
    finally:
        torch.set_num_threads(before)
