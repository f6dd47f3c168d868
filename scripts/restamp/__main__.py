"""Keeps receipts valid after templates changed but machine code did not: `python -m scripts.restamp`.

python -m scripts.restamp --table db/tuned/nvidia-h200.json
"""

from pathlib import Path

import click

from flashtune.core.errors import FlashtuneError, printable
from flashtune.tuner.cli.options import json_option
from flashtune.tuner.cli.output import print_json, progress_bars, say
from scripts.restamp.restamp import fates
from scripts.restamp.table import restamp_table


@click.command()
@click.option(
    "--table",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    required=True,
    help="The table, which is changed in place.",
)
@click.option(
    "--kernels",
    "folders",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Another folder with sources of earlier kernels, besides the kernel cache. Its files are run if "
    "a record or receipt has their digest: name only folders that you trust. Repeatable.",
)
@json_option
def main(table: Path, folders: tuple[Path, ...], as_json: bool) -> None:
    """Keep receipts valid after templates changed but machine code did not.

    A record names the digest of its kernel. This command compiles the earlier and the current source for the
    record's target. It compares instructions, constants, parameters and launch metadata. It also compares
    grids, arguments and descriptors on the verifier's cases. If all are equal, the record gets the new digest
    and keeps its receipt and time, and those of other drivers. Evidence under other Triton versions is not
    kept. Records that differ stay unchanged and count as unproven.

    Receipts of the table are updated in the same way, including those of siblings: the same kernel with the
    other setting of the log-sum-exp. To update receipts of another Triton version, run the command again
    under it. Times of other Triton versions are removed if the record gets a new digest.
    """
    try:
        with progress_bars() as progress:
            done, receipts = restamp_table(table, folders, progress)
    except FlashtuneError as error:
        raise click.ClickException(printable(str(error))) from error
    counts = fates(done)
    if as_json:
        print_json({**counts, "receipts": receipts})
        return
    say(
        f"{counts['carried']} records were carried over and {counts['current']} were current; "
        f"{counts['changed']} name another kernel, {counts['no_source']} have no source here and "
        f"{counts['other_triton']} are of another Triton"
    )
    say(f"{receipts} further receipts were carried over")
    for reason in sorted({entry.reason for entry in done if entry.reason}):
        say(f"  {printable(reason)}", indent="    ")


if __name__ == "__main__":
    main()
