"""Files of selections: JSON tables, stand-alone Python kernels, and lists of `triton.Config`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from flashtune.core.config import Config
from flashtune.core.errors import FlashtuneError, TableError
from flashtune.core.files import replace_file
from flashtune.core.kernel import Alignment, Kernel, Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import Provenance, Record
from flashtune.db.table import TunedTable, dump_table, load_table
from flashtune.templates.registry import find_family, template_hash
from flashtune.templates.rendering import render
from flashtune.tuner.tables.admission import require_admissible, require_sound_evidence
from flashtune.tuner.tables.table_receipts import stray_receipts

if TYPE_CHECKING:
    from flashtune.db.store import MergeCounts

# Named arguments of `triton.Config`. Every other field of a config becomes a meta-parameter.
TRITON_OPTIONS = {"num_warps": "num_warps", "num_stages": "num_stages", "maxnreg": "maxnreg"}


# Name of the exported records in errors.
EXPORTED = "the selections"

# Called with a phase, the number of its finished steps, and the number of all its steps.
Watch = Callable[[str, int, int], None]


def unwatched(phase: str, done: int, total: int) -> None:
    """Reports no progress."""


DEVICES = Path("/dev")
# Number of records between two reports of progress.
COUNTED = 50


class KernelFile(msgspec.Struct, frozen=True):
    """A stand-alone Python file: its name without a folder, its text, its kernel and the records of this."""

    name: str
    text: str
    kernel: Kernel
    records: tuple[Record, ...]


def json_table(target: str, records: Iterable[Record], watch: Watch = unwatched) -> bytes:
    """Returns a table of the records for `flashtune import`. Its receipts are those in the records."""
    return table_file(TunedTable(target=target, records=tuple(records)), watch)


def table_file(table: TunedTable, watch: Watch = unwatched) -> bytes:
    """Returns a table for `flashtune import`, with its receipts."""
    require_admissible(counted(table.records, f"checking {table.target}", watch), EXPORTED)
    require_sound_evidence(table, EXPORTED)
    return dump_table(table)


def kernel_files(records: Iterable[Record], watch: Watch = unwatched) -> tuple[KernelFile, ...]:
    """Returns one file for each kernel of the records. A comment lists the problems that selected it.

    Records of baselines have no kernel and no file. The order of the records does not matter.
    """
    users: dict[str, list[Record]] = {}
    kernels: dict[str, Kernel] = {}
    ordered = tuple(sorted(records, key=lambda record: (record.target, record.problem.key)))
    require_admissible(counted(ordered, "checking kernels", watch), EXPORTED)
    for record in counted(ordered, "rendering kernels", watch):
        if record.config is None:
            continue
        kernel = render(find_family(record.family), record.problem, record.config, record.specialization)
        kernels[kernel.digest] = kernel
        users.setdefault(kernel.digest, []).append(record)
    files = (
        KernelFile(
            file_name(served[0], kernels[digest]),
            _header(served) + kernels[digest].source,
            kernels[digest],
            tuple(served),
        )
        for digest, served in users.items()
    )
    return tuple(sorted(files, key=lambda file: file.name))


def file_name(record: Record, kernel: Kernel) -> str:
    """Returns a readable name that is unique for each kernel."""
    problem = record.problem
    width = str(problem.head_dim)
    if problem.value_head_dim != problem.head_dim:
        width += f"v{problem.value_head_dim}"
    tiles = "".join(
        f"_{short}{getattr(record.config, field)}"
        for short, field in (("m", "block_m"), ("n", "block_n"))
        if hasattr(record.config, field)
    )
    mask = "full" if problem.causal == "none" else f"causal_{problem.causal}"
    extras = "".join(_assumptions(record.specialization))
    return f"{record.family}_{problem.dtype}_d{width}_{mask}{tiles}{extras}_{kernel.digest[:8]}.py"


def _assumptions(specialization: Specialization) -> Iterable[str]:
    if specialization.alignment is not Alignment.SIXTEEN:
        yield f"_align{int(specialization.alignment)}"
    if specialization.index_bits != 32:
        yield "_wide"
    if specialization.lse:
        yield "_lse"


def _header(records: list[Record]) -> str:
    """Returns the comment above the kernel: the problems that selected it, and its times."""
    version = _plain(records[0].versions.flashtune)
    backward = records[0].problem.is_backward
    entry = "attention_backward(q, k, v, out, lse, dout, scale)" if backward else "attention(q, k, v, scale)"
    lines = [
        f"# A stand-alone kernel by flashtune {version}; it needs torch and triton alone.",
        f"# `{entry}` runs it. Selected for:",
        *(f"#   {_plain(record.target)}  {record.problem.key}{_time(record)}" for record in records),
        "",
    ]
    return "\n".join(lines) + "\n"


def _time(record: Record) -> str:
    if record.ms is None:
        return ""
    measured = record.provenance is Provenance.MEASURED
    return f"  {record.ms:.4f} ms {'measured' if measured else 'predicted'}"


def _plain(text: str) -> str:
    """Replaces characters of a stored text that could end a comment."""
    return re.sub(r"[^\w.+ -]", "?", text, flags=re.ASCII)


def triton_configs(records: Iterable[Record]) -> str:
    """Returns a Python file with the selected configs as `triton.Config`, by problem, for other tuners.

    Configs of Gluon kernels are left out: their parameters exist only in these kernels.
    """
    records = tuple(records)
    require_admissible(records, EXPORTED)
    lines = [
        '"""Attention configs selected by flashtune, as `triton.Config`: CONFIGS[target][problem]."""',
        "",
        "import triton",
        "",
        "CONFIGS = {",
    ]
    by_target: dict[str, list[tuple[Problem, Config]]] = {}
    for record in records:
        if record.config is not None and find_family(record.family).interpreted:
            by_target.setdefault(_plain(record.target), []).append((record.problem, record.config))
    for target, pairs in by_target.items():
        lines.append(f"    {_quoted(target)}: {{")
        lines += [f"        {_quoted(problem.key)}: {_triton_config(config)}," for problem, config in pairs]
        lines.append("    },")
    return "\n".join([*lines, "}", ""])


def _triton_config(config: Config) -> str:
    values = {name: msgspec.to_builtins(value) for name, value in config.items()}
    meta = ", ".join(
        f"{_quoted(name.upper())}: {_literal(value)}"
        for name, value in values.items()
        if name not in TRITON_OPTIONS
    )
    options = ", ".join(
        f"{TRITON_OPTIONS[name]}={_literal(value)}"
        for name, value in values.items()
        # Without `maxnreg` there is no limit of registers.
        if name in TRITON_OPTIONS and not (name == "maxnreg" and value == 0)
    )
    return f"triton.Config({{{meta}}}, {options})"


def _literal(value: object) -> str:
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def write_file(path: Path, content: bytes) -> None:
    """Writes a file with `replace_file`, and creates its folder. Pipes and devices are written to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # /dev/stdout is a link, and may lead to a regular file.
        if path.exists() and (not path.is_file() or path.absolute().parent == DEVICES):
            path.write_bytes(content)  # a folder raises
        else:
            replace_file(path, content)
    except OSError as error:
        raise FlashtuneError(f"cannot write {path}: {error.strerror}; choose another place") from error


def import_tables(paths: Sequence[Path], db: str | None, watch: Watch = unwatched) -> MergeCounts:
    """Stores the records and selections of table files in a database.

    All files are read and checked before the database is opened. They are then stored in one
    transaction. If a table and the database both have a selection, the faster measured one stays for
    equal versions, else the database's. Receipts of installed template versions become self-checks.
    """
    from flashtune.db.store import open_store

    tables = [_checked(path, watch) for path in paths]
    taken, total = 0, sum(len(table.records) for table in tables)

    def count(records: int) -> None:
        nonlocal taken
        taken += records
        watch("storing records", taken, total)

    with open_store(db) as store:
        return store.merge_tables(*tables, progress=count)


def _checked(path: Path, watch: Watch) -> TunedTable:
    table = load_table(path)
    require_admissible(counted(table.records, f"checking {path.name}", watch), str(path))
    require_sound_evidence(table, str(path))
    strays = stray_receipts(table)
    if strays:
        position = table.receipts.index(strays[0]) + 1
        raise TableError(f"{path}, receipt {position} cannot be used: no record has its kernel")
    # Kernels of other template versions do not render here, so they cannot be matched with records.
    templates = {template_hash(record.family) for record in table.records if record.config is not None}
    receipts = tuple(receipt for receipt in table.receipts if receipt.versions.template in templates)
    return msgspec.structs.replace(table, receipts=receipts)


def counted(records: tuple[Record, ...], phase: str, watch: Watch) -> Iterator[Record]:
    """Yields the records, and reports their number to `watch` every `COUNTED` records."""
    for number, record in enumerate(records):
        if number % COUNTED == 0:
            watch(phase, number, len(records))
        yield record
    watch(phase, len(records), len(records))
