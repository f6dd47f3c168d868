"""Tables of a saved audit of the SRAM models.

No GPU is needed. benchmarks/results/sram-audit.json.gz holds the output of `flashtune sram-audit --json`, and
h100-sram-audit.json.gz that of a run with more points and `--target h100`.
`python -m benchmarks.documents --write` puts the tables into benchmarks/results/sram-audit.md.
"""

from pathlib import Path

from benchmarks.saved import RESULTS, decoded
from flashtune.tuner.cli.commands.sram_audit import markdown_parts
from flashtune.tuner.sram_audit.audit import Audit

SCRIPT = "benchmarks/kernels/sram_audit.py"
SAVED, HOPPER = RESULTS / "sram-audit.json.gz", RESULTS / "h100-sram-audit.json.gz"


def texts(path: Path = SAVED, hopper: Path = HOPPER) -> dict[str, str]:
    """Returns the tables by name: the sums and each GPU that misses the bar, and the rows."""
    audit = _audit(path)
    missed = [f"- {failure}" for failure in (*audit.failures(), *audit.unjudged())] or ["- none"]
    *sums, rows = markdown_parts(audit)
    missing = "\n".join(missed)
    return {
        "sram-audit": "\n\n".join((*sums, "GPUs that miss the bar, or cannot be judged:", missing)),
        "sram-audit-rows": rows,
        "sram-audit-h100": "\n\n".join(markdown_parts(_audit(hopper))[:2]),
    }


def _audit(path: Path) -> Audit:
    return decoded(path, Audit)
