"""Emulates Hopper kernels on the CPU: a thread for each role, with barriers and TMA in Python.

Triton has no interpreter for Gluon. The emulator supports only the operations of rendered Hopper
kernels: barriers, copies, products and stores. Products are computed when they are issued, and
numbers are float64, so that the emulator finds neither races nor rounding errors.
"""

import ast
import functools
import math
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from flashtune.core.kernel import Kernel
from flashtune.launch.compilation import load_module
from flashtune.request.quantization import E4M3
from flashtune.templates.dead_branches import parsed
from tests.emulator.hardware import (
    Array,
    Barrier,
    Clock,
    Descriptor,
    Pointer,
    Shared,
    Tensor,
    Turn,
    as_word,
    converted,
    plain,
)
from tests.emulator.inline_ptx import emulate_fours, emulate_ptx, emulate_rows

# Decorators of definitions that the emulator runs.
RUN = ("gluon.jit", "gluon.constexpr_function", "aggregate")
# The mask of a store without one.
EVERYWHERE = Tensor(True)
# Batch, head, query and key.
BIAS_DIMS = 4
# The fewest dimensions of inputs that the prologue lists: batch, head and block of queries.
LISTED_DIMS = 3


def identity(function: Any = None, **_: object) -> Any:
    """Replaces decorators with and without options."""
    return function or identity


class Program:
    """One program of a launch: its shared memory, and its implementations of `gl` and related modules."""

    def __init__(self, number: int, programs: int, module: Any, clock: Clock | None = None) -> None:
        self.clock = clock or Clock(1)
        self.number, self.programs, self.module = number, programs, module
        self.turns = [Turn(self.clock) for _ in range(self.groups)]
        self.grown: dict[int, bool] = {}
        self.kept: dict[int, Tensor] = {}
        self.scope: dict[str, Any] = {}

    @property
    def groups(self) -> int:
        """Number of consumer groups that alternate, or 0 if the kernel does not define it."""
        return int(self.module.GROUPS.value) if hasattr(self.module, "GROUPS") else 0

    def names(self) -> dict[str, Any]:
        """Returns the globals of the rendered functions."""
        count = self.groups
        constants = {
            name: getattr(value, "value", value)
            for name, value in vars(self.module).items()
            if name.isupper()
        }
        self.scope = {
            **constants,
            "gl": self.language(),
            "aggregate": identity,
            "triton": SimpleNamespace(jit=identity),
            "gluon": SimpleNamespace(jit=identity, constexpr_function=identity),
            "mbarrier": SimpleNamespace(
                init=self.init_barrier,
                wait=self.wait,
                expect=lambda barrier, size: barrier.change(1, int(size)),
                arrive=lambda barrier, pred=True: barrier.change(1, 0) if pred else None,
            ),
            "tma": SimpleNamespace(store_wait=lambda _: None),
            "copy_in": self.copy_in,
            "copy_out": self.copy_out,
            "fence_async_shared": lambda: None,
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=self.copy_rows,
                mbarrier_arrive=lambda barrier, increment_count: barrier.change(
                    32 * plain(self.module.GATHERING_WARPS), 0
                ),
            ),
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": lambda _, deps: deps[0] if len(deps) == 1 else tuple(deps),
            "wait_named_barrier": lambda group: self.turns[group].sync(),
            "signal_named_barrier": lambda group: self.turns[(group + 1) % count].arrive(),
            "declare_vote": lambda _: None,
            "start_combine": lambda: None,
            "vote_rescale": lambda grows, group: self.grown.update({group: bool(grows.values.any())}),
            "needs_rescale": lambda group: self.grown[group],
            "declare_p": lambda _: None,
            "reciprocals": lambda numbers: 1.0 / numbers,
            "store_p": self.store_p,
            "load_p": lambda group: self.kept[group],
            "take_turn": lambda group: self.turns[group].sync(),
            "pass_turn": lambda group: self.turns[(group + 1) % count].arrive(),
            "declare_growth": lambda _: None,
            "note_growth": lambda grows, group: self.grown.update({group: bool(grows.values.any())}),
            "as_word": as_word,
            "converted": converted,
            "take_ticket": self.take_ticket,
            "read_ticket": self.read_ticket,
            "has_grown": lambda group: self.grown[group],
            "declare_weights": lambda _: None,
            "keep_weights": lambda weights, group: self.kept.update({group: weights}),
            "kept_weights": lambda group: self.kept[group],
            "rounded": lambda weights: weights,
        }
        return self.scope

    def store_p(self, p: Tensor, destination: Any) -> None:
        """Stores 8-bit probabilities in shared memory, or in the registers of a group."""
        p = self.scope["in_fours"](p)
        if isinstance(destination, Shared):
            destination.store(p)
        else:
            self.kept[destination] = p

    def language(self) -> SimpleNamespace:
        def where(test: Any, yes: Any, no: Any) -> Any:
            if any(isinstance(value, Tensor) for value in (test, yes, no)):
                test = Tensor(plain(test))
                return Tensor(np.where(test.values, plain(yes), plain(no)))
            chosen = yes if test else no
            # Numpy's numbers can be divided by zero.
            return np.float64(chosen) if isinstance(chosen, float) else chosen

        def of_two(function: Any) -> Callable[[Any, Any], Any]:
            return lambda left, right: (
                Tensor(function(plain(left), plain(right)))
                if isinstance(left, Tensor) or isinstance(right, Tensor)
                else function(left, right).item()
            )

        def of_one(function: Any) -> Callable[..., Any]:
            def apply(value: Any, *axis: int) -> Any:
                with np.errstate(all="ignore"):
                    result = function(plain(value), *axis)
                return Tensor(result) if isinstance(value, Tensor) else result

            return apply

        def scalar(value: Tensor) -> Any:
            """Returns a number if it is an integer without dimensions: conditions of Python depend on it."""
            is_number = value.values.ndim == 0 and value.values.dtype.kind == "i"
            return value.values.item() if is_number else value

        return SimpleNamespace(
            constexpr=lambda value: value,
            tensor=object,
            tuple=tuple,
            shared_memory_descriptor=object,
            to_tensor=lambda value: value,
            bfloat16="bf16",
            float16="fp16",
            float8e4nv="e4m3",
            int8="i8",
            float32="fp32",
            int32="i32",
            int64="i64",
            program_id=lambda _: self.number,
            num_programs=lambda _: self.programs,
            arange=lambda start, end, _: Tensor(np.arange(start, plain(end))),
            zeros=lambda shape, *_: Tensor(np.zeros([plain(side) for side in shape])),
            full=lambda shape, value, *_: Tensor(np.full([plain(side) for side in shape], value)),
            where=where,
            minimum=of_two(np.minimum),
            maximum=of_two(np.maximum),
            max=lambda value, axis: scalar(of_one(np.max)(value, axis)),
            min=of_one(np.min),
            sum=of_one(np.sum),
            exp2=of_one(np.exp2),
            exp=of_one(np.exp),
            log=of_one(np.log),
            sin=of_one(np.sin),
            cos=of_one(np.cos),
            sqrt=of_one(np.sqrt),
            erf=of_one(lambda value: np.vectorize(math.erf, otypes=[float])(value)[()]),
            zeros_like=of_one(np.zeros_like),
            join=lambda left, right: Tensor(np.stack((left.values, right.values), -1)),
            abs=of_one(np.abs),
            log2=of_one(np.log2),
            fma=lambda left, right, added: left * right + added,
            div_rn=lambda left, right: left / right,
            sqrt_rn=of_one(np.sqrt),
            load=self.load,
            store=lambda pointer, value, mask=EVERYWHERE: pointer.write(value, mask),
            atomic_add=self.atomic_add,
            static_range=range,
            inline_asm_elementwise=lambda asm, operands, operand_values, *_: (
                emulate_rows(asm, operand_values)
                if operands.startswith("=&f,=&f")
                else emulate_fours(asm, operand_values)
                if operands == "=r,=r,r"
                else emulate_ptx(asm, operands, operand_values)
            ),
            convert_layout=lambda value, _: value,
            BlockedLayout=lambda *_: None,
            SwizzledSharedLayout=lambda *_: None,
            SliceLayout=lambda *_: None,
            NVMMADistributedLayout=lambda *_: None,
            NVMMASharedLayout=lambda *_: None,
            allocate_shared_memory=self.allocate,
            warp_specialize=self.run_roles,
        )

    def allocate(self, dtype: str, shape: list[int], layout: object) -> Any:
        sides = [plain(side) for side in shape]
        if dtype == "i64":
            barriers = [Barrier(self.clock) for _ in range(sides[0])]
            return SimpleNamespace(index=lambda slot: barriers[int(slot)])
        return Shared(np.zeros(sides, np.int64) if dtype == "i32" else np.full(sides, np.nan))

    def take_ticket(self, counter: Pointer) -> int:
        """Returns the counter of tiles, and increments it."""
        taken = int(counter.read())
        counter.memory[counter.offset] = taken + 1
        return taken

    def read_ticket(self, ticket: int) -> int:
        """Returns the ticket. Tests replace this to delay the producer."""
        return ticket

    def load(self, pointer: Pointer, mask: Any = True, other: float = 0) -> Any:
        if isinstance(mask, Tensor):
            # Addresses that are hidden may lie anywhere.
            seen, offset = np.broadcast_arrays(mask.values, pointer.offset)
            visible = offset[seen]
            assert ((visible >= 0) & (visible < pointer.memory.size)).all(), "a load outside of a tensor"
            return Tensor(np.where(seen, pointer.memory[np.where(seen, offset, 0)], other))
        if mask:
            return pointer.read()
        return Tensor(np.full(np.shape(pointer.offset), other)) if np.ndim(pointer.offset) else other

    def atomic_add(self, pointer: Pointer, value: Tensor, sem: str, mask: Tensor = EVERYWHERE) -> None:
        with self.clock.changed:
            pointer.add(value, mask)

    def init_barrier(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = int(plain(count))

    def wait(self, barrier: Barrier, parity: int, pred: bool = True) -> None:
        if pred:
            barrier.wait(parity)

    def multiply(self, a: Any, b: Any, c: Tensor, use_acc: bool = True, is_async: bool = True) -> Tensor:
        # The last scores of a program come from uninitialised memory.
        with np.errstate(all="ignore"):
            return Tensor(a.values @ b.values + (c.values if use_acc else 0.0))

    def copy_in(self, descriptor: Descriptor, coordinates: list[Any], full: Barrier, tile: Shared) -> None:
        offsets, inside = descriptor.places(coordinates)
        loaded = np.where(inside, descriptor.memory[offsets], 0.0)
        tile.values[...] = loaded.reshape(tile.values.shape)
        full.change(0, -descriptor.size * loaded.size)

    def copy_rows(self, tile: Shared, pointer: Pointer, mask: Tensor) -> None:
        """Copies elements by their addresses. Those that the mask hides become zeros."""
        tile.values[...] = self.load(
            pointer, Tensor(np.broadcast_to(mask.values, np.shape(pointer.offset)))
        ).values

    def copy_out(self, descriptor: Descriptor, coordinates: list[Any], tile: Shared) -> None:
        offsets, inside = descriptor.places(coordinates)
        descriptor.memory[offsets[inside]] = tile.values.reshape(inside.shape)[inside]

    def run_roles(self, roles: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: object) -> None:
        self.clock.together([functools.partial(role, *arguments) for role, arguments in roles])


@contextmanager
def small_steps() -> Iterator[None]:
    """Switches threads often, so that roles interleave in many orders."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def emulate(
    kernel: Kernel,
    tensors: tuple[Any, ...],
    memory: tuple[Array, ...],
    extra_inputs: tuple[Array, ...],
    lse: Array,
    scale: float,
    programs: int,
    workspaces: tuple[Array, ...] = (),
    numbers: tuple[float, ...] = (),
) -> None:
    """Runs a kernel on arrays.

    Args:
        kernel: A Hopper kernel.
        tensors: q, k, v and out of the descriptors; only shapes and strides are used.
        memory: Flat arrays with the elements of `tensors`, of which the last is written, and those of a bias
            that is described.
        extra_inputs: Extra inputs as arrays.
        lse: Flat; written.
        scale: Of the scores.
        programs: Number of programs.
        workspaces: Flat; written.
        numbers: Scalars after the scale.
    """
    module = load_module(kernel)
    # A bias, mask or block mask is no argument of the kernel: it is described, or listed by the prologue.
    described = [array for array in extra_inputs if array.ndim == BIAS_DIMS and len(memory) > len(tensors)]
    passed = [array for array in extra_inputs if array.ndim < LISTED_DIMS or _is_read(array)]
    made = module.descriptors(*tensors, *(_like(array) for array in described))
    descriptors = [
        Descriptor(descriptor, flat) for parts, flat in zip(made, memory, strict=True) for descriptor in parts
    ]
    # Scales are no arguments of the launch plan.
    planned = () if tensors[0].dtype is E4M3 else extra_inputs
    starts = [_like(array) for array in planned]
    integers = module.launch_plan(*tensors, *starts)[2]
    addressed = [
        flat
        for name, flat in zip(("q", "k", "v"), memory, strict=False)
        if name in (argument.name for argument in kernel.arguments)
    ]
    with small_steps():
        for number in range(programs):
            program = Program(number, programs, module)
            names = program.names()
            exec(functions_of(kernel, names), names)
            pointers = [Pointer(array.reshape(-1)) for array in (*passed, *workspaces)]
            rows = [Pointer(flat) for flat in addressed]
            names[kernel.entry](*descriptors, *rows, Pointer(lse), *pointers, scale, *numbers, *integers)


def _is_read(array: Array) -> bool:
    """Returns whether an input is a tree mask or a captured tensor, and no list."""
    return array.ndim == LISTED_DIMS and (array.dtype == bool or array.dtype.kind == "f")


def _like(array: Array) -> torch.Tensor:
    """Returns a tensor without memory that has the shape and strides of an array."""
    strides = [step // array.itemsize for step in array.strides]
    return torch.empty_strided(array.shape, strides, dtype=torch.bfloat16, device="meta")


def _is_run(node: ast.stmt, emulated: Collection[str]) -> bool:
    """Returns whether a statement defines a jitted function or an aggregate without an emulation."""
    if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name in emulated:
        return False
    return any(ast.unparse(decorator).startswith(RUN) for decorator in node.decorator_list)


def functions_of(kernel: Kernel, emulated: Collection[str]) -> CodeType:
    """Returns the code of the aggregates and the jitted functions of a kernel that have no emulation."""
    return _functions(kernel.source, kernel.entry, frozenset(emulated))


# All programs of a kernel run the same code.
@functools.lru_cache(maxsize=16)
def _functions(source: str, entry: str, emulated: Collection[str]) -> CodeType:
    """Returns the compiled functions. Integer conversions are removed, except for those to 32-bit words."""

    class Widths(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            if not isinstance(node.func, ast.Attribute) or node.func.attr != "to":
                return node
            # Values that are loaded from a workspace are words already.
            if ast.unparse(node).endswith((".to(gl.uint32)", ".to(gl.uint32, bitcast=True)")):
                return ast.Call(ast.Name("as_word", ast.Load()), [node.func.value], [])
            if ast.unparse(node).endswith((".to(gl.float32)", ".to(gl.int32)")):
                return ast.Call(ast.Name("converted", ast.Load()), [node.func.value, *node.args], [])
            return node.func.value if ast.unparse(node).endswith(".to(gl.int64)") else node

    roles: list[ast.stmt] = [node for node in parsed(source).body if _is_run(node, emulated)]
    module = ast.Module(roles, [])
    Widths().visit(module)
    return compile(ast.fix_missing_locations(module), entry, "exec")
