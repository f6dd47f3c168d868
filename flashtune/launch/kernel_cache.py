"""The kernel of a record, from a verified copy of its source if there is one, and the cache of binaries.

A process that serves a tuned shape then does not import the template engine. The copy is the file that
`compilation.load_module` writes. It is used only if its digest is that of the record, and no other user can
have written it. So modified code is never used. Each kernel is compiled and loaded once per process for all
shapes.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from flashtune.core.errors import KernelError
from flashtune.core.files import read_own
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.record import Record
from flashtune.core.target import Target
from flashtune.launch.binding import Binary, compile_binary
from flashtune.launch.compilation import MAX_SOURCE_BYTES, kernel_folder, parsing
from flashtune.launch.launcher import load
from flashtune.templates.family import Family, kernel_of_source
from flashtune.templates.registry import find_family, template_hash


def kernel_of(record: Record, specialization: Specialization) -> Kernel:
    """Returns the kernel of a record's config for tensors of a specialization."""
    family = find_family(record.family)
    kernel = proven_copy(record, family, specialization)
    if kernel is None:
        from flashtune.templates.rendering import render

        assert record.config is not None
        with parsing:
            kernel = render(family, record.problem, record.config, specialization)
    return kernel


def proven_copy(record: Record, family: Family, specialization: Specialization) -> Kernel | None:
    """Returns the kernel of a record from its verified copy, or None."""
    current = record.versions.template == template_hash(record.family)
    if (
        record.config is None
        or record.kernel is None
        or record.specialization != specialization
        or not current
    ):
        return None
    path = kernel_folder() / f"{record.family}_{record.kernel}.py"
    try:
        source = read_own(path, MAX_SOURCE_BYTES).decode()
    except (OSError, UnicodeDecodeError):
        return None
    kernel = kernel_of_source(family, record.problem, record.config, specialization, source)
    return kernel if kernel.digest == record.kernel else None


class Binaries:
    """The binaries of kernels, each compiled and loaded once. They stay loaded."""

    def __init__(
        self,
        compiled: Callable[[Kernel, Target], Binary] = compile_binary,
        load: Callable[[Any, torch.device], object] = load,
    ) -> None:
        """Makes binaries by `compiled` and loads each of their parts by `load`."""
        self._compiled, self._load = compiled, load
        # An error is kept too, so that no new shape repeats the attempt.
        self._binaries: dict[tuple[Kernel, Target, torch.device], Binary | KernelError] = {}
        # Compilations that threads run. A forked process does not have these threads.
        self._started: dict[tuple[Kernel, Target, torch.device], Future[Binary]] = {}
        os.register_at_fork(after_in_child=self._started.clear)

    def start(self, kernel: Kernel, target: Target, device: torch.device) -> None:
        """Starts a thread that compiles a kernel. `of` waits for it."""
        key = kernel, target, device
        if key not in self._binaries and key not in self._started:
            thread = ThreadPoolExecutor(1)
            self._started[key] = thread.submit(self._compiled, kernel, target)
            # The thread ends after the compilation.
            thread.shutdown(wait=False)

    def of(self, kernel: Kernel, target: Target, device: torch.device) -> Binary:
        """Returns a kernel's binary, loaded onto a device."""
        key = kernel, target, device
        binary = self._binaries.get(key)
        if binary is None:
            started = self._started.pop(key, None)
            try:
                binary = self._compiled(kernel, target) if started is None else started.result()
                # Load before the self-check. Any compiler that Triton runs for the launch has then finished.
                for part in binary.values():
                    self._load(part, device)
            except KernelError as error:
                # Without the traceback, which would keep the caller's tensors alive.
                binary = type(error)(str(error))
            self._binaries[key] = binary
        if isinstance(binary, KernelError):
            # A copy, for the same reason.
            raise type(binary)(str(binary))
        return binary
