"""Makes the entries of bundles from compiled kernels."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashtune.bundle import cubin
from flashtune.bundle.driver import SIZES
from flashtune.bundle.program import check_entry
from flashtune.bundle.records import Descriptor, Entry, Parameter, Plan, Stage, Workspace
from flashtune.core.errors import BundleError
from flashtune.core.features.records import TABLES, ExtraInputs
from flashtune.core.kernel import Argument, Kernel
from flashtune.core.layouts import TORCH_DTYPES
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.launch.binding import Binary, LaunchPlan, descriptors_of, plan_launch
from flashtune.launch.packed_tail import GRID, INTEGERS, PLAN, tail_recipe
from flashtune.launch.packed_tail import NULL as NULL_POSITION
from flashtune.launch.symbols import Program, contiguous, read_tensor, symbolic_module
from flashtune.launch.tail_kernel import clear_tail, compile_clear
from flashtune.launch.tensors import BackwardTensors, ForwardTensors
from flashtune.launch.workspaces import FLOAT32

# Dimensions of extra inputs. Tensors of a pass have four.
DIMENSIONS = {
    "q_scale": 2, "k_scale": 2, "v_scale": 2, "slopes": 2, "bias": 4, "sinks": 1, "prefix": 1,
    "cu_seqlens_q": 1, "cu_seqlens_kv": 1, "seqlens_kv": 1, "block_table": 2, "block_counts": 3,
    "block_indices": 4, "seed": 1, "tree": 3, "full_counts": 3, "function_ints": 1,
    "function_floats": 1, **dict.fromkeys(TABLES, 1),
}  # fmt: skip
# Triton numbers three element types of descriptors in another order than the driver.
ELEMENT_TYPES = {8: 10, 9: 8, 10: 9}
# Kernels with other values need a launch that bundles do not describe.
UNSUPPORTED = {"num_ctas": 1, "launch_cooperative_grid": False, "profile_scratch_size": 0, "tmem_size": 0}
NULL = 0
# The name in place of a family.
TAIL = "packed_tail"


class LaunchProgram(NamedTuple):
    """A kernel's launch with symbols in place of integers."""

    program: Program
    plan: LaunchPlan
    descriptors: dict[str, Sequence[Any]]  # Of each tensor and workspace.


def launch_program(kernel: Kernel, problem: Problem) -> LaunchProgram:
    """Returns the launch of a kernel, by the launch code of its source.

    Raises:
        BundleError: The launch code is not supported.
    """
    program = Program()
    module = symbolic_module(kernel.source, program)
    kind = BackwardTensors if problem.is_backward else ForwardTensors
    dtype = TORCH_DTYPES[problem.dtype]
    tensors: Any = kind._make(read_tensor(name, dtype, 4) for name in kind._fields)
    sides: dict[str, Any] = {name: read_tensor(name, None, count) for name, count in DIMENSIONS.items()}
    try:
        plan = plan_launch(kernel, module, tensors, ExtraInputs(**sides))
        scratch: dict[str, Any] = {
            name: contiguous(name, torch.float32, shape) for name, shape in plan.workspaces.items()
        }
        descriptors = (
            descriptors_of(kernel, module, tensors, plan.tensors, scratch) if kernel.takes_descriptors else {}
        )
    except (AttributeError, NameError, TypeError, ValueError) as error:
        raise BundleError(f"a plan of {kernel.family} is not supported by bundles: {error}") from error
    return LaunchProgram(program, plan, descriptors)


def entry_of(
    kernel: Kernel, problem: Problem, binary: Binary, ptxas: str, recipes: Sequence[str] = ()
) -> tuple[Entry, dict[str, bytes]]:
    """Returns the entry of a compiled kernel, and its machine code by SHA-256.

    Args:
        kernel: The kernel.
        problem: A problem that it computes.
        binary: The compiled kernel with its steps.
        ptxas: The version of the assembler.
        recipes: Hashes of `bundles.recipe_of`.

    Raises:
        BundleError: The launch needs more than bundles express.
    """
    program, planned, patterns = launch_program(kernel, problem)
    described = list(_descriptors(program, patterns, binary[kernel.entry].metadata))
    shapes = dict(planned.workspaces)
    stages, codes = [], {}
    for number, ((function, arguments, grid, integers), names) in enumerate(
        zip(planned.kernels, planned.names, strict=True)
    ):
        compiled = binary[function]
        scratch_name = ""
        if compiled.metadata.global_scratch_size:
            scratch_name = f"scratch_{number}"
            shapes[scratch_name] = (math.prod(grid) * (compiled.metadata.global_scratch_size // FLOAT32),)
        parameters = _parameters(program, arguments, names, integers, described, scratch_name)
        stage, code = _stage(compiled, function, parameters, tuple(map(program.position, grid)))
        stages.append(stage)
        codes[stage.code] = code
    workspaces = tuple(Workspace(name, tuple(map(program.position, shape))) for name, shape in shapes.items())
    # Everything above may add instructions.
    plan = Plan(tuple(program.tensors), tuple(program.instructions), workspaces, tuple(described))
    version = binary[kernel.entry].metadata.triton_version
    entry = Entry(kernel.digest, kernel.family, tuple(stages), plan, version, ptxas, tuple(sorted(recipes)))
    return check_entry(entry), codes


def tail_entry(dtype: torch.dtype, target: Target, ptxas: str) -> tuple[Entry, dict[str, bytes]]:
    """Returns the entry of the kernel that clears rows after packed sequences, for outputs of a type.

    Compiled by Triton it has no self-check, so its entry needs no receipt.
    """
    compiled = compile_clear(dtype, target)
    parameters = (
        *(Parameter("pointer", name) for name in PLAN.tensors),
        *(Parameter("i32", value=value) for value in INTEGERS),
        # Memory of the compiler's own, and that of a profiler.
        *[Parameter("pointer", value=NULL_POSITION)] * 2,
    )
    stage, code = _stage(compiled, clear_tail.__name__, parameters, (GRID,))
    recipe = tail_recipe(dtype)
    entry = Entry(recipe, TAIL, (stage,), PLAN, compiled.metadata.triton_version, ptxas, (recipe,))
    return check_entry(entry), {stage.code: code}


def _descriptors(
    program: Program, patterns: Mapping[str, Sequence[Any]], metadata: Any
) -> Iterator[Descriptor]:
    """Yields the descriptors of a launch, with the compiler's description of their tiles."""
    notes = iter(metadata.tensordesc_meta or ())
    for name, of_tensor in patterns.items():
        for pattern in of_tensor:
            note = next(notes)
            if note["fp4_padded"]:
                raise BundleError("bundles do not support descriptors of four-bit floats")
            yield Descriptor(
                tensor=name,
                shape=tuple(map(program.position, pattern.shape)),
                strides=tuple(map(program.position, pattern.strides)),
                box=tuple(note["block_size"]),
                element_type=ELEMENT_TYPES.get(note["elem_type"], note["elem_type"]),
                swizzle=note["swizzle"],
                element_bytes=note["elem_size"],
            )


def _parameters(
    program: Program,
    arguments: Sequence[Argument],
    names: Sequence[str],
    integers: Sequence[Any],
    described: Sequence[Descriptor],
    scratch: str,
) -> tuple[Parameter, ...]:
    """Returns a kernel's parameters as Triton compiles them: shapes and strides follow a descriptor."""
    parameters: list[Parameter] = []
    maps, changing, fixed = enumerate(described), iter(names), iter(integers)
    for argument in arguments:
        if argument.type.startswith("tensordesc"):
            position, descriptor = next(maps)
            parameters.append(Parameter("map", value=position))
            parameters += (Parameter("i32", value=extent) for extent in descriptor.shape)
            parameters += (Parameter("i64", value=stride) for stride in descriptor.strides)
        elif argument.type in ("i32", "i64"):
            parameters.append(Parameter(argument.type, value=program.position(next(fixed))))  # type: ignore[arg-type]
        else:
            kind = "pointer" if argument.type.startswith("*") else "f32"
            parameters.append(Parameter(kind, next(changing)))  # type: ignore[arg-type]
    null = Parameter("pointer", value=program.position(NULL))
    # Memory of the compiler's own, and that of a profiler.
    return *parameters, Parameter("pointer", scratch) if scratch else null, null


def _stage(
    compiled: Any, function: str, parameters: tuple[Parameter, ...], grid: tuple[int, ...]
) -> tuple[Stage, bytes]:
    """Returns a kernel of a launch, with the compiler's metadata, and its machine code.

    Raises:
        BundleError: The metadata or parameters are not those that bundles express.
    """
    metadata, code = compiled.metadata, cubin.without_debug(compiled.asm["cubin"])
    for name, expected in UNSUPPORTED.items():
        if getattr(metadata, name, expected) != expected:
            raise BundleError(f"bundles do not support kernels with {name} {getattr(metadata, name)}")
    sizes = [SIZES[parameter.type] for parameter in parameters]
    if cubin.parameter_sizes(code, function) != sizes:
        raise BundleError(
            f"the parameters of {function} are not those of its machine code: use another Triton"
        )
    stage = Stage(
        function=function,
        code=hashlib.sha256(code).hexdigest(),
        machine=cubin.machine_digest(code, function),
        shared_bytes=metadata.shared,
        threads=32 * metadata.num_warps,
        early=metadata.launch_pdl,
        parameters=parameters,
        grid=grid,
    )
    return stage, code
