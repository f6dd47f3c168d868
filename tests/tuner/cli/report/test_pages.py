"""The pages in Chromium, opened from the file system as a user opens them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashtune.core.record import Record
from tests.tuner.cli.conftest import Run
from tests.tuner.cli.report.conftest import HOSTILE

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: run apt-get install chromium"),
]
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDTHS = (1280, 400)
SHAPE = "nvidia-h200/forward_bf16_d128_h16x16_b2_q8192_k8192_bottom_right"
# Texts with less contrast to their background than WCAG AA requires.
LOW_CONTRAST = """() => {
  const linear = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const channel = (value) => linear(value / 255);
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map(channel);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (!color.endsWith(", 0)")) return color;
    }
    return "rgb(255, 255, 255)";
  };
  return [...document.querySelectorAll("body *:not(svg *)")]
    .filter((one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
    .filter((one) => {
      const [first, second] = [light(getComputedStyle(one).color), light(behind(one))].sort((a, b) => b - a);
      return (first + 0.05) / (second + 0.05) < 4.5;
    })
    .map((one) => one.outerHTML.slice(0, 80));
}"""

WITHOUT_PLOTS = ("models.html", "shape.html?none", "model.html?none")

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        instance = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield instance
        instance.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Open]:
    """Opens a page, and fails at the end if one logged an error or opened a dialog."""
    errors: list[str] = []
    pages = []

    def open_page(folder: Path, address: str, width: int = 1280) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 900})
        pages.append(page)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}"))
        page.goto(f"{folder.as_uri()}/{address}")
        page.wait_for_load_state("networkidle")
        return page

    yield open_page
    for page in pages:
        page.close()
    assert errors == []


@pytest.fixture
def report(run: Run, searched: tuple[Record, ...], tmp_path: Path) -> Path:
    assert run("report", "--out", tmp_path / "report").exit_code == 0
    return tmp_path / "report"


def shown_rows(page: Any) -> list[str]:
    texts: list[str] = page.locator("#board tbody tr:visible").all_inner_texts()
    return texts


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "address",
    ["index.html", f"shape.html?{SHAPE}", "model.html?llama-3.1-8b", *WITHOUT_PLOTS],
)
def test_page_is_accessible_and_as_wide_as_the_screen(
    shipped: Path, show: Open, address: str, width: int
) -> None:
    page = show(shipped, address, width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    levels = [
        int(tag[1])
        for tag in page.eval_on_selector_all("h1, h2, h3, h4", "all => all.map((one) => one.tagName)")
    ]
    assert levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in zip([0, *levels], levels, strict=False))
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.title().endswith("· flashtune")
    plots = page.locator(".js-plotly-plot").count()
    assert plots == page.locator(".plot[role=img]").count()
    assert bool(plots) == (address not in WITHOUT_PLOTS)
    labels = page.eval_on_selector_all(".plot", "all => all.map((one) => one.getAttribute('aria-label'))")
    assert all(labels)
    assert page.locator("input:not(label input), select:not(label select)").count() == 0
    assert page.evaluate(LOW_CONTRAST) == []


def test_filters_of_the_leaderboard_combine_and_stay_in_the_address(shipped: Path, show: Open) -> None:
    page = show(shipped, "index.html")
    every = len(shown_rows(page))
    page.select_option("select[name=gpu]", "nvidia-h200")
    page.select_option("select[name=pass]", "backward")
    page.fill("input[name=text]", "d128 HOPPER")
    rows = shown_rows(page)
    assert 0 < len(rows) < every
    assert all(
        "nvidia-h200" in row and "bwd" in row and "backward_hopper" in row and "d128" in row for row in rows
    )
    assert page.inner_text("#count") == f"{len(rows)} of {every} shapes"
    points = page.evaluate(
        "document.getElementById('overview').data.map((trace) => [trace.name, trace.x.length])"
    )
    assert points == [["backward_hopper", len(rows)]]
    page.reload()
    assert shown_rows(page) == rows
    page.click("button[type=reset]")
    page.wait_for_function(f"document.getElementById('count').textContent === '{every} of {every} shapes'")


def test_model_of_an_address_filters_the_leaderboard(shipped: Path, show: Open) -> None:
    page = show(shipped, "models.html")
    page.click("[aria-label='shapes of gpt-oss-20b']")
    page.wait_for_load_state("networkidle")
    rows = shown_rows(page)
    assert page.locator("select[name=model]").input_value() == "gpt-oss-20b"
    assert rows
    assert all(row.startswith("h64/8 d64") for row in rows)


def test_keyboard_sorts_the_leaderboard_with_missing_numbers_last(shipped: Path, show: Open) -> None:
    page = show(shipped, "index.html")
    head = page.locator("#board thead th", has_text="GB/s")
    for order, sign in (("ascending", 1), ("descending", -1)):
        head.locator("button").focus()
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == order
        cells = page.locator("#board tbody td:nth-child(6)").all_inner_texts()
        numbers = [float(cell) for cell in cells if cell != "–"]
        assert numbers == sorted(numbers, key=lambda number: sign * number)
        assert "–" not in cells[: len(numbers)]


def test_row_leads_to_the_page_of_its_shape(shipped: Path, show: Open) -> None:
    page = show(shipped, "index.html?model=llama-3.1-8b")
    link = page.locator("#board tbody tr:visible a").first
    title = link.inner_text()
    link.click()
    page.wait_for_selector("h2")
    assert page.inner_text("h1").startswith(f"{title} on nvidia-")
    assert page.locator("h2").all_inner_texts() == ["Kernel", "Times", "SRAM map", "Evidence"]
    evidence = page.inner_text("[aria-label='Evidence of the selection']")
    assert "passed" in evidence
    assert "Triton 3.6.0" in evidence
    page.click("main >> text=llama-3.1-8b")
    page.wait_for_selector("h2 >> text=prefill on")
    assert page.inner_text("h1") == "llama-3.1-8b"


def test_searched_shape_has_plots_and_no_markup_of_its_records(report: Path, show: Open) -> None:
    page = show(report, "index.html")
    page.locator("#board tbody a").click()
    page.wait_for_selector("text=Importance of the axes")
    heads = ["Convergence", "Time and SRAM", "Parallel coordinates", "Importance of the axes"]
    titles = page.locator("#search h3").all_inner_texts()
    assert [title.partition(" of forward_q_outer")[0] for title in titles] == heads
    page.wait_for_function("document.querySelectorAll('#search .js-plotly-plot').length === 4")
    names = page.evaluate("document.querySelectorAll('#search .plot')[1].data.map((trace) => trace.name)")
    assert names == ["forward_q_outer", "does not fit", "failed", "capacity"]
    assert HOSTILE in page.inner_text("[aria-label='Times, fastest first']")
    assert page.locator("img").count() == 0


def test_shape_of_a_running_search_has_its_best_time_and_plots(
    run: Run, running: tuple[Record, ...], show: Open, tmp_path: Path
) -> None:
    assert run("report", "--out", tmp_path / "report", "--refresh", "1").exit_code == 0
    page = show(tmp_path / "report", "index.html")
    (row,) = shown_rows(page)
    assert "forward_q_outer, not selected" in row
    assert "0.74" in row
    with page.expect_event("load", timeout=20_000):
        pass
    page.uncheck("#refresh")
    page.locator("#board tbody a").click()
    page.wait_for_selector("text=Importance of the axes")
    assert page.locator("h2").all_inner_texts() == ["Times", "Search"]
