"""Writes the pages of a report: static files that a browser opens without a server."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from flashtune.core import VERSION
from flashtune.db.codec import fingerprint
from flashtune.tuner.cli.html_report.model_pages import curves, models_of
from flashtune.tuner.cli.html_report.shape_facts import Texts, candidate_facts, shape_facts
from flashtune.tuner.cli.html_report.stored_shapes import Shape, Source
from flashtune.tuner.tables.table_files import write_file

PACKAGE = "flashtune.tuner.cli.html_report"
COPIED = ("report.css", "report.js")
PLOTLY = "plotly.min.js"


def write_report(source: Source, out: Path, db: str | None, refresh: int | None = None) -> Path:
    """Writes a report into a folder, and returns its first page.

    Args:
        source: The records.
        out: The folder, which is created. Files of an earlier report are replaced.
        db: The database. The curves of models use its selections.
        refresh: Seconds after which the pages load themselves again, while a search runs. The pages of models
            are then left out, because their curves take seconds. None for a complete report.
    """
    models = () if refresh else models_of(source.shapes)
    texts: Texts = defaultdict(lambda: len(texts))
    shapes = {shape.name: shape_facts(shape, source, texts) for shape in source.shapes}
    for shape in source.shapes:
        shapes[shape.name]["models"] = [
            texts[model.attention.name] for model in models if shape.name in model.shapes
        ]
        if shape.candidates:
            shapes[shape.name]["search"] = _write_search(shape, out)
    peers = Counter(
        peer for facts in shapes.values() for kernel in facts["kernels"] for peer, _ in kernel["peers"]
    )
    names = list(texts)
    _write_variable(out / "shapes.js", "REPORT", {"texts": names, "shapes": shapes})
    if models:
        _write_variable(out / "models.js", "MODELS", dict(curves(models, db)))
    _write_files(
        out,
        place=source.place,
        models=models,
        refresh=refresh,
        shapes=shapes,
        texts=names,
        peers=[peer for peer, _ in peers.most_common()],
    )
    current = {facts.get("search") for facts in shapes.values()}
    for file in out.glob("search-*.js"):
        if file.name not in current:
            file.unlink()
    return out / "index.html"


def _write_files(out: Path, **values: Any) -> None:
    """Writes the pages, and the files that are the same in all reports."""
    folder = resources.files(PACKAGE).joinpath("pages")
    for name in COPIED:
        write_file(out / name, folder.joinpath(name).read_bytes())
    plotly = resources.files("plotly").joinpath("package_data", PLOTLY).read_bytes()
    if not (out / PLOTLY).is_file() or (out / PLOTLY).stat().st_size != len(plotly):
        write_file(out / PLOTLY, plotly)
    # Texts of a database may be hostile, so all values are escaped.
    pages = jinja2.Environment(
        loader=jinja2.PackageLoader(PACKAGE, "pages"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    written = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
    for name in ("index.html", "shape.html", *(("models.html", "model.html") if values["models"] else ())):
        page = pages.get_template(name).render(values, version=VERSION, written=written)
        write_file(out / name, page.encode())


def _write_search(shape: Shape, out: Path) -> str:
    """Writes the candidates and plots of a search, unless there is a file of the same records.

    Returns:
        The name of the file.
    """
    identity = [shape.name, VERSION, *(str(row.id) for row in shape.candidates)]
    name = f"search-{fingerprint(' '.join(identity).encode())[:16]}.js"
    if not (out / name).is_file():
        # Optuna takes half a second to import.
        from flashtune.tuner.cli.html_report.study import axis_figures

        tried = shape.tried()
        facts = {
            "candidates": [candidate_facts(row.record, shape.target) for row in tried],
            "figures": list(axis_figures(tried)),
        }
        _write_variable(out / name, "SEARCH", facts)
    return name


def _write_variable(path: Path, name: str, value: Mapping[str, Any]) -> None:
    """Writes a script that sets a variable: browsers refuse to read JSON files without a server."""
    write_file(path, f"const {name} = ".encode() + msgspec.json.encode(value) + b";\n")
