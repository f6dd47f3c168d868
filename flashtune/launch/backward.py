"""The backward pass of one problem, bound to strides and lengths. `BackwardLaunch` runs in every call.

Each kernel takes the tensors that its arguments name, so families can divide the work as they like. For
example, the first kernel computes rowsum(dout · out) and clears an accumulator, and the last converts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashtune.core.extra_inputs import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.extra_inputs import NUMBERS as SIDE_NUMBERS
from flashtune.launch.compilation import interpreting, load_module
from flashtune.launch.forward import MIN_SCALE, Binary, compile_binary
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
# Inputs that are passed by value.
NUMBERS = ("scale", *SIDE_NUMBERS)


class BackwardTensors(NamedTuple):
    """The tensors of a backward pass, as [batch, heads, seqlen, head_dim] of any strides.

    Attributes:
        q: Queries, [batch, heads, seqlen_q, head_dim].
        k: Keys, [batch, kv_heads, seqlen_kv, head_dim].
        v: Values, [batch, kv_heads, seqlen_kv, value_head_dim].
        out: The output of the forward pass, [batch, heads, seqlen_q, value_head_dim].
        lse: Its log-sum-exp, float32 [batch, heads, seqlen_q], contiguous, natural log.
        dout: The gradient of `out`, of the same shape.
        dq: The gradient of q, to be written.
        dk: The gradient of k, to be written.
        dv: The gradient of v, to be written.
        dlse: The gradient of `lse`, of the same shape, or None for zeros.
        dbias: The gradient of an additive bias in q's type, to be written:
            [batch, heads, seqlen_q, seqlen_kv].
        dslopes: The gradient of the ALiBi slopes, to be written: float32 [batch, heads].
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
        """The tensors whose strides and lengths determine the launch, and whose addresses must be aligned."""
        return self.q, self.k, self.v, self.out, self.dout, self.dq, self.dk, self.dv


class Stage(NamedTuple):
    """One kernel of a backward pass: its queue, and the names of its arguments except descriptors."""

    queue: Callable[..., None]
    names: tuple[str, ...]


class BackwardLaunch:
    """Runs the kernels of a backward pass on tensors of the bound shapes and strides.

    Strides are bound, so a call reads only addresses, each once. `scale` is not negative.
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
        """Binds the kernels. The stage at `main` takes the tensors in `described` as descriptors."""
        taken = {*described, *(name for stage in stages for name in stage.names)}
        tensors = [name for name in BackwardTensors._fields if name in taken]
        side = [name for name in ExtraInputs._fields if name in taken and name not in NUMBERS]
        scratch = [f"{WORKSPACE}{index}" for index in range(len(workspaces))]
        order = [*tensors, *side, *scratch, *NUMBERS]
        self._tensors = _taking(BackwardTensors._fields, tensors)
        self._side = _taking(ExtraInputs._fields, side) if side else None
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

    def __call__(
        self, tensors: tuple[Tensor | None, ...], scale: float, side: ExtraInputs = NO_EXTRA_INPUTS
    ) -> None:
        """Queues all kernels on the current stream of their device. `tensors` are as in `BackwardTensors`."""
        # Name look-ups and lists cost host time here, and a GPU may be idle meanwhile.
        held, scratch = self._workspaces(tensors[0])  # type: ignore[arg-type]
        values: list[Any] = [*map(address_of, self._tensors(tensors))]
        if self._side is not None:
            values += map(address_of, self._side(side))
        values += scratch
        values.append(scale if scale > MIN_SCALE else MIN_SCALE)
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
        """Returns descriptors of tensors at addresses that are new as a combination."""

        def tensor_of(place: int) -> Tensor:
            given = *tensors, *self._workspaces.tensors(held)
            return given[self._given[place]]  # type: ignore[return-value]  # described tensors are never None

        assert self._arguments is not None
        return self._arguments.made(addresses, tensor_of)


def _taking(names: Sequence[str], wanted: Sequence[str]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Returns a function that selects the values of some names, in C for two or more."""
    places = [names.index(name) for name in wanted]
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


class InterpretedBackward:
    """The kernels of a backward pass in Triton's interpreter on the CPU, program by program."""

    def __init__(
        self, stages: tuple[Stage, ...], workspaces: tuple[tuple[int, ...], ...], allocate: Allocate
    ) -> None:
        self._stages = stages
        self._workspaces = workspaces
        self._allocate = allocate

    def __call__(
        self, tensors: tuple[Tensor | None, ...], scale: float, side: ExtraInputs = NO_EXTRA_INPUTS
    ) -> None:
        """Runs all programs in turn. `tensors` are as in `BackwardTensors`."""
        given = BackwardTensors(*tensors)  # type: ignore[arg-type]
        values: dict[str, Any] = {**side._asdict(), **given._asdict(), "scale": max(scale, MIN_SCALE)}
        for index, shape in enumerate(self._workspaces):
            values[f"{WORKSPACE}{index}"] = self._allocate(shape, given.q.device)
        for queue, names in self._stages:
            queue(*(values[name] for name in names))


Backward = BackwardLaunch | InterpretedBackward


def bind_backward(
    kernel: Kernel,
    target: Target,
    tensors: BackwardTensors,
    side: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    compiled: Binary | None = None,
    allocate: Allocate = allocate_workspace,
) -> Backward:
    """Returns the launch of a backward kernel for tensors of these shapes: loads, compiles and plans.

    Tensors and extra inputs have the strides and lengths of later calls. With `compiled`, many shapes share
    one binary. Verification allocates poisoned workspaces.

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
    # Each call draws its own seed for dropout, so a plan has none.
    lasting = (tensor if tensor is None else without_memory(tensor) for tensor in planned)
    patterns = module.descriptors(*lasting, *scratch)
    arguments = DescriptorArguments(list(patterns.values()), binary.kernel.metadata.tensordesc_meta)
    return BackwardLaunch(stages, workspaces, allocate, tuple(patterns), arguments, main)


def _taken(arguments: tuple[Argument, ...], integers: tuple[int, ...]) -> tuple[str, ...]:
    """Returns the names of a kernel's arguments without descriptors (first) and integers (last)."""
    plain = [argument for argument in arguments if not argument.type.startswith("tensordesc")]
    return tuple(argument.name for argument in plain[: len(plain) - len(integers)])
