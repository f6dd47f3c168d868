"""Tables of a saved audit of the SRAM models.

    python -m benchmarks.sram_audit          # prints them, in Markdown

No GPU is needed. benchmarks/results/sram-audit.json holds the output of `flashtune sram-audit --json`.
`python -m benchmarks.documents --write` puts the tables into docs/sram-audit.md.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.saved import RESULTS
from flashtune.errors import TableError
from flashtune.tuner.audit import Audit
from flashtune.tuner.cli.sram_audit import as_markdown

SCRIPT = "benchmarks/sram_audit.py"
SAVED = RESULTS / "sram-audit.json"


def main() -> None:
    """Prints the tables."""
    print(texts()["sram-audit"])


def texts(path: Path = SAVED) -> dict[str, str]:
    """Returns the page's text by its name: the tables, and each target that misses the bar.

    Raises:
        TableError: The file is missing or holds no audit.
    """
    try:
        audit = msgspec.json.decode(path.read_bytes(), type=Audit)
    except (OSError, msgspec.DecodeError) as error:
        raise TableError(f"{path} holds no audit of the SRAM models: {error}") from error
    missed = [f"- {failure}" for failure in audit.failures()] or ["- none"]
    return {"sram-audit": "\n".join((as_markdown(audit), "", "What misses the bar:", "", *missed))}


if __name__ == "__main__":
    main()
