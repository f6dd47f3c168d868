"""The jobs of a queue as search requests, and the versions that a worker needs for them."""

import hashlib
import os
import secrets
import socket

from flashtune.core import VERSION
from flashtune.core.errors import UsageError, printable
from flashtune.core.machine import ptxas_version, triton_version
from flashtune.core.record import Provenance
from flashtune.core.target import Target
from flashtune.db.queue import Claimant, JobSpec, StateRow
from flashtune.dispatch.versions import current_versions
from flashtune.templates.registry import family_names, find_family, template_hash
from flashtune.tuner.candidates import open_spaces
from flashtune.tuner.search.request import Effort, SearchRequest, budget_of


def queue_versions() -> str:
    """Returns the versions of this installation that a job's worker must have too."""
    templates = hashlib.sha256("".join(map(template_hash, sorted(family_names()))).encode())
    return f"flashtune {VERSION}, Triton {triton_version()}, templates {templates.hexdigest()[:12]}"


def claimant(target: Target, device: int | None) -> Claimant:
    """Returns a worker of this process for a GPU, or for predicted times, under a name of its own."""
    branch = current_versions(next(iter(family_names()))).driver_branch
    place = f"{printable(socket.gethostname())[:60]}:{'-' if device is None else device}"
    return Claimant(
        name=f"{place}:{os.getpid()}:{secrets.token_hex(4)}",
        target=target.name,
        provenance=Provenance.PREDICTED if device is None else Provenance.MEASURED,
        versions=queue_versions(),
        build=f"ptxas {ptxas_version()}, driver {branch}",
    )


def spec_of(request: SearchRequest) -> JobSpec:
    """Returns the job of a search. Without a device, its times are predicted."""
    budget, own = request.budget, (request.budget.trials, request.budget.seconds)
    choices = ((effort, limits) for limits in ((None, None), own) for effort in Effort)
    found = next((choice for choice in choices if budget_of(choice[0], *choice[1]) == budget), None)
    if found is None or request.spaces or request.experience:
        raise UsageError("a queue takes searches of whole families with the budget of an effort")
    effort, (trials, seconds) = found
    return JobSpec(
        problem=request.problem,
        target=request.target.name,
        provenance=Provenance.PREDICTED if request.device is None else Provenance.MEASURED,
        effort=effort.value,
        trials=trials,
        seconds=seconds,
        families=request.families,
        seed=request.seed,
        lse=request.lse,
        retry_failed=request.retry_failed,
    )


def request_of(spec: JobSpec, target: Target, device: int | None = None) -> SearchRequest:
    """Returns the search of a job on a device.

    Raises:
        UsageError: The job names a family that does not exist, or none computes its problem.
    """
    for name in spec.families:
        find_family(name)
    open_spaces(spec.problem, target, spec.families)
    return SearchRequest(
        problem=spec.problem,
        target=target,
        device=device,
        budget=budget_of(Effort(spec.effort), spec.trials, spec.seconds),
        families=spec.families,
        seed=spec.seed,
        retry_failed=spec.retry_failed,
        lse=spec.lse,
    )


def idle_reason(rows: list[StateRow], worker: Claimant, waiting: int) -> str:
    """Returns why a worker has no job. `waiting` is the number of open jobs that it may run later."""
    if waiting:
        return f"the {waiting} open jobs for {worker.target} run elsewhere, or need another driver than here"
    wanted = [row for row in rows if row.is_open]
    versions = sorted({row.versions for row in wanted if row.target == worker.target} - {worker.versions})
    if versions:
        return (
            f"the open jobs for {worker.target} need {' or '.join(versions)}, and this worker has "
            f"{worker.versions}: install the same versions"
        )
    others = ", ".join(sorted({row.target for row in wanted} - {worker.target}))
    return f"no job for {worker.target} is open" + (f": the open jobs are for {others}" if others else "")
