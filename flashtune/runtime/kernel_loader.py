"""Compiles, loads, checks and binds the kernels of calls."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from flashtune.core.caches import keep
from flashtune.core.errors import KernelError, VerificationError
from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.record import Record, Selection
from flashtune.core.target import Target
from flashtune.dispatch.bound_request import KernelKey
from flashtune.dispatch.platform import PLATFORM
from flashtune.launch.binding import Binary, Tensors, bind
from flashtune.launch.bundles import VARIABLE, Bundles, bundled_kernel
from flashtune.launch.compilation import hash_compiler, is_compiled
from flashtune.launch.compiler_process import CompilerProcess
from flashtune.launch.kernel_cache import Binaries, kernel_of
from flashtune.launch.launch import Launch
from flashtune.launch.workspaces import kept_memory
from flashtune.request.request import Request
from flashtune.runtime.executors import clear_tail_on_cpu
from flashtune.runtime.self_check import CheckTask, SelfChecks

if TYPE_CHECKING:
    from flashtune.launch.bundle_binding import BundledBinary

# Maximum number of cached kernels: rendered ones, and those of calls with features. A model has a few.
KERNELS_LIMIT = 1024


class LoadedKernel(NamedTuple):
    """A selected, loaded and verified kernel. All shapes of one problem share it."""

    kernel: Kernel
    target: Target
    binary: Binary | BundledBinary


class KernelLoader:
    """Compiles, loads, checks and binds kernels. Tests pass another one."""

    def __init__(self, checks: SelfChecks | None = None, bundles: Bundles | None = None) -> None:
        self.checks = checks or SelfChecks()
        self.bundles = bundles or PLATFORM.bundles
        self.binaries = Binaries()
        # Rendered kernels, which calls of other lengths share.
        self.rendered: dict[tuple[object, ...], Kernel] = {}
        # The kernels of calls with features. Numbers of packed tokens are often new.
        self.loaded: dict[KernelKey, LoadedKernel] = {}
        # The binaries that clear rows after the last packed sequence.
        self.clearing: dict[tuple[torch.dtype, Target, torch.device], Any] = {}
        # The memory of workspaces, which all launches share.
        self.kept = kept_memory()

    def load(self, selection: Selection, target: Target, key: KernelKey) -> LoadedKernel:
        """Returns the loaded kernel of a selection, after a self-check unless a receipt covers it.

        A verified kernel of a bundle is neither rendered nor compiled.
        """
        record = selection.record
        assert record.config is not None
        # A bundle that fails is not used again.
        while (located := self.bundles.find(record, key.specialization, target)) is not None:
            loaded = self.bundles.load(located, target, key.device)
            if loaded is not None:
                kernel = bundled_kernel(located.entry, record, key.specialization)
                return LoadedKernel(kernel, target, loaded)
        kernel = self._to_compile(record, key.specialization, target)
        if selection.proves(kernel.digest):
            return LoadedKernel(kernel, target, self.binaries.of(kernel, target, key.device))
        problem = msgspec.structs.replace(key.problem, causal=record.problem.causal)
        task = CheckTask(kernel, problem, record.config, target, key.device)
        with self.checks.preloading(task):
            binary = self.binaries.of(kernel, target, key.device)
        if not self.checks.passes(task, binary):
            failed = self.checks.failed_comparison(kernel, target)
            raise VerificationError(
                f"the {record.family} kernel for {key.problem.key} failed its self-check on {target.name} "
                f"({failed})"
            )
        return LoadedKernel(kernel, target, binary)

    def start(self, selection: Selection, target: Target, key: KernelKey) -> None:
        """Starts a thread that compiles the kernel of a selection. Does nothing if a bundle has the kernel.

        `load` raises its errors.
        """
        if self.bundles.find(selection.record, key.specialization, target) is None:
            with contextlib.suppress(KernelError):
                kernel = self._to_compile(selection.record, key.specialization, target)
                self.binaries.start(kernel, target, key.device)

    def bind(
        self,
        kernel: Kernel,
        target: Target,
        tensors: Tensors,
        side: ExtraInputs,
        binary: Binary | BundledBinary,
    ) -> Launch:
        """Returns the launch of a loaded kernel."""
        return bind(kernel, target, tensors, side, compiled=binary, kept=self.kept)

    def kernel_of(self, record: Record, specialization: Specialization, target: Target) -> Kernel:
        """Returns the kernel of a record, which is rendered once."""
        key = _computation(record, specialization, target)
        kernel = self.rendered.get(key)
        if kernel is None:
            kernel = kernel_of(record, specialization)
            keep(self.rendered, key, kernel, KERNELS_LIMIT)
        return kernel

    def _to_compile(self, record: Record, specialization: Specialization, target: Target) -> Kernel:
        require_triton()
        # The thread runs while the kernel is rendered.
        hash_compiler()
        return self.kernel_of(record, specialization, target)

    def compile_apart(
        self, compiler: CompilerProcess, record: Record, specialization: Specialization, target: Target
    ) -> None:
        """Lets another process render and compile a kernel, unless a bundle or Triton's cache has it."""
        if self.bundles.find(record, specialization, target) is not None:
            return
        require_triton()
        key = _computation(record, specialization, target)
        kernel = self.rendered.get(key)
        if kernel is None or not all(is_compiled(part, target) for part in kernel.parts):
            kernel = compiler.prepared(record, specialization, target)
            if kernel is not None:
                keep(self.rendered, key, kernel, KERNELS_LIMIT)

    def tail_clearer(self, request: Request, sequences: int, target: Target) -> Callable[..., None]:
        """Returns the function that clears rows after the last packed sequence, and loads its kernel."""
        if request.device.type == "cpu":
            return clear_tail_on_cpu
        from flashtune.launch.packed_tail import tail_clearer, tail_recipe

        out = request.out_like
        # A binary that is loaded stays on its device.
        key = out.dtype, target, request.device
        binary = self.clearing.get(key)
        if binary is None:
            located = next(self.bundles.entries(tail_recipe(out.dtype), target), None)
            binary = located and self.bundles.load(located, target, request.device)
            if binary is None:
                from flashtune.launch.tail_kernel import compile_clear

                binary = compile_clear(out.dtype, target)
            keep(self.clearing, key, binary)
        return tail_clearer(binary, out, request.return_lse, sequences, request.device)

    def remember(self, key: KernelKey, kernel: LoadedKernel) -> None:
        """Caches the kernel of a call with features, for later calls with the same key."""
        keep(self.loaded, key, kernel, KERNELS_LIMIT)


def require_triton() -> None:
    """Raises an error if Triton is not installed, for a kernel that no bundle has."""
    if importlib.util.find_spec("triton") is None:
        raise KernelError(
            "Triton is not installed and no bundle has this kernel: install triton, or name another bundle "
            f"in {VARIABLE}"
        )


def _computation(record: Record, specialization: Specialization, target: Target) -> tuple[object, ...]:
    """Returns all on which the source and the binary of a record's kernel depend."""
    return record.family, record.problem.computation, record.config, specialization, target
