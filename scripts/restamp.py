"""Keeps a table's evidence valid after templates changed and machine code did not.

flashtune bundle build --target h200 --table db/tuned/nvidia-h200.json --out before.bundle
# Change the templates.
flashtune bundle build --target h200 --table db/tuned/nvidia-h200.json --out after.bundle
python -m scripts.restamp --table db/tuned/nvidia-h200.json --before before.bundle --after after.bundle
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from flashtune.bundle.bundle_file import open_bundle
from flashtune.core.errors import FlashtuneError, printable
from flashtune.db.codec import Check
from flashtune.db.table import TunedTable, dump_table, load_table
from flashtune.templates.registry import template_hash
from flashtune.tuner.cli.output import say
from flashtune.tuner.tables.admission import digest_of
from flashtune.tuner.tables.table_files import write_file
from flashtune.tuner.tables.table_receipts import sibling


class Code(NamedTuple):
    """The digest of machine code and launch, and the versions of Triton and ptxas that made it."""

    machine: str
    compilers: tuple[str, str]


def codes_of(path: Path) -> dict[str, Code]:
    """Returns the machine code of a bundle's kernels by their digests, after a check of the whole file."""
    bundle = open_bundle(path)
    bundle.check_all()
    return {entry.kernel: Code(entry.machine, (entry.triton, entry.ptxas)) for entry in bundle.entries()}


def restamped(
    table: TunedTable, before: Mapping[str, Code], after: Mapping[str, Code]
) -> tuple[TunedTable, Counter[str]]:
    """Returns a table of the kernels that render now, and the numbers of its records by result.

    A verdict and a time move to a kernel of other source if its machine code is equal, made by the same
    compiler. Other records do not change. Receipts of kernels that no record renders are left out.
    """
    kernels = [record for record in table.records if record.config is not None]
    siblings = (msgspec.structs.replace(record, specialization=sibling(record)) for record in kernels)
    templates = {digest_of(record): template_hash(record.family) for record in (*siblings, *kernels)}
    rendered: dict[Code | None, set[str]] = defaultdict(set)
    for digest in templates.keys() & after.keys():
        rendered[after[digest]].add(digest)

    def equal(digest: str, compilers: tuple[str, str]) -> set[str]:
        """Returns the kernels that render now and have the machine code of a former one."""
        code = before.get(digest)
        same = rendered[code] if code is not None and code.compilers == compilers else set()
        return {digest, *same} & templates.keys()

    counts: Counter[str] = Counter()
    records = []
    for record in table.records:
        now = digest_of(record) if record.config is not None else ""
        if now in equal(str(record.kernel), record.versions.compilers):
            versions = msgspec.structs.replace(record.versions, template=templates[now])
            moved = msgspec.structs.replace(record, kernel=now, versions=versions)
            counts["current" if moved == record else "moved"] += 1
            records.append(moved)
        else:
            counts["changed" if now else "current"] += 1
            records.append(record)
    receipts: dict[tuple[str, tuple[str, ...]], Check] = {}
    for receipt in table.receipts:
        for kernel in sorted(equal(receipt.digest, receipt.versions.compilers)):
            versions = msgspec.structs.replace(receipt.versions, template=templates[kernel])
            moved_receipt = msgspec.structs.replace(receipt, digest=kernel, versions=versions)
            receipts.setdefault((kernel, versions.makers), moved_receipt)
    return msgspec.structs.replace(table, records=tuple(records), receipts=tuple(receipts.values())), counts


@click.command()
@click.option("--table", type=click.Path(path_type=Path), required=True, help="The table, changed in place.")
@click.option("--before", type=click.Path(path_type=Path), help="Bundle of the former source.")
@click.option("--after", type=click.Path(path_type=Path), help="Bundle of the present source.")
def main(table: Path, before: Path | None, after: Path | None) -> None:
    """Move a table's verdicts, times and receipts to kernels of other source and equal machine code.

    Both bundles are built by the Triton of the table. Without them, kernels of equal source are current, and
    all others count as changed.
    """
    try:
        earlier = load_table(table)
        codes = [codes_of(path) if path else {} for path in (before, after)]
        done, counts = restamped(earlier, codes[0], codes[1])
        if done != earlier:
            write_file(table, dump_table(done))
    except FlashtuneError as error:
        raise click.ClickException(printable(str(error))) from error
    say(
        f"of {len(done.records)} records {counts['current']} were current and {counts['moved']} were moved; "
        f"{counts['changed']} have other machine code, or are in no bundle"
    )
    say(f"{len(done.receipts)} of {len(earlier.receipts)} receipts were kept")


if __name__ == "__main__":
    main()
