"""Tests of the outcomes of mutant runs."""

import time
from collections.abc import Callable, Iterator

import pytest
from pebble import ProcessExpired

from flashtune.core.kernel import Kernel
from flashtune.core.record import Verdict
from flashtune.core.target import find_target
from flashtune.templates.registry import family_names
from tests.mutants import jobs, right, runner
from tests.mutants.catalogue import gpu_mutants
from tests.mutants.core import Mutant, broken, rendered
from tests.mutants.jobs import Checked
from tests.mutants.portable import pools
from tests.mutants.portable.pools import Plan
from tests.mutants.results import Fate, Found
from tests.support.jobs import FakePool

H200 = find_target("h200")
MUTANTS = gpu_mutants()
RIGHT = Verdict(True, 0.5, 70, "", "a GPU")
WRONG = Verdict(False, 9.0, 70, "random q=1 kv=2 heads=1x1: row errors 9 of 1 allowed", "a GPU")


class Gpu(FakePool):
    """A fake GPU on which kernels behave as given, with and without delays.

    Attributes:
        checks: What was verified, in order.
    """

    def __init__(
        self,
        behaviour: dict[str, Callable[[int], Checked]],
        late: dict[str, Callable[[int], Checked]] | None = None,
    ) -> None:
        super().__init__(
            {
                jobs.compile_fitting: lambda kernel, target: "",
                jobs.warm: lambda: None,
                jobs.check: self.check,
                jobs.check_late: self.check_late,
                jobs.differ: lambda *_: "",
            }
        )
        self._behaviour = behaviour
        self._late = late or {}
        self.checks: list[str] = []

    def check(self, kernel: Kernel, problem: object, config: object, level: object, seed: int) -> Checked:
        self.checks.append(kernel.digest)
        behave = self._behaviour.get(kernel.digest)
        return behave(seed) if behave else Checked(RIGHT, "", 1.0)

    def check_late(self, kernel: Kernel, problem: object, config: object, seed: int) -> Checked:
        behave = self._late.get(kernel.digest)
        return behave(seed) if behave else Checked(None, "", 1.0)


def refuse(seed: int) -> Checked:
    return Checked(WRONG, "", 1.0)


def hang(seed: int) -> Checked:
    raise TimeoutError


def die(seed: int) -> Checked:
    error = ProcessExpired("died")  # type: ignore[no-untyped-call]
    error.exitcode = 70
    raise error


def run_out(seed: int) -> Checked:
    raise MemoryError("out of memory")


@pytest.fixture
def plan() -> Plan:
    return Plan(H200, 7, time.monotonic() + 600.0, 2)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Gpu], Gpu]:
    return lambda gpu: gpu.use(monkeypatch, pools)


def digest(mutant: Mutant) -> str:
    return broken(mutant).digest


def of_kind(**kind: bool) -> Iterator[Mutant]:
    return (
        mutant for mutant in MUTANTS if all(getattr(mutant, name) == value for name, value in kind.items())
    )


def test_outcomes(install: Callable[[Gpu], Gpu], plan: Plan) -> None:
    steady = of_kind(racy=False, hangs=False)
    refused, equal, other, dying, hanging = (next(steady) for _ in range(5))
    racy = next(of_kind(racy=True))
    gpu = Gpu(
        {
            digest(refused): refuse,
            digest(dying): die,
            digest(hanging): hang,
            digest(racy): lambda seed: Checked(WRONG if seed == 9 else RIGHT, "", 1.0),
        }
    )
    install(gpu)
    gpu.replaced[jobs.differ] = lambda right, broken, *_: "random" if broken.digest == digest(other) else ""
    mutants = (refused, equal, other, dying, hanging, racy)
    told: list[Found] = []
    controls, results = runner.run_mutants(mutants, plan, told.append)
    assert [result.fate for result in results] == [
        Fate.REFUSED,
        Fate.EQUIVALENT,
        Fate.SURVIVED,
        Fate.DIED,
        Fate.HUNG,
        Fate.REFUSED,
    ]
    assert sorted(told, key=str) == sorted(results, key=str)
    assert results[0].caught_by == WRONG.failed
    assert all(control.passed and control.checks == 70 for control in controls)
    assert len(controls) == len({mutant.subject for mutant in mutants})
    # Another mutant may have caused a hang, so it is tried again alone. Races are looked for until they show.
    assert gpu.checks.count(digest(hanging)) == 2
    assert gpu.checks.count(digest(racy)) == 3


def test_uncompilable_mutants_and_those_after_the_deadline_are_not_run(
    install: Callable[[Gpu], Gpu], plan: Plan
) -> None:
    first, second = (next(mutants) for mutants in (of_kind(racy=False, hangs=False), of_kind(hangs=True)))
    install(Gpu({})).replaced[jobs.compile_fitting] = lambda kernel, target: (
        "no" if kernel.digest == digest(first) else ""
    )
    _, results = runner.run_mutants((first, second), plan._replace(deadline=0.0), lambda result: None)
    assert [result.fate for result in results] == [Fate.NOT_COMPILED, Fate.NOT_RUN]


@pytest.mark.parametrize(
    ("end", "fate"),
    [(refuse, Fate.DELAYED), (hang, Fate.DELAYED), (run_out, Fate.NOT_RUN)],
)
def test_mutants_detected_only_with_delays_are_separate(
    end: Callable[[int], Checked], fate: Fate, install: Callable[[Gpu], Gpu], plan: Plan
) -> None:
    late, equal = (next(of_kind(racy=racy, hangs=False)) for racy in (True, False))
    install(Gpu({}, {digest(late): end}))
    _, results = runner.run_mutants((late, equal), plan, lambda result: None)
    assert [result.fate for result in results] == [fate, Fate.EQUIVALENT]


@pytest.mark.parametrize("end", [refuse, run_out])
def test_correct_kernel_refused_only_with_delays_is_refused_wrongly(
    end: Callable[[int], Checked], install: Callable[[Gpu], Gpu], plan: Plan
) -> None:
    subjects = right.sampled_subjects(2, 3, H200)[:3]
    install(Gpu({}, {rendered(subjects[1]).digest: end})).replaced[jobs.confirm] = lambda subject, seed: False
    controls = right.verify_right(subjects, plan, lambda control: None)
    assert [control.wrongly_refused for control in controls] == [False, True, False]
    assert controls[1].delayed
    assert controls[1].failed


def test_failing_check_detects_no_mutant(install: Callable[[Gpu], Gpu], plan: Plan) -> None:
    mutants = tuple(next(of_kind(racy=racy, hangs=False)) for racy in (False, True))
    install(Gpu({digest(mutant): run_out for mutant in mutants}))
    _, results = runner.run_mutants(mutants, plan, lambda result: None)
    assert [(result.fate, result.caught_by) for result in results] == [
        (Fate.NOT_RUN, "MemoryError: out of memory")
    ] * 2


@pytest.mark.slow
def test_refused_correct_kernels_are_checked_again(install: Callable[[Gpu], Gpu], plan: Plan) -> None:
    subjects = right.sampled_subjects(6, 3, H200)
    assert right.sampled_subjects(6, 3, H200) == subjects
    assert {subject.family for subject in subjects} == set(family_names())
    with_features = {subject.family for subject in subjects if subject.problem.features}
    assert {"forward_hopper", "backward_fused"} <= with_features
    wrong, tight = subjects[2], subjects[5]
    gpu = install(Gpu({rendered(subject).digest: refuse for subject in (wrong, tight)}))
    gpu.replaced[jobs.confirm] = lambda subject, seed: subject == tight
    controls = right.verify_right(subjects, plan, lambda control: None)
    assert [control.passed for control in controls] == [subject not in {wrong, tight} for subject in subjects]
    assert [control.confirmed for control in controls if not control.passed] == [False, True]
