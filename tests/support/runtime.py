"""The session of this process as tests need it: without caches, or with another machine."""

import contextlib
from collections.abc import Iterator

from flashtune.core import notices
from flashtune.dispatch.masked_sdpa import MaskTrials
from flashtune.dispatch.platform import Platform
from flashtune.dispatch.tables import Tables, tuned_records
from flashtune.launch.compiler_process import CompilerProcess
from flashtune.runtime.kernel_loader import KernelLoader
from flashtune.runtime.self_check import SelfChecks
from flashtune.runtime.session import SESSION

LOADER = SESSION.loader


class Tuned(Platform):
    """This machine's GPU with other tuned records."""

    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self.tables = tables

    def records(self, target_name: str) -> Tables:
        return self.tables


def forget_all() -> None:
    """Clears all caches, as in a new process. Loaded kernels stay."""
    assert SESSION.loader is LOADER, "call it outside of `using`: it would drop the checks there"
    SESSION.forget()
    SESSION.loader.checks = SelfChecks()
    SESSION.loader.rendered.clear()
    SESSION.platform.mask_trials = MaskTrials(SESSION.platform.sdpa_backend)
    tuned_records.cache_clear()
    notices._seen_messages.clear()


@contextlib.contextmanager
def using(
    platform: Platform | None = None,
    loader: KernelLoader | None = None,
    compiler: CompilerProcess | None = None,
) -> Iterator[None]:
    """Prepares calls with other parts in the context, and forgets these calls."""
    before = SESSION.platform, SESSION.loader, SESSION.compiler
    SESSION.forget()
    SESSION.platform = platform or SESSION.platform
    SESSION.loader = loader or SESSION.loader
    SESSION.compiler = compiler or SESSION.compiler
    try:
        yield
    finally:
        SESSION.wait()
        SESSION.forget()
        SESSION.platform, SESSION.loader, SESSION.compiler = before
