"""Checks the compilers of this machine: Triton's, and Gluon's if the GPU has kernels in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flashtune.core.errors import FlashtuneError, MachineError
from flashtune.tuner.analysis.diagnostic import Finding, Level

if TYPE_CHECKING:
    from flashtune.core.record import Record
    from flashtune.core.target import Target


def compilers(target: Target, watch: Callable[[str], None] = lambda step: None) -> Iterator[Finding]:
    """Compiles a small kernel of each pass, in Triton and in Gluon, for a target.

    `watch` is called with each kernel before it is compiled.
    """
    from flashtune.launch.compilation import interpreting

    if interpreting():
        yield Finding("compiler", Level.WARN, "not tried", "the interpreter is on: unset TRITON_INTERPRET")
        return
    from flashtune.core.kernel import Specialization
    from flashtune.dispatch.lookup import default_selections
    from flashtune.templates.registry import find_family
    from flashtune.tuner.workloads.shapes import parse_shape

    for problem in parse_shape("heads=1,seqlen=128,head_dim=64,dtype=fp16,direction=forward|backward"):
        tried: set[bool] = set()
        for selection in default_selections(problem, target, Specialization()):
            portable = find_family(selection.record.family).interpreted
            if portable not in tried:
                watch(f"compiling a kernel of {selection.record.family} for {target.name}")
                yield compiler(selection.record, target, portable)
            tried.add(portable)


def compiler(record: Record, target: Target, portable: bool) -> Finding:
    """Returns whether one kernel compiles.

    Otherwise portable kernels compute the outputs, and torch the gradients.
    """
    from flashtune.launch.source_cache import kernel_of
    from flashtune.tuner.binary.resources import read_resources

    basic = portable and not record.problem.is_backward
    name = "compiler" if basic else f"compiler of {record.family}"
    try:
        resources = read_resources(kernel_of(record, record.specialization), target)
    except MachineError as error:
        return Finding(name, Level.FAIL, f"{target.name}: {error}")
    except FlashtuneError as error:
        said = f"{target.name}: {error}"
        if basic:
            return Finding(name, Level.FAIL, said, "reinstall triton, or upgrade it")
        instead = "torch computes gradients" if portable else "portable kernels serve"
        return Finding(
            name, Level.WARN, said, f"{instead} instead, slower: use a Triton that it is tested with"
        )
    said = f"compiles for {target.name} ({target.arch}) in {resources.compile_seconds:.1f} s"
    return Finding(name, Level.OK, said)
