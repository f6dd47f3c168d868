"""A compiler of which an audit is made, without one."""

import zlib
from concurrent.futures import Future

from flashtune.core.record import Outcome, Resources
from flashtune.tuner.candidates import Candidate, SearchTask, demand
from flashtune.tuner.execution.compile_pool import Compiled


class Scripted:
    """A compiler that reports the modelled size times a factor, and refuses about every fifth kernel.

    Where a model gives no size, it reports one of the sizes in `silent`, and refuses without any.
    """

    def __init__(self, factor: float, silent: tuple[int, ...] = ()) -> None:
        self._factor = factor
        self._silent = silent

    def submit(self, scope: SearchTask, candidate: Candidate) -> Future[Compiled]:
        done: Future[Compiled] = Future()
        number = zlib.crc32(candidate.config.label().encode())
        modelled = demand(scope, candidate).sram_bytes
        if number % 5 == 0 or not (modelled or self._silent):
            done.set_result(Compiled(Outcome.COMPILE_ERROR))
            return done
        silent = self._silent[number % len(self._silent)] if self._silent else 0
        sram_bytes = int(modelled * self._factor) or silent
        done.set_result(Compiled(Outcome.OK, resources=Resources(sram_bytes=sram_bytes)))
        return done
