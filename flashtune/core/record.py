"""What is known of a candidate: resources, verdict, measurement; and the record that keeps it."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from flashtune.core.config import Config
from flashtune.core.errors import TableError
from flashtune.core.kernel import Specialization
from flashtune.core.mask_sharing import MaskSharing
from flashtune.core.problem import Problem
from flashtune.core.target import Target, TargetName

NonNegative = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Milliseconds = Annotated[float, msgspec.Meta(gt=0)]
# `$` would let a line break pass at the end.
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
ShortText = Annotated[str, msgspec.Meta(max_length=400)]


class Outcome(enum.StrEnum):
    """How a candidate ended. Everything but `ok` is a violated constraint for the sampler."""

    OK = "ok"
    INFEASIBLE = "infeasible"
    COMPILE_ERROR = "compile_error"
    WRONG_RESULT = "wrong_result"
    LAUNCH_ERROR = "launch_error"
    TIMEOUT = "timeout"


class Provenance(enum.StrEnum):
    """Where a record's time comes from."""

    MEASURED = "measured"
    PREDICTED = "predicted"


class Standing(enum.StrEnum):
    """What dispatch knows of a selection on this machine."""

    TIMED = "timed"
    VERIFIED = "verified"
    UNPROVEN = "unproven"


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the compiler says of a kernel on a target.

    Attributes:
        sram_bytes: Shared memory per block.
        tensor_memory_columns: Columns of tensor memory (sm_100), else 0.
        registers: Registers per thread.
        spill_bytes: Local memory per thread, in bytes.
        serialized_wgmma: Whether ptxas had to serialise asynchronous matrix instructions.
        compile_seconds: Wall clock of the compilation.
        warps: Warps of a block, where the compiler added some to those that it was told: kernels whose
            warps are specialised run producers in warps of their own.
    """

    sram_bytes: NonNegative
    tensor_memory_columns: NonNegative = 0
    registers: NonNegative = 0
    spill_bytes: NonNegative = 0
    serialized_wgmma: bool = False
    compile_seconds: Seconds = 0.0
    # Left out of stored records where it says nothing, so that those made before it hash as they did.
    warps: NonNegative | msgspec.UnsetType = msgspec.UNSET


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a kernel's results compare with a float64 reference.

    Attributes:
        passed: Whether every check passed.
        worst_ratio: Largest row error over what the gate allows for the row (1.0 is the limit).
        checks: Problems and probes compared.
        failed: Name of the first check that failed, empty if none.
        device: The GPU's name, or `interpreter`.
        probes: The probes that were passed, and `delays` where warps fell behind as well; left out where
            one failed.

    Raises:
        TableError: It says that the kernel passed, and its other fields contradict that.
    """

    passed: bool
    worst_ratio: float
    checks: NonNegative
    failed: ShortText
    device: ShortText
    # Left out of stored records where it says nothing, as `Resources.warps`.
    probes: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=32)] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if not self.passed:
            return
        if self.failed:
            raise TableError("a verdict says that a kernel passed and names a check that failed")
        if not self.checks:
            raise TableError("a verdict says that a kernel passed and counts no check")
        if not 0 <= self.worst_ratio <= 1:
            raise TableError(
                f"a verdict says that a kernel passed with {self.worst_ratio:g} of the error that is allowed"
            )


class PeerTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Median time of another implementation in the same run, in ms."""

    name: ShortText
    ms: Milliseconds


class SharedTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Median times of a kernel and of SDPA's backends in one run with a shared mask, in ms."""

    sharing: MaskSharing
    ms: Milliseconds
    peers: tuple[PeerTime, ...] = ()


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GPU time of one kernel at one problem, cold L2, in ms.

    Attributes:
        ms: Median.
        p20: 20th percentile.
        p80: 80th percentile.
        samples: How many samples.
        throttled: Whether the clock was held down while sampling.
        peers: Other implementations timed in the same run.
        shared: Times with a shared mask, of a problem that SDPA computes by a mask. The other times are those
            with a mask of its own for each sequence, head and row.

    Raises:
        TableError: The median lies outside of the percentiles, or one way of sharing is there twice.
    """

    ms: Milliseconds
    p20: Milliseconds
    p80: Milliseconds
    samples: NonNegative
    throttled: bool = False
    peers: tuple[PeerTime, ...] = ()
    # Left out of stored records where it says nothing, as `Resources.warps`.
    shared: tuple[SharedTime, ...] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if not self.p20 <= self.ms <= self.p80:
            raise TableError(
                f"a median of {self.ms:g} ms is not between percentiles of {self.p20:g} and {self.p80:g} ms"
            )
        ways = [one.sharing for one in self.shared or ()]
        if len(set(ways)) < len(ways):
            raise TableError("a measurement has two times for one way of sharing a mask")


class Versions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What made a record. `template` is the hash of the family's template and its macros."""

    flashtune: ShortText
    template: ShortText
    torch: ShortText
    triton: ShortText
    ptxas: ShortText
    driver: ShortText

    @property
    def compilers(self) -> tuple[str, str]:
        """The versions that decide a binary of one source: Triton and its ptxas."""
        return self.triton, self.ptxas

    @property
    def builders(self) -> tuple[str, str, str]:
        """The versions that decide how a source is built and runs: Triton, its ptxas, the driver."""
        return self.triton, self.ptxas, self.driver

    @property
    def makers(self) -> tuple[str, str, str, str]:
        """The versions that decide a binary and how it runs: template, Triton, its ptxas, the driver."""
        return self.template, self.triton, self.ptxas, self.driver


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that is known of one candidate.

    `family` is `standard` or `sdpa` for the baselines, whose `config` is None. `message` is one
    line that says why an outcome is not `ok`. `gpu` has the facts of a GPU that `flashtune targets` does
    not list, so that the record can be checked on other machines.
    """

    problem: Problem
    target: TargetName
    family: ShortText
    config: Config | None
    specialization: Specialization
    kernel: Digest | None
    outcome: Outcome
    provenance: Provenance
    versions: Versions
    resources: Resources | None = None
    verdict: Verdict | None = None
    measurement: Measurement | None = None
    message: ShortText = ""
    # Left out of stored records where it says nothing, as `Resources.warps`.
    gpu: Target | msgspec.UnsetType = msgspec.UNSET

    @property
    def ms(self) -> float | None:
        """The median time, where there is one."""
        return self.measurement.ms if self.measurement else None


class Forecast(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Why a config serves a shape that nobody tuned.

    Attributes:
        ms: What it is expected to take there.
        nearest: The record of the nearest tuned shape.
        nearest_ms: What that one's config is expected to take.
        peers: What other implementations are expected to take, as far as they were timed at such shapes.
    """

    ms: Milliseconds
    nearest: Record
    nearest_ms: Milliseconds
    peers: tuple[PeerTime, ...] = ()


class Selection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The record that dispatch uses for a problem on a target, and how well it is known there.

    `source` says where it was found: `database`, `shipped`, `nearest`, `default`. Of a shape that nobody
    tuned, `forecast` says why it was chosen.
    """

    record: Record
    standing: Standing
    source: ShortText = "database"
    forecast: Forecast | None = None

    @property
    def measured(self) -> Record:
        """The record of the shape whose measurements stand for the problem's."""
        return self.forecast.nearest if self.forecast else self.record
