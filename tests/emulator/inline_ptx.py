"""Emulates inline PTX on arrays: that of dropout, of masks, and of integers of 8 bits."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.emulator.hardware import Array, Tensor, plain

LOW = 0xFFFFFFFF


def _permuted(a: Array, b: Array, selector: Array) -> Array:
    """Returns four bytes of two words, by the digits of a selector."""
    both = a | b << np.uint64(32)
    source_bytes = [int(selector) >> 4 * position & 7 for position in range(4)]
    chosen = [
        (both >> np.uint64(8 * byte) & 0xFF) << np.uint64(8 * position)
        for position, byte in enumerate(source_bytes)
    ]
    word: Array = np.bitwise_or.reduce(chosen)
    return word


def _halves(word: Array) -> Array:
    """Returns the 16-bit numbers of words, [..., 2]."""
    return np.stack([word & 0xFFFF, word >> np.uint64(16)], -1)


def _joined(halves: Array) -> Array:
    words: Array = halves[..., 0].astype(np.uint64) | halves[..., 1].astype(np.uint64) << np.uint64(16)
    return words


def _fp16(word: Array) -> Array:
    """Returns the two fp16 numbers of words."""
    return _halves(word).astype(np.uint16).view(np.float16)


def _bf16(word: Array) -> Array:
    """Returns the two bf16 numbers of words."""
    return (_halves(word) << np.uint64(16)).astype(np.uint32).view(np.float32)


def _subtract_bf16(a: Array, b: Array) -> Array:
    bits = (_bf16(a) - _bf16(b)).view(np.uint32)
    assert not (bits & 0xFFFF).any(), "the emulator does not round"
    return _joined(bits >> 16)


OPERATIONS: dict[str, Callable[..., Array]] = {
    "add.u32": lambda a, b: a + b & LOW,
    "xor.b32": np.bitwise_xor,
    "and.b32": np.bitwise_and,
    "mul.lo.u32": lambda a, b: a * b & LOW,
    "mul.wide.u32": np.multiply,
    "setp.ge.u32": np.greater_equal,
    "setp.ne.s32": np.not_equal,
    "selp.f32": lambda a, b, chosen: np.where(chosen, a, b),
    "neg.f32": np.negative,
    "rcp.approx.ftz.f32": lambda a: 1.0 / a,
    "mov.b32": lambda a: a,
    "prmt.b32": _permuted,
    "sub.rn.f16x2": lambda a, b: _joined((_fp16(a) - _fp16(b)).view(np.uint16)),
    "sub.rn.bf16x2": _subtract_bf16,
}


def emulate_ptx(asm: str, operands: str, operand_values: list[object]) -> Tensor:
    """Returns the tensor of instructions without branches. `operand_values` are broadcast together.

    Words are kept in 64 bits without a sign, in which products of two of them have room.
    """
    kinds = operands.split(",")[1:]
    assert len(kinds) == len(operand_values)
    values: dict[str, Array] = {}
    for index, (kind, value) in enumerate(zip(kinds, operand_values, strict=True), start=1):
        array = np.asarray(plain(value))
        values[f"${index}"] = array.astype(np.uint64) if kind == "r" else array.astype(np.float64)

    return Tensor(_run(asm, values)["$0"])


def emulate_rows(asm: str, operand_values: list[Any]) -> Tensor:
    """Returns the scores that a thread's instructions return, for scores and words [rows, eights, 4, 2].

    A thread has two columns of each eight, in two rows, eight rows apart. It alternates between them.
    """
    scores, words = np.broadcast_arrays(*(np.asarray(plain(value)) for value in operand_values))
    eights = scores.shape[1]
    by_thread = (-1, 2, 8, eights, 4, 2)
    by_lane = [array.reshape(by_thread).transpose(0, 2, 4, 3, 1, 5) for array in (scores, words)]
    count = 4 * eights
    flat = [array.reshape(*array.shape[:3], count) for array in by_lane]
    values: dict[str, Array] = {}
    for index in range(count):
        values[f"${count + index}"] = flat[0][..., index]
        values[f"${2 * count + index}"] = flat[1][..., index].astype(np.int64).astype(np.uint64)
    results = _run(asm, values)
    joined = np.stack([results[f"${index}"] for index in range(count)], -1).reshape(by_lane[0].shape)
    return Tensor(joined.transpose(0, 4, 1, 3, 2, 5).reshape(scores.shape))


def emulate_fours(asm: str, operand_values: list[Any]) -> Tensor:
    """Returns 16-bit numbers of instructions for 8-bit integers, four neighbouring columns at a time."""
    stored = np.asarray(plain(operand_values[0]))
    words = np.ascontiguousarray(stored.astype(np.int8)).view(np.uint32).astype(np.uint64)
    results = _run(asm, {"$2": words})
    numbers = _bf16 if "bf16x2" in asm else _fp16
    pairs = [numbers(results[name]).astype(np.float64) for name in ("$0", "$1")]
    return Tensor(np.concatenate(pairs, -1).reshape(stored.shape))


def _run(asm: str, values: dict[str, Array]) -> dict[str, Array]:
    """Returns the values of all names after instructions without branches."""

    def value(name: str) -> Array:
        if name.startswith("0f"):
            return np.asarray(np.uint32(int(name[2:], 16)).view(np.float32), np.float64)
        return np.asarray(int(name, 16), np.uint64) if name.startswith("0x") else values[name]

    for line in (part.strip(" {}\n") for part in re.sub(r"\{(\w+), (\w+)\}", r"\1|\2", asm).split(";")):
        if not line or line.startswith(".reg"):
            continue
        name, _, rest = line.partition(" ")
        target, *sources = rest.split(", ")
        if name == "mov.b64":
            low, high = target.split("|")
            whole = value(sources[0])
            values[low], values[high] = whole & LOW, whole >> np.uint64(32)
        else:
            values[target] = OPERATIONS[name](*map(value, sources))
    return values
