"""The records of a bundle: kernels, their launches, and the programs that compute integers of launches."""

import hashlib
from typing import Annotated, Literal

import msgspec

from flashtune.core.record import Digest, NonNegative, ShortText, Verdict
from flashtune.core.target import TargetName

# SHA-256 of stored bytes. `$` would allow a line break at the end.
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Name = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
# The position of a value of a program.
Value = Annotated[int, msgspec.Meta(ge=0, lt=4096)]
Values = Annotated[tuple[Value, ...], msgspec.Meta(max_length=128)]
# Sizes and strides of a TMA descriptor.
Extents = Annotated[tuple[Value, ...], msgspec.Meta(min_length=1, max_length=5)]

Operation = Literal[
    "const", "size", "stride", "multiprocessors",
    "add", "sub", "mul", "div", "mod", "min", "max", "gcd", "bits", "eq", "lt", "select", "refuse",
]  # fmt: skip


class Instruction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One value of a program: an operation on earlier values.

    `const` has its value in `a`. `size` and `stride` have the position of a tensor in `a` and an axis in `b`.
    `select` is `b` if `a` is not zero, and otherwise `c`. `refuse` rejects the launch if `a` is not zero.
    """

    operation: Operation
    a: Int64 = 0
    b: Value = 0
    c: Value = 0


class Parameter(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One parameter of a kernel.

    A parameter with a name has the address or number of that name in each call. A `map` is the descriptor at
    the position `value`. Every other parameter is the program's value `value`.
    """

    type: Literal["map", "pointer", "i32", "i64", "f32"]
    name: Annotated[str, msgspec.Meta(max_length=64, pattern=r"^\w*\Z")] = ""
    value: Value = 0


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kernel of a launch."""

    function: Name  # Its name in the machine code.
    code: Sha256  # Its machine code, as stored.
    machine: Digest  # `machine_digest` of its machine code.
    shared_bytes: NonNegative  # Dynamic shared memory of a block.
    threads: Annotated[int, msgspec.Meta(ge=32, le=1024)]  # Threads of a block.
    early: bool  # Whether it may start before the preceding kernel ends.
    parameters: Annotated[tuple[Parameter, ...], msgspec.Meta(max_length=256)]  # In order.
    grid: Annotated[tuple[Value, ...], msgspec.Meta(min_length=1, max_length=3)]


class Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A TMA descriptor of a tensor or workspace. Dimensions are outermost first."""

    tensor: Name
    shape: Extents
    strides: Extents  # In elements.
    box: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=256)], ...], msgspec.Meta(max_length=5)]
    # Values of the driver's enumerations.
    element_type: Annotated[int, msgspec.Meta(ge=0, le=15)]
    swizzle: Annotated[int, msgspec.Meta(ge=0, le=15)]
    element_bytes: Annotated[int, msgspec.Meta(ge=1, le=16)]


class Workspace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scratch memory of float32 numbers that the kernels of a launch share."""

    name: Name
    shape: Values


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the integers of a launch follow from the sizes and strides of its tensors."""

    # The tensors that the program reads, by their names in `ForwardTensors`, `BackwardTensors` and
    # `ExtraInputs`.
    tensors: Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)]
    program: Annotated[tuple[Instruction, ...], msgspec.Meta(max_length=4096)]
    workspaces: Annotated[tuple[Workspace, ...], msgspec.Meta(max_length=32)] = ()
    descriptors: Annotated[tuple[Descriptor, ...], msgspec.Meta(max_length=64)] = ()


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A passed verification of an entry's machine code on a GPU."""

    machine: Digest  # `Entry.machine`.
    target: TargetName
    driver: ShortText
    verdict: Verdict


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel with its steps, compiled for the architecture of the bundle."""

    kernel: Digest  # `Kernel.digest`.
    family: Name
    stages: Annotated[tuple[Stage, ...], msgspec.Meta(min_length=1, max_length=8)]  # In launch order.
    plan: Plan
    triton: ShortText  # The compiler's version.
    ptxas: ShortText
    # Hashes of the records from which the kernel is rendered, see `recipe_of`.
    recipes: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=4096)] = ()
    receipts: Annotated[tuple[Receipt, ...], msgspec.Meta(max_length=64)] = ()

    @property
    def machine(self) -> str:
        """Digest of all stages' machine code and launches, which receipts are bound to."""
        launched = [msgspec.structs.replace(stage, code="", function="") for stage in self.stages]
        return hashlib.sha256(msgspec.json.encode((launched, self.plan))).hexdigest()[:32]

    @property
    def verified_on(self) -> set[str]:
        """Returns the GPUs on which this machine code passed a verification."""
        passed = [receipt for receipt in self.receipts if receipt.verdict.passed]
        machine = self.machine if passed else ""
        return {receipt.target for receipt in passed if receipt.machine == machine}
