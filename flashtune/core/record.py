"""`Record`: the resources, verdict and measurement of a candidate; `Selection`; ties of measurements."""

import enum
import math
from typing import Annotated

import msgspec

from flashtune.core.config import Config
from flashtune.core.errors import TableError
from flashtune.core.kernel import Specialization
from flashtune.core.mask_sharing import MaskSharing
from flashtune.core.problem import Problem
from flashtune.core.target import Target, TargetName, names_gpu

NonNegative = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Milliseconds = Annotated[float, msgspec.Meta(gt=0)]
# `$` would allow a line break at the end.
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
ShortText = Annotated[str, msgspec.Meta(max_length=400)]

# In a normal distribution the 20th and 80th percentiles differ by 1.683 standard deviations. The standard
# error of a median is 1.253 standard deviations over the root of the number of samples.
ERROR_OF_MEDIAN = 1.253 / 1.683
# Two medians count as different if they differ by this many standard errors of their difference.
CONFIDENCE = 2.0
# Resolution of the GPU's event timer, in ms.
TIMER_STEP = 0.0005


class Outcome(enum.StrEnum):
    """How a trial ended. Any outcome but `ok` is a constraint violation for the sampler."""

    OK = "ok"
    INFEASIBLE = "infeasible"
    COMPILE_ERROR = "compile_error"
    WRONG_RESULT = "wrong_result"
    LAUNCH_ERROR = "launch_error"
    TIMEOUT = "timeout"


class Provenance(enum.StrEnum):
    """The origin of a record's time."""

    MEASURED = "measured"
    PREDICTED = "predicted"


class VerificationStatus(enum.StrEnum):
    """The verification status of a selection on this machine."""

    TIMED = "timed"
    VERIFIED = "verified"
    UNPROVEN = "unproven"


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The compiler's report on a kernel for a target."""

    sram_bytes: NonNegative  # Shared memory per CTA.
    tensor_memory_columns: NonNegative = 0  # Columns of tensor memory (sm_100), otherwise 0.
    registers: NonNegative = 0  # Registers per thread; of the main kernel, if a launch has several.
    spill_bytes: NonNegative = 0  # Local memory per thread, in bytes.
    # Whether ptxas serialised asynchronous matrix instructions (WGMMA).
    serialized_wgmma: bool = False
    compile_seconds: Seconds = 0.0  # Wall clock of the compilation.
    # Warps of a CTA if the compiler added some: warp-specialised kernels run producers in additional warps.
    # Omitted from stored records if unset, so that the hashes of older records stay the same.
    warps: NonNegative | msgspec.UnsetType = msgspec.UNSET


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a kernel's results compare with a float64 reference."""

    passed: bool  # Whether every check passed.
    worst_ratio: float  # The largest ratio of a row's error to its tolerance (1.0 is the limit).
    checks: NonNegative  # The number of compared problems and probes.
    failed: ShortText  # Name of the first check that failed, empty if none failed.
    device: ShortText  # The GPU's name, or `interpreter`.
    # The probes that passed, and `delays` if schedule fuzzing passed too. Unset if one failed.
    # Omitted from stored records if unset, like `Resources.warps`.
    probes: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=32)] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if not self.passed:
            return
        if self.failed:
            raise TableError("a verdict is a pass and names a failed check")
        if not self.checks:
            raise TableError("a verdict is a pass with 0 checks")
        if not 0 <= self.worst_ratio <= 1:
            raise TableError(f"a verdict is a pass with {self.worst_ratio:g} of the allowed error")


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
    """GPU time of one kernel at one problem, cold L2, in ms."""

    ms: Milliseconds  # Median.
    p20: Milliseconds  # 20th percentile.
    p80: Milliseconds  # 80th percentile.
    samples: NonNegative
    throttled: bool = False  # Whether the clock was throttled during sampling.
    peers: tuple[PeerTime, ...] = ()  # Other implementations timed in the same run.
    # Times with a shared mask, for a problem that SDPA computes with a mask. The other times have a separate
    # mask for each sequence, head and row.
    # Omitted from stored records if unset, like `Resources.warps`.
    shared: tuple[SharedTime, ...] | msgspec.UnsetType = msgspec.UNSET
    # The UUID of the physical GPU, and the clock of its SMs after the samples. Tables omit both.
    gpu_uuid: ShortText | msgspec.UnsetType = msgspec.UNSET
    clock_mhz: NonNegative | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if not self.p20 <= self.ms <= self.p80:
            raise TableError(
                f"a median of {self.ms:g} ms is not between percentiles of {self.p20:g} and {self.p80:g} ms"
            )
        ways = [time.sharing for time in self.shared or ()]
        if len(set(ways)) < len(ways):
            raise TableError("a measurement has two times for one way of sharing a mask")


class Versions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The versions that produced a record. `template` is the hash of the family's template and its macros."""

    flashtune: ShortText
    template: ShortText
    torch: ShortText
    triton: ShortText
    ptxas: ShortText
    driver: ShortText

    @property
    def compilers(self) -> tuple[str, str]:
        """The versions that determine the binary of a source: Triton and its ptxas."""
        return self.triton, self.ptxas

    @property
    def driver_branch(self) -> str:
        """The driver's major version. Later releases of a branch only fix faults."""
        return self.driver.partition(".")[0]

    @property
    def builders(self) -> tuple[str, str, str]:
        """The versions that determine how a source is built and runs: Triton, its ptxas, the driver."""
        return self.triton, self.ptxas, self.driver_branch

    @property
    def makers(self) -> tuple[str, str, str, str]:
        """The versions that determine a binary and how it runs: template and `builders`."""
        return self.template, *self.builders


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The results of one candidate.

    `family` is `unfused` or `sdpa` for baselines, and their `config` is None. `message` is one line with the
    reason for an outcome other than `ok`. `gpu` has the properties of a GPU that `flashtune targets` does not
    list, so that other machines can check the record.
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
    # Omitted from stored records if unset, like `Resources.warps`.
    gpu: Target | msgspec.UnsetType = msgspec.UNSET

    @property
    def ms(self) -> float | None:
        """The median time, None without a measurement."""
        return self.measurement.ms if self.measurement else None

    def is_proven(self, versions: Versions) -> bool:
        """Whether the receipt is valid: the kernel passed on its GPU and runs alike under these versions."""
        verdict = self.verdict
        passed = verdict is not None and verdict.passed and names_gpu(self.target, verdict.device)
        return passed and self.versions.makers == versions.makers


class TransferEstimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The estimated times that led to the config of an untuned shape."""

    ms: Milliseconds  # The estimated time of the config.
    nearest: Record  # The record of the nearest tuned shape.
    nearest_ms: Milliseconds  # The estimated time of that record's config.
    # The estimated times of other implementations that were timed at such shapes.
    peers: tuple[PeerTime, ...] = ()


class Selection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The record that dispatch uses for a problem on a target, and its verification status there.

    `source` is the origin: `database`, `shipped`, `estimated` or `default`. For an untuned shape, `forecast`
    has the reason for the choice.
    """

    record: Record
    standing: VerificationStatus
    source: ShortText = "database"
    forecast: TransferEstimate | None = None

    @property
    def is_tuned(self) -> bool:
        """Whether exactly this problem is tuned."""
        return self.source in ("database", "shipped")

    @property
    def measured(self) -> Record:
        """The measured record: for an untuned shape, that of the nearest tuned one."""
        return self.forecast.nearest if self.forecast else self.record

    def proves(self, digest: str) -> bool:
        """Whether the receipt covers this kernel with the installed versions."""
        return self.standing is not VerificationStatus.UNPROVEN and self.record.kernel == digest


def is_tied(time: Measurement, fastest: Measurement) -> bool:
    """Returns whether a time differs from the fastest one by no more than noise."""
    noise = math.hypot(standard_error(time), standard_error(fastest))
    margin = TIMER_STEP + CONFIDENCE * noise if fastest.samples else 0.0
    return time.ms - fastest.ms <= margin


def standard_error(measurement: Measurement) -> float:
    """Returns the standard error of a measurement's median, in ms."""
    if measurement.samples == 0:
        return 0.0
    return ERROR_OF_MEDIAN * (measurement.p80 - measurement.p20) / math.sqrt(measurement.samples)
