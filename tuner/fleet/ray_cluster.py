"""Searches on the GPUs of a Ray cluster, with compilers on all of its nodes."""

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from flashtune.core.errors import UsageError, printable
from flashtune.core.notices import warn_once
from flashtune.core.target import Target
from flashtune.db.store import Store
from flashtune.dispatch.versions import current_versions
from flashtune.launch.compilation import first_line
from flashtune.tuner.execution.evaluation import Measurer
from flashtune.tuner.search.executors.local import LocalExecutor

if TYPE_CHECKING:
    from flashtune.tuner.fleet.ray_nodes import Identity

# Time for the start of a process on a node, which imports torch.
START_SECONDS = 120.0
CONNECT_SECONDS = 5.0
# Calls of a process at once.
CALLS = 1000
INSTALL = "install flashtune[ray]"


class Classes(NamedTuple):
    """The classes of a cluster's processes."""

    gpu: type
    compiler: type


class Cluster(NamedTuple):
    """The processes of a connected cluster."""

    gpus: "dict[Any, tuple[str, Identity]]"  # Actors of `GpuNode`, their names in messages, and their GPUs.
    compilers: dict[Any, int]  # Actors of `CompileNode`, and the number of processes of each.
    driver: str  # Version of the GPU driver.


@contextlib.contextmanager
def open_cluster(
    address: str, target: Target, jobs: int | None = None, classes: Classes | None = None
) -> Iterator[Cluster]:
    """Connects to a cluster and starts its processes. They end with the context.

    Args:
        address: Address of the cluster, `auto` for that of this machine, or `local` to start one here.
        target: The model of the GPUs to use.
        jobs: The number of compiler processes of a node. By default, one for each free core.
        classes: The classes that replace `GpuNode` and `CompileNode` in tests.

    Raises:
        UsageError: Ray is missing or has another version, the cluster cannot be reached, has no free GPU of
            the model, or other versions of flashtune, Triton or ptxas.
    """
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError:
        raise UsageError(f"--ray needs Ray: {INSTALL}") from None
    from flashtune.tuner.fleet.ray_nodes import CompileNode, GpuNode

    classes = classes or Classes(GpuNode, CompileNode)
    where = printable(address)
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    with _own_token() if address == "local" else contextlib.nullcontext():
        try:
            _require_answer(os.environ.get("RAY_ADDRESS", "") if address == "auto" else address)
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except (OSError, ValueError, OverflowError) as error:
            raise UsageError(
                f"no Ray cluster answers at {where} ({first_line(error)}): name its address, such as "
                "HOST:6379"
            ) from None
        except (RuntimeError, RayError) as error:
            raise UsageError(
                f"the Ray cluster at {where} cannot be used ({first_line(error)}): install its versions of "
                "Ray and Python"
            ) from None
        try:
            yield _started(ray, where, target, jobs, classes)
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _own_token() -> Iterator[None]:
    """Gives a new cluster a token of its own. Ray would write one for later clusters into `~/.ray`."""
    # Ray sets the mode itself.
    names = ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE")
    before = {name: os.environ.get(name) for name in names}
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _require_answer(address: str) -> None:
    """Raises an `OSError` if nothing listens at HOST:PORT. Ray would try again for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


def _started(ray: Any, where: str, target: Target, jobs: int | None, classes: Classes) -> Cluster:
    """Starts a process for each GPU, and one for the compilers of each node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    gpus: dict[Any, str] = {}
    compilers: dict[Any, tuple[str, int]] = {}
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        count, cores = (int(node["Resources"].get(kind, 0)) for kind in ("GPU", "CPU"))
        name, width = node["NodeManagerHostname"], jobs or max(1, cores - count)
        options = {
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            "max_restarts": -1,
            "max_concurrency": CALLS,
        }
        for number in range(count):
            actor = ray.remote(classes.gpu).options(num_gpus=1, num_cpus=0, **options).remote()
            gpus[actor] = f"GPU {number} of {name}"
        # With fewer free cores than processes, Ray would never start the actor.
        needed = min(width, max(0, cores - count))
        actor = ray.remote(classes.compiler).options(num_cpus=needed, **options).remote(width)
        compilers[actor] = f"the compilers of {name}", width
    names = gpus | {actor: name for actor, (name, _) in compilers.items()}
    known = _identities(ray, names)
    models = {found.name for actor in gpus if actor in known and (found := known[actor].target)}
    chosen = tuple(actor for actor in gpus if actor in known and known[actor].target == target)
    if not chosen:
        free = " and ".join(sorted(models)) or "none"
        raise UsageError(
            f"no free GPU of the Ray cluster at {where} is {target.name} (free: {free}): name one by --target"
        )
    driver = next(iter(known[chosen[0]].versions.values())).driver
    able = alike(known, driver, names)
    chosen = tuple(actor for actor in chosen if actor in able)
    widths = {actor: width for actor, (_, width) in compilers.items() if actor in able}
    if not (chosen and widths):
        raise UsageError(
            f"nodes of the cluster at {where} have other versions of flashtune, Triton or ptxas than this "
            "machine: install the same ones"
        )
    for actor in known.keys() - {*chosen, *widths}:
        # Its GPU and cores are free for others.
        ray.kill(actor)
    return Cluster({actor: (gpus[actor], known[actor]) for actor in chosen}, widths, driver)


def _identities(ray: Any, actors: dict[Any, str]) -> "dict[Any, Identity]":
    """Returns the identities of the processes that started in time. A warning names the others."""
    from ray.exceptions import RayError

    known, end = {}, time.monotonic() + START_SECONDS
    asked = {actor: actor.identity.remote() for actor in actors}
    for actor, name in actors.items():
        try:
            known[actor] = ray.get(asked[actor], timeout=max(0.0, end - time.monotonic()))
        except (RayError, TimeoutError) as error:
            # A waiting process would take resources later.
            ray.kill(actor)
            warn_once(name, f"{name} is not used: it did not start ({first_line(error)})")
    return known


def alike(known: "dict[Any, Identity]", driver: str, actors: dict[Any, str]) -> set[Any]:
    """Returns the processes with this machine's versions, and on GPUs the given driver. Warns of others."""
    able = set()
    for actor, found in known.items():
        same = all(
            (theirs.flashtune, theirs.template, *theirs.compilers)
            == (ours.flashtune, ours.template, *ours.compilers)
            for family, theirs in found.versions.items()
            for ours in (current_versions(family),)
        )
        own = {versions.driver for versions in found.versions.values()}
        if same and (found.target is None or own == {driver}):
            able.add(actor)
        else:
            warn_once(actors[actor], f"{actors[actor]} is not used: its versions differ")
    return able


@contextlib.contextmanager
def open_ray(
    store: Store, address: str, target: Target, jobs: int | None = None, classes: Classes | None = None
) -> Iterator[LocalExecutor]:
    """Starts an executor for the GPUs of a cluster, as `open_cluster`. This process stores its results."""
    with open_cluster(address, target, jobs, classes) as cluster:
        from flashtune.tuner.fleet.ray_nodes import RayCompiler, RayMeasurer

        compiler = RayCompiler(cluster.compilers)
        measurers: dict[int | None, Measurer] = {
            number: RayMeasurer(actor, compiler, name, found.gpu_uuid)
            for number, (actor, (name, found)) in enumerate(cluster.gpus.items())
        }
        yield LocalExecutor(store, compiler, measurers, cluster.driver)
