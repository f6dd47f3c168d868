"""The backward pass of one problem, bound to strides and lengths: what a call costs is here.

Its kernels take what their arguments name, so that families are free to divide the work: the first may
make rowsum(dout · out) and clear an accumulator, the last may convert it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashtune.core.extra_inputs import NO_SIDE, Side
from flashtune.core.extra_inputs import NUMBERS as SIDE_NUMBERS
from flashtune.launch.compilation import interpreting, load_module
from flashtune.launch.forward import LEAST_SCALE, Binary, compile_binary
from flashtune.launch.launcher import interpreted_queue, queue_of
from flashtune.launch.tma_descriptors import DescriptorArguments, without_memory
from flashtune.launch.workspaces import Workspaces, allocate_workspace

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.kernel import Argument, Kernel
    from flashtune.core.target import Target
    from flashtune.launch.workspaces import Allocate

WORKSPACE = "workspace_"
# Bound once, for `map`.
address_of = torch.Tensor.data_ptr
# What is passed by value.
NUMBERS = ("scale", *SIDE_NUMBERS)


class BackwardTensors(NamedTuple):
    """What a backward pass reads and writes, as [batch, heads, seqlen, head_dim] of any strides.

    Attributes:
        q: Queries, [batch, heads, seqlen_q, head_dim].
        k: Keys, [batch, kv_heads, seqlen_kv, head_dim].
        v: Values, [batch, kv_heads, seqlen_kv, value_head_dim].
        out: What the forward pass gave, [batch, heads, seqlen_q, value_head_dim].
        lse: Its log-sum-exp, float32 [batch, heads, seqlen_q], contiguous, natural log.
        dout: The gradient of `out`, like it.
        dq: Where that of q is written.
        dk: Where that of k is written.
        dv: Where that of v is written.
        dlse: The gradient of `lse`, like it, or None for zeros.
        dbias: Where that of an additive bias is written: [batch, heads, seqlen_q, seqlen_kv] in q's type.
        dslopes: Where that of ALiBi's slopes is written: float32 [batch, heads].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dlse: Tensor | None = None
    dbias: Tensor | None = None
    dslopes: Tensor | None = None

    @property
    def planned(self) -> tuple[Tensor, ...]:
        """Those whose strides and lengths a launch is planned by, and whose addresses must be aligned."""
        return self.q, self.k, self.v, self.out, self.dout, self.dq, self.dk, self.dv


class Stage(NamedTuple):
    """One kernel of a backward pass: how it is queued, and the names of what it takes by address or value."""

    queue: Callable[..., None]
    names: tuple[str, ...]


class BackwardLaunch:
    """Runs the kernels of a backward pass on tensors of the shapes and strides that it was bound to.

    Strides are bound, so that only addresses are read, each once. `scale` is not negative.
    """

    __slots__ = (
        "_addresses_of",
        "_arguments",
        "_at",
        "_given",
        "_numbers",
        "_side",
        "_stages",
        "_tensors",
        "_workspaces",
    )

    def __init__(
        self,
        stages: tuple[Stage, ...],
        workspaces: tuple[tuple[int, ...], ...],
        allocate: Allocate,
        described: tuple[str, ...] = (),
        arguments: DescriptorArguments | None = None,
        main: int = 0,
    ) -> None:
        """`described` are the tensors that the stage at `main` takes as descriptors."""
        taken = {*described, *(name for stage in stages for name in stage.names)}
        tensors = [name for name in BackwardTensors._fields if name in taken]
        side = [name for name in Side._fields if name in taken and name not in NUMBERS]
        scratch = [f"{WORKSPACE}{index}" for index in range(len(workspaces))]
        order = [*tensors, *side, *scratch, *NUMBERS]
        self._tensors = _taking(BackwardTensors._fields, tensors)
        self._side = _taking(Side._fields, side) if side else None
        self._numbers = any(name in taken for name in SIDE_NUMBERS)
        self._stages = tuple(
            (queue, _taking(order, names), index == main and arguments is not None)
            for index, (queue, names) in enumerate(stages)
        )
        self._workspaces = Workspaces(workspaces, allocate)
        self._arguments, self._at = arguments, None if arguments is None else arguments.at
        self._addresses_of = _taking(order, described)
        given = (*BackwardTensors._fields, *scratch)
        self._given = tuple(map(given.index, described))

    def __call__(self, tensors: tuple[Tensor | None, ...], scale: float, side: Side = NO_SIDE) -> None:
        """Queues all kernels on their device's current stream; `tensors` are as in `BackwardTensors`."""
        # Every name that is looked up and every list that is made counts: a GPU may wait for this.
        held, scratch = self._workspaces(tensors[0])  # type: ignore[arg-type]
        values: list[Any] = [*map(address_of, self._tensors(tensors))]
        if self._side is not None:
            values += map(address_of, self._side(side))
        values += scratch
        values.append(scale if scale > LEAST_SCALE else LEAST_SCALE)
        if self._numbers:
            values += side.numbers
        described: Sequence[Any] = ()
        if self._at is not None:
            addresses = self._addresses_of(values)
            described = self._at(addresses) or self._made(addresses, tensors, held)
        for queue, take, is_described in self._stages:
            queue(take(values), described if is_described else ())

    def _made(
        self, addresses: tuple[int, ...], tensors: tuple[Tensor | None, ...], held: Sequence[Tensor]
    ) -> list[Any]:
        """Descriptors of what did not come together before at these addresses."""

        def tensor_of(place: int) -> Tensor:
            given = *tensors, *self._workspaces.tensors(held)
            return given[self._given[place]]  # type: ignore[return-value]  # what is described is there

        assert self._arguments is not None
        return self._arguments.made(addresses, tensor_of)


def _taking(names: Sequence[str], wanted: Sequence[str]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What picks the values of some names out of those of all, in C where there are two or more."""
    places = [names.index(name) for name in wanted]
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


class InterpretedBackward:
    """The kernels of a backward pass as Triton's interpreter runs them on the CPU, block by block."""

    def __init__(
        self, stages: tuple[Stage, ...], workspaces: tuple[tuple[int, ...], ...], allocate: Allocate
    ) -> None:
        self._stages = stages
        self._workspaces = workspaces
        self._allocate = allocate

    def __call__(self, tensors: tuple[Tensor | None, ...], scale: float, side: Side = NO_SIDE) -> None:
        """Runs every block in turn; `tensors` are as in `BackwardTensors`."""
        given = BackwardTensors(*tensors)  # type: ignore[arg-type]
        values: dict[str, Any] = {**side._asdict(), **given._asdict(), "scale": max(scale, LEAST_SCALE)}
        for index, shape in enumerate(self._workspaces):
            values[f"{WORKSPACE}{index}"] = self._allocate(shape, given.q.device)
        for queue, names in self._stages:
            queue(*(values[name] for name in names))


Backward = BackwardLaunch | InterpretedBackward


def bind_backward(
    kernel: Kernel,
    target: Target,
    tensors: BackwardTensors,
    side: Side = NO_SIDE,
    *,
    compiled: Binary | None = None,
    allocate: Allocate = allocate_workspace,
) -> Backward:
    """The launch of a backward kernel for tensors like these: loads, compiles and plans.

    Args:
        kernel: The kernel, with its prologue and epilogue.
        target: The GPU that it is compiled for.
        tensors: Their strides and lengths decide.
        side: Side inputs like those to come: of these too strides and shapes decide.
        compiled: The kernel's binary where it is at hand, so that many shapes share one.
        allocate: Makes the workspaces; verification hands out poisoned ones.

    Raises:
        KernelError: The kernel does not compile, or cannot be loaded on this GPU.
    """
    module = load_module(kernel)
    planned = (*tensors.planned, *(getattr(side, name) for name in kernel.all_side if name not in NUMBERS))
    grid, workspaces, integers = module.launch_plan(*planned)
    plans: list[tuple[str, tuple[Argument, ...], tuple[int, ...], tuple[int, ...]]] = []
    if kernel.prologue is not None:
        step = kernel.prologue
        plans.append((step.entry, step.arguments, *module.prologue_plan(*planned)))
    main = len(plans)
    plans.append((kernel.entry, kernel.arguments, grid, integers))
    if kernel.epilogue is not None:
        step = kernel.epilogue
        plans.append((step.entry, step.arguments, *module.epilogue_plan(*planned)))
    if interpreting():
        stages = tuple(
            Stage(interpreted_queue(module, entry, at, ints), _taken(arguments, ints))
            for entry, arguments, at, ints in plans
        )
        return InterpretedBackward(stages, workspaces, allocate)
    binary = compiled or compile_binary(kernel, target)
    binaries = [each for each in (binary.prologue, binary.kernel, binary.epilogue) if each is not None]
    stages = tuple(
        Stage(queue_of(each, at, ints, tensors.q.device), _taken(arguments, ints))
        for each, (_, arguments, at, ints) in zip(binaries, plans, strict=True)
    )
    if not kernel.takes_descriptors:
        return BackwardLaunch(stages, workspaces, allocate)
    scratch = [allocate_workspace(shape, torch.device("meta")) for shape in workspaces]
    # Each call draws the seed of dropout: a plan is made without one.
    lasting = (tensor if tensor is None else without_memory(tensor) for tensor in planned)
    patterns = module.descriptors(*lasting, *scratch)
    arguments = DescriptorArguments(list(patterns.values()), binary.kernel.metadata.tensordesc_meta)
    return BackwardLaunch(stages, workspaces, allocate, tuple(patterns), arguments, main)


def _taken(arguments: tuple[Argument, ...], integers: tuple[int, ...]) -> tuple[str, ...]:
    """Names of what a kernel takes beside descriptors, which come first, and integers, which come last."""
    plain = [argument for argument in arguments if not argument.type.startswith("tensordesc")]
    return tuple(argument.name for argument in plain[: len(plain) - len(integers)])
