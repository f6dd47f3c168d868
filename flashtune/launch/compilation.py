"""Compiles a `Kernel`: writes its source to a file, imports it, and compiles it for one target.

Search, verification and runtime all use this module, so that the verified code is the code that runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.machinery
import importlib.util
import io
import linecache
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from flashtune.core.errors import KernelError, MachineError
from flashtune.core.files import read_own, replace_file
from flashtune.core.locks import ModuleLock
from flashtune.core.machine import KERNELS, cache_folder, machine_errors, set_ptxas_path, unwritable

if TYPE_CHECKING:
    from triton.compiler import ASTSource, CompiledKernel
    from triton.runtime.jit import JITFunction

    from flashtune.core.kernel import Kernel
    from flashtune.core.target import Target

# Fused multiply-adds round once. Pinned, because the default of Triton will change.
FP_FUSION = True
# The precisions of products of float32 in kernels.
INPUT_PRECISIONS = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")
# The name of no stage of Triton's compiler.
NO_STAGE = "none"
# Many times the size of a kernel's source.
MAX_SOURCE_BYTES = 4 * 1024 * 1024

# Held while a rendered file is imported, and while the interpreter runs a kernel.
_lock = ModuleLock()
# Held while sources are parsed. Python's `ast.parse` may fail if threads enter it at once.
parsing = ModuleLock()


def kernel_folder() -> Path:
    """Returns the folder of rendered kernels, in flashtune's cache folder."""
    return cache_folder() / KERNELS


def load_module(kernel: Kernel) -> ModuleType:
    """Returns the rendered source as a module, and leaves a copy of the source in the kernel cache."""
    name = f"flashtune_kernel_{kernel.digest}"
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        path = kernel_folder() / f"{kernel.family}_{kernel.digest}.py"
        _write_once(path, kernel.source)
        file = str(path)
        # Another installation may replace the file by one with other comments, so it is not read again.
        # Triton takes a function's source from `linecache`. A time of None there disables the file check.
        # Its lines must be Python's: `str.splitlines` also ends lines at other characters.
        lines = io.StringIO(kernel.source).readlines()
        linecache.cache[file] = len(kernel.source), None, lines, file
        loader = _SourceLoader(name, file, kernel.source)
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        if interpreting():
            _allow_precisions()
        sys.modules[name] = module
        return module


def _allow_precisions() -> None:
    """Makes the interpreter accept all precisions of products. It computes every product in float32."""
    from triton.runtime.interpreter import interpreter_builder

    interpreter_builder.options = dataclasses.replace(
        interpreter_builder.options, allowed_dot_input_precisions=INPUT_PRECISIONS
    )


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Executes a source from memory under the name of a file. Reads and writes no bytecode."""

    def __init__(self, name: str, file: str, source: str) -> None:
        super().__init__(name, file)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source, self.get_filename(fullname))


def _write_once(path: Path, source: str) -> None:
    """Writes `source` to `path` unless it is there. Safe with many processes."""
    content = source.encode()
    with contextlib.suppress(OSError):
        if read_own(path, MAX_SOURCE_BYTES) == content:
            return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A file that a group can write is not read again.
        replace_file(path, content, 0o644)
    except OSError as error:
        where = f"the kernel cache {path.parent}"
        raise MachineError(unwritable(where, error, "set FLASHTUNE_CACHE_DIR")) from error


@functools.cache
def hash_compiler() -> None:
    """Starts a thread that hashes Triton's files for the keys of its cache."""
    from triton.runtime.cache import triton_key

    # Triton keeps the result. Hashing does not hold Python's lock.
    threading.Thread(target=triton_key, name="flashtune-hash").start()


def compile_kernel(kernel: Kernel, target: Target) -> CompiledKernel:
    """Returns the binary of a kernel for a target, from Triton's cache if possible. Needs no GPU."""
    source = _source(getattr(load_module(kernel), kernel.entry), kernel)
    try:
        with machine_errors():
            return compile_source(source, target, _options(kernel, target))
    except MachineError:
        raise
    except Exception as error:  # the compiler raises many types, from RuntimeError to its own
        raise KernelError(first_line(_origin(error))) from error


def is_compiled(kernel: Kernel, target: Target) -> bool:
    """Whether Triton's cache has the binary of a kernel for a target."""
    source = _source(getattr(load_module(kernel), kernel.entry), kernel)
    # Triton looks this stage up after the cache and before it compiles.
    source.ext = NO_STAGE
    try:
        compile_source(source, target, _options(kernel, target))
    except Exception:  # noqa: BLE001 - of many types; the compilation raises it again
        return False
    return True


def compile_source(source: ASTSource, target: Target, options: dict[str, Any]) -> CompiledKernel:
    """Returns the binary of Triton's source for a target, from Triton's cache if possible."""
    import triton

    # Without this backend, the compilation raises Triton's error.
    if target.is_nvidia and "nvidia" in triton.backends.backends:
        _match_cache_keys(target.triton_target().arch)
    return triton.compile(source, target=target.triton_target(), options=options)


def _match_cache_keys(arch: int) -> None:
    """Makes the keys of Triton's cache contain the version of the ptxas that runs.

    Triton reads the version once, and the path of the program for each kernel. torch.compile may have set
    another path in between.
    """
    from triton.backends.nvidia.compiler import get_features, get_ptxas, get_ptxas_version

    set_ptxas_path()
    if f"release {get_ptxas(arch).version}," not in get_ptxas_version(arch):
        get_ptxas_version.cache_clear()
        get_features.cache_clear()


def _origin(error: BaseException) -> BaseException:
    """Returns the first cause. The compiler wraps an error once for each enclosing function of the kernel."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _source(function: JITFunction[Any], kernel: Kernel) -> ASTSource:
    """Returns the compiler's input. Triton and Gluon start at different representations."""
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source

    signature = {argument.name: argument.type for argument in kernel.arguments}
    source: ASTSource = Source(function, signature, {}, _attributes(kernel))
    make_ir = source.make_ir

    def make_alone(*arguments: Any) -> Any:
        with parsing:
            return make_ir(*arguments)

    source.make_ir = make_alone
    with parsing:
        # Its first use parses the function, and Triton keeps it.
        _ = function.cache_key
    return source


def _attributes(kernel: Kernel) -> dict[tuple[int, ...], list[list[Any]]]:
    return {
        (position,): [["tt.divisibility", argument.divisibility]]
        for position, argument in enumerate(kernel.arguments)
        if argument.divisibility > 1
    }


def _options(kernel: Kernel, target: Target) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_warps": kernel.options.num_warps,
        "num_stages": kernel.options.num_stages,
        "enable_fp_fusion": FP_FUSION,
    }
    if kernel.options.maxnreg and target.is_nvidia:
        options["maxnreg"] = kernel.options.maxnreg
    if kernel.options.early is True and target.is_nvidia:
        options["launch_pdl"] = True
    return options


def first_line(error: BaseException) -> str:
    """Returns an exception as one line: its type and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"


@functools.cache
def interpreting() -> bool:
    """Returns whether Triton runs kernels on the CPU (`TRITON_INTERPRET=1`), without importing Triton."""
    knobs: Any = sys.modules.get("triton.knobs")
    if knobs is not None:
        return bool(knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@contextlib.contextmanager
def launching() -> Iterator[None]:
    """Blocks other threads' launches in the interpreter, and skips work without effect in this one.

    While a kernel runs, the interpreter replaces parts of Triton for all threads. It repeats each int32
    operation in int64 for an assertion that only its debug mode has. It also replaces the functions of
    `triton.language` at each call between functions of a kernel. The launch has already replaced them.
    """
    from triton.runtime import interpreter

    with _lock:
        builder = interpreter.interpreter_builder
        options, replace = builder.options, interpreter._patch_lang
        seen: set[int] = set()

        def replace_once(function: Any) -> Any:
            # The replaced names depend only on the globals of the function's module.
            names = id(function.__globals__)
            if names in seen:
                return interpreter._LangPatchScope()
            seen.add(names)
            return replace(function)

        builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)
        interpreter._patch_lang = replace_once
        try:
            yield
        finally:
            builder.options, interpreter._patch_lang = options, replace
