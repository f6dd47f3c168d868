"""Trains with one attention implementation: losses, times of steps and peak memory."""

import contextlib
import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.training.model import Attend, Decoder, Shape

WARM_UP, DECAY, BETAS, LARGEST_GRADIENT = 20, 0.1, (0.9, 0.95), 1.0
# First steps, in which kernels are compiled and verified. Their times and memory are not reported.
LEFT_OUT = 10


class Setting(msgspec.Struct, frozen=True):
    """The common setting of all runs."""

    shape: Shape  # Sizes of the model.
    steps: int  # Number of steps.
    batch: int  # Sequences per step.
    rate: float  # Learning rate after the warm-up.
    seed: int = 1  # Seed of weights and data.
    checkpointing: bool = False  # Whether the backward pass computes blocks again.
    compiled: bool = False  # Whether to use torch.compile.


class Way(msgspec.Struct, frozen=True):
    """An attention implementation."""

    name: str  # Its name.
    attend: Attend  # The attention of the layers.
    # Returns a context for the whole run.
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    dropout_seed: int = 1  # Seed of torch's generator. Implementations draw from it differently.


class Run(msgspec.Struct, frozen=True):
    """The results of one implementation."""

    name: str  # The implementation.
    losses: tuple[float, ...]  # Loss of each step, in nats per token.
    step_ms: tuple[float, ...]  # Time of each step in ms, with a synchronisation.
    peak_bytes: int  # Peak memory of torch's allocator without the data; 0 without a GPU.


def train(way: Way, setting: Setting, tokens: Tensor, device: torch.device) -> Run:
    """Trains a new model and returns the results.

    Args:
        way: The attention implementation.
        setting: The common setting of all runs.
        tokens: The data, int64 [steps, batch, context + 1] on the device.
        device: The device. On a GPU, products are in bfloat16 and weights in float32.
    """
    torch.compiler.reset()
    gc.collect()
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    torch.manual_seed(setting.seed)
    model = Decoder(setting.shape, way.attend, checkpointing=setting.checkpointing).to(device)
    torch.manual_seed(way.dropout_seed)
    step = Step(model, setting, device)
    losses: list[float] = []
    times: list[float] = []
    with way.around():
        for number, batch in enumerate(tokens):
            if on_gpu and number == left_out(setting.steps):
                torch.cuda.reset_peak_memory_stats(device)
            started = time.perf_counter()
            loss = step(batch, number)
            if on_gpu:
                torch.cuda.synchronize(device)
            times.append(1e3 * (time.perf_counter() - started))
            losses.append(float(loss))
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
    return Run(way.name, tuple(losses), tuple(times), peak)


def left_out(steps: int) -> int:
    """Returns the number of first steps that times and memory leave out."""
    return min(LEFT_OUT, steps // 2)


class Step:
    """One training step: forward and backward pass, and AdamW."""

    def __init__(self, model: Decoder, setting: Setting, device: torch.device) -> None:
        """No moments yet; matrices decay, biases and normalisations do not."""
        self._parameters = list(model.parameters())
        self._rate, self._warm_up = setting.rate, max(1, min(WARM_UP, setting.steps // 10))
        groups = [
            {
                "params": [parameter for parameter in self._parameters if parameter.dim() == 2],
                "weight_decay": DECAY,
            },
            {
                "params": [parameter for parameter in self._parameters if parameter.dim() != 2],
                "weight_decay": 0.0,
            },
        ]
        fused = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(groups, lr=setting.rate, betas=BETAS, fused=fused)
        self._model: Callable[[Tensor], Tensor] = (
            torch.compile(model, fullgraph=True) if setting.compiled else model
        )
        self._device = device

    def __call__(self, batch: Tensor, number: int) -> Tensor:
        """The loss before the change, without waiting for it.

        Args:
            batch: Int64 [sequences, context + 1].
            number: Steps before this one.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * min(1.0, (number + 1) / self._warm_up)
        with self._precision():
            logits = self._model(batch[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, LARGEST_GRADIENT)
        self._optimizer.step()
        return loss.detach()

    def _precision(self) -> AbstractContextManager[object]:
        if self._device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return contextlib.nullcontext()
