"""Tables of a saved audit of the SRAM models.

    python -m benchmarks.kernels.sram_audit  # prints them, in Markdown

No GPU is needed. benchmarks/results/sram-audit.json holds the output of `flashtune sram-audit --json`.
`python -m benchmarks.documents --write` puts the sums into docs/sram-audit.md and the rows into
benchmarks/results/sram-audit.md.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.saved import RESULTS
from flashtune.core.errors import TableError
from flashtune.tuner.cli.commands.sram_audit import markdown_parts
from flashtune.tuner.sram_audit.audit import Audit

SCRIPT = "benchmarks/kernels/sram_audit.py"
SAVED = RESULTS / "sram-audit.json"


def main() -> None:
    """Prints the tables."""
    print("\n\n".join(texts().values()))


def texts(path: Path = SAVED) -> dict[str, str]:
    """Returns the tables by name: the sums and each GPU that misses the bar, and the rows.

    Raises:
        TableError: The file is missing or holds no audit.
    """
    try:
        audit = msgspec.json.decode(path.read_bytes(), type=Audit)
    except (OSError, msgspec.DecodeError) as error:
        raise TableError(f"{path} holds no audit of the SRAM models: {error}") from error
    missed = [f"- {failure}" for failure in audit.failures()] or ["- none"]
    *sums, rows = markdown_parts(audit)
    missing = "\n".join(missed)
    return {
        "sram-audit": "\n\n".join((*sums, "GPUs and families that miss the bar:", missing)),
        "sram-audit-rows": rows,
    }


if __name__ == "__main__":
    main()
