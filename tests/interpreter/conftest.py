"""Fixtures of tests that call flashtune in the interpreter."""

from collections.abc import Iterator

import pytest
import torch

from flashtune.integrations import torch as integration
from flashtune.launch.compilation import interpreting
from flashtune.runtime.session import SESSION
from tests.support.attention_operators import Originals, registered
from tests.support.runtime import forget_all


@pytest.fixture
def fresh_runtime() -> Iterator[None]:
    """Calls, compiled programs and random numbers are those of a new process."""
    assert interpreting()
    forget_all()
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    SESSION.wait()
    SESSION.forget()


@pytest.fixture
def originals(fresh_runtime: None) -> Iterator[Originals]:
    """Torch's operators on the CPU, with flashtune active over them."""
    with registered() as operators, integration.activate():
        yield operators
