"""Kernel packages in the layout of Hugging Face's `kernels` library."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType

from flashtune.bundle import driver
from flashtune.core.errors import FlashtuneError, UsageError
from flashtune.core.layouts import TORCH_DTYPES
from flashtune.core.problem import Dtype, Feature
from flashtune.core.record import Record
from flashtune.templates.registry import find_family
from flashtune.tuner.tables import hub_bundle, hub_dispatcher
from flashtune.tuner.tables.admission import facts_of
from flashtune.tuner.tables.hub_dispatcher import Entry, kind_of
from flashtune.tuner.tables.table_files import KernelFile, Watch, kernel_files, unwatched

# The package is Python code alone, which the library calls "noarch".
VARIANT = "build/torch-cuda"
NAME = "flashtune"
IMPORT = re.compile(r"^from flashtune\.[\w.]+ import (.+)$", re.MULTILINE)
NO_BUNDLES: Mapping[str, bytes] = MappingProxyType({})
# A package with other functions or parameters needs another version.
VERSION = 1
SERVED = frozenset(
    {
        Feature.WINDOW,
        Feature.SOFTCAP,
        Feature.ALIBI,
        Feature.SINKS,
        Feature.PACKED,
        Feature.KV_LENGTHS,
        Feature.PAGES,
    }
)


def is_served(record: Record) -> bool:
    """Returns whether a selection is a forward pass that functions of flash_attn express.

    A package has no kernels of tf32, because it does not read torch's setting.
    """
    problem = record.problem
    expressed = problem.dtype not in (Dtype.E4M3, Dtype.TF32) and problem.features <= SERVED
    plain = not problem.is_backward and expressed
    return plain and record.config is not None


def package_files(
    records: Iterable[Record], watch: Watch = unwatched, bundles: Mapping[str, bytes] = NO_BUNDLES
) -> dict[str, bytes]:
    """Returns the content of each file of a package by its path, for selections that are served.

    `bundles` has their machine code by architecture.
    """
    kernels = kernel_files(records, watch)
    if not kernels:
        raise FlashtuneError("no selection here has a function in flash_attn: name another shape")
    listed = [_entry(file, record)._asdict() for file in kernels for record in file.records]
    files = {
        "__init__.py": _source(hub_dispatcher),
        "kernels.json": json.dumps(listed, indent=1).encode() + b"\n",
        **{f"kernels/{file.name}": file.text.encode() for file in kernels},
        **{f"kernels.{arch}.bundle": content for arch, content in bundles.items()},
    }
    if bundles:
        files |= {"bundle.py": _source(hub_bundle), "driver.py": _source(driver)}
    hashes = {path: hashlib.sha256(content).digest() for path, content in files.items()}
    whole = hashlib.sha256(b"".join(hashes.values())).hexdigest()
    metadata = {
        "name": NAME,
        "id": f"{NAME}_cuda_{whole[:12]}",
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
        "digest": {
            "algorithm": "sha256",
            "files": {path: base64.b64encode(digest).decode() for path, digest in hashes.items()},
        },
    }
    files["metadata.json"] = json.dumps(metadata, indent=1).encode() + b"\n"
    return {f"{VARIANT}/{path}": content for path, content in files.items()}


def _source(module: ModuleType) -> bytes:
    """Returns the source of a module that stands alone.

    Errors that it imports of flashtune become `RuntimeError`. Other imported names are in annotations only.
    """
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    return IMPORT.sub(lambda found: f"{' = '.join(found[1].split(', '))} = RuntimeError", text).encode()


def require_no_others(folder: Path, paths: Iterable[str]) -> None:
    """Checks that a package's folder has no links and no other files, which its users would load."""
    written = {folder / path for path in paths}
    parents = {parent for path in written for parent in path.parents}
    build = folder / "build"
    for path in (build, *sorted(build.rglob("*"))):
        if path.is_symlink() or path not in written | parents:
            raise UsageError(
                f"{path} is not a file of this package: remove it, or pass another folder by --out"
            )


def _entry(file: KernelFile, record: Record) -> Entry:
    problem, kernel = record.problem, file.kernel
    dtype = str(TORCH_DTYPES[problem.dtype]).removeprefix("torch.")
    widths = problem.head_dim, problem.value_head_dim
    window = problem.window_left, problem.window_right
    kind = kind_of(dtype, widths, problem.causal.value, window, problem.page_size, kernel.all_side)
    capability = None
    target = facts_of(record)
    if target is not None and not find_family(record.family).interpreted:
        # A Gluon kernel has instructions of one architecture.
        capability = [*divmod(target.capability, 10)]
    rows = problem.packed or problem.seqlen_q
    sizes = [(1 if problem.packed else problem.batch) * problem.heads, rows, problem.seqlen_kv]
    alignment = int(kernel.specialization.alignment)
    return Entry(file.name, record.target, capability, kind, alignment, sizes, kernel.digest)
