import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from flashtune.core.record import Record
from flashtune.tuner.cli.html_report import live_report as module
from flashtune.tuner.cli.html_report.live_report import live_report
from flashtune.tuner.tables.lookup import shipped_selections
from flashtune.tuner.workloads.model_sizes import ModelSizes, Phase
from flashtune.tuner.workloads.models import ModelAttention, model_problems
from flashtune.tuner.workloads.presets import MODELS, find_model
from tests.support.records import write_table
from tests.tuner.cli.conftest import PEERS, Run
from tests.tuner.cli.report.conftest import CONFIGS, HOSTILE

PLOTLY = "plotly.min.js"
MAX_BYTES = 1_000_000


def read(folder: Path, name: str) -> Any:
    """Returns the variable that a script sets."""
    text = (folder / name).read_text(encoding="utf-8")
    return json.loads(text.partition("=")[2].rstrip().removesuffix(";"))


@pytest.mark.slow
def test_shipped_tables_are_below_a_megabyte(shipped: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in shipped.iterdir()}
    assert sizes.pop(PLOTLY) > MAX_BYTES
    assert sum(sizes.values()) < MAX_BYTES


@pytest.mark.slow
@pytest.mark.alone
def test_report_of_the_shipped_tables_takes_under_ten_seconds(run: Run, tmp_path: Path) -> None:
    # Of this process, which does nothing but compute: other processes would lengthen the wall clock time.
    started = time.process_time()
    assert run("report", "--shipped", "--out", tmp_path / "report").exit_code == 0
    assert time.process_time() - started < 10


@pytest.mark.slow
def test_every_shipped_shape_has_a_row_and_facts(shipped: Path) -> None:
    names = {f"{entry.record.target}/{entry.record.problem.key}" for entry in shipped_selections()}
    assert read(shipped, "shapes.js")["shapes"].keys() == names
    index = (shipped / "index.html").read_text(encoding="utf-8")
    assert set(re.findall(r'href="shape\.html\?([^"]+)"', index)) == names


@pytest.mark.slow
def test_no_shipped_time_is_below_the_roofline_of_its_page(shipped: Path) -> None:
    for name, shape in read(shipped, "shapes.js")["shapes"].items():
        for kernel in shape["kernels"]:
            assert shape["bound"][0] < kernel["time"][0], name


@pytest.mark.slow
def test_every_link_and_script_of_a_report_exists(shipped: Path) -> None:
    models = read(shipped, "models.js")
    for page in shipped.glob("*.html"):
        links = re.findall(r'(?:href|src)="([^"]+)"', page.read_text(encoding="utf-8"))
        for link in links:
            file, _, name = link.partition("?")
            assert file.startswith(("#", "data:")) or (shipped / file).is_file(), f"{page.name}: {link}"
            assert file != "model.html" or name in models
        assert not any("://" in link for link in links)


def test_searched_shape_has_its_kernels_rivals_and_candidates(
    run: Run, searched: tuple[Record, ...], tmp_path: Path
) -> None:
    result = run("report", "--out", tmp_path / "report")
    assert result.exit_code == 0, result.output
    facts = read(tmp_path / "report", "shapes.js")
    (shape,) = facts["shapes"].values()
    (kernel,) = shape["kernels"]
    best = searched[len(CONFIGS) - 1]
    assert best.config is not None
    assert facts["texts"][kernel["config"]] == best.config.label()
    assert kernel["time"] == pytest.approx([0.74, 0.74 * 0.99, 0.74 * 1.01], rel=1e-4)
    assert {facts["texts"][peer]: ms for peer, ms in kernel["peers"]} == PEERS | {HOSTILE: 0.8}
    assert [rival[3] for rival in shape["rivals"]] == pytest.approx(
        [0.9 - 0.02 * at for at in range(7, -1, -1)]
    )
    search = read(tmp_path / "report", shape["search"])
    assert [candidate[1] for candidate in search["candidates"]] == ["ok"] * 9 + ["infeasible", "wrong_result"]
    assert search["candidates"][9][2:4] == [300_000, None]
    titles = [figure["title"].partition(" of ")[0] for figure in search["figures"]]
    assert titles == ["Parallel coordinates", "Importance"]


def test_plots_of_an_unchanged_search_are_kept_and_others_removed(
    run: Run, searched: tuple[Record, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "report"
    run("report", "--out", folder)
    (file,) = folder.glob("search-*.js")
    file.write_text("const SEARCH = 1;\n")
    (folder / "search-0.js").touch()
    run("report", "--out", folder)
    assert list(folder.glob("search-*.js")) == [file]
    assert file.read_text() == "const SEARCH = 1;\n"


def test_texts_of_records_are_escaped(run: Run, searched: tuple[Record, ...], tmp_path: Path) -> None:
    run("report", "--out", tmp_path / "report")
    for page in (tmp_path / "report").glob("*.html"):
        assert "<img" not in page.read_text(encoding="utf-8")
    assert "over &lt;img" in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


def test_table_file_is_a_source(run: Run, searched: tuple[Record, ...], tmp_path: Path) -> None:
    table = write_table(tmp_path / "h200.json", searched[0])
    result = run("report", "--table", table, "--out", tmp_path / "report")
    assert result.exit_code == 0, result.output
    (shape,) = read(tmp_path / "report", "shapes.js")["shapes"].values()
    assert shape["kernels"][0]["time"][0] == 0.9
    assert "search" not in shape
    assert f"Records of {table}" in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "pass --out DIR"),
        (("--serve",), "pass --out DIR"),
        (("--out", "report"), "has no such record: run flashtune search"),
        (("--out", "report", "--shipped", "--table", __file__), "exclude each other"),
    ],
)
def test_error_says_what_to_do(
    run: Run, arguments: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("report", *arguments)
    assert result.exit_code == 2
    assert sentence in result.output
    assert not (tmp_path / "report").exists()


def test_pages_need_plotly(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = run("report", "--shipped", "--out", tmp_path / "report")
    assert result.exit_code == 2
    assert "flashtune[plot]" in result.output


@pytest.mark.slow
def test_served_report_is_on_this_machine_until_ctrl_c(searched: tuple[Record, ...], tmp_path: Path) -> None:
    folder = str(tmp_path / "report")
    command = [sys.executable, "-m", "flashtune.tuner.cli", "report", "--out", folder, "--serve"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        process.stderr.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/", process.stderr.readline())
        assert url is not None
        with urllib.request.urlopen(url[0]) as answer:
            assert b"<h1>Tuned attention kernels</h1>" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_report_of_a_running_search_reloads_until_it_is_complete(
    run: Run, searched: tuple[Record, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "report" / "index.html"
    with live_report(page.parent, "nvidia-h200", str(tmp_path / "flashtune.sqlite")) as renew:
        renew()
        renew()
        deadline = time.monotonic() + 120
        while not page.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert f"Reload every {module.INTERVAL} s" in page.read_text(encoding="utf-8")
    assert "Reload every" not in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_search_leaves_a_complete_report(run: Run, tmp_path: Path) -> None:
    shape = "heads=1,seqlen=128,head_dim=64,dtype=fp16"
    family = ("--family", "forward_q_outer", "--target", "a100", "--trials", "1", "--jobs", "1", "--quiet")
    result = run("search", "--shape", shape, *family, "--report", tmp_path / "report")
    assert result.exit_code == 0, result.output
    assert "Reload every" not in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    (facts,) = read(tmp_path / "report", "shapes.js")["shapes"].values()
    assert facts["gpu"] == "nvidia-a100"
    assert facts["kernels"][0]["predicted"] == 1


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_model_calls_its_own_problems(model: ModelAttention) -> None:
    for phase in Phase if model.causal else (Phase.PREFILL, Phase.TRAINING):
        problems = model_problems(model, ModelSizes(phase, "512..16384", "1|4"))
        assert all(map(model.calls, problems)), phase


def test_model_does_not_call_problems_of_other_heads_masks_or_types() -> None:
    llama = find_model("llama-3.1-8b")
    for name in ("llama-3.2-1b", "llama-2-70b", "bert-large", "gemma-2-27b", "deepseek-v3"):
        for phase in (Phase.PREFILL, Phase.DECODE) if find_model(name).causal else (Phase.PREFILL,):
            assert not any(map(llama.calls, model_problems(find_model(name), ModelSizes(phase, "16384"))))
