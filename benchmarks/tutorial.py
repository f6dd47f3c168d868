"""Draws the pictures of the tutorial from recorded accesses of generated kernels.

`TRITON_INTERPRET=1 python -m benchmarks.tutorial` writes the files in docs/pictures that changed.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.charts import PICTURES, grid, is_current, write_svg
from examples.tutorial.attention import FLASH_ATTENTION_2, Step, online_softmax, run
from flashtune import PagedKVCache

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

INK, ACCENT, SOFT, GREEN, PINK = "#0072b2", "#d55e00", "#eef0f4", "#009e73", "#cc79a7"
LENGTHS = (5, 9, 14, 17)
# Requests by colour; the first is for memory that holds no token.
REQUEST_COLORS = (SOFT, INK, ACCENT, GREEN, PINK)


def pictures() -> "dict[str, Figure]":
    """Returns the figures by the names of their files."""
    return {
        "tutorial-online-softmax": softmax_picture(online_softmax([2, 8, 1, 9, 3, 7])),
        "tutorial-tiles": tiles_picture(),
        "tutorial-weights": weights_picture(),
        "tutorial-pages": pages_picture(),
    }


def softmax_picture(steps: list[Step]) -> "Figure":
    """Draws the running statistics and the rescale factor of each step."""
    from plotly.graph_objects import Bar, Scatter

    titles = ("running maximum (line) and scores (bars)", "running sum", "rescale factor")
    figure = grid("Online softmax of 2, 8, 1, 9, 3, 7", titles, columns=3, size=(250, 200))
    numbers = list(range(1, len(steps) + 1))
    figure.add_trace(Bar(x=numbers, y=[step.score for step in steps], marker_color="#8fd3bd"), row=1, col=1)
    for column, values in enumerate(
        (
            [step.running_max for step in steps],
            [step.running_sum for step in steps],
            [step.rescale for step in steps],
        ),
        1,
    ):
        line = {"color": ACCENT, "shape": "hv"}
        y = [round(value, 4) for value in values]
        figure.add_trace(Scatter(x=numbers, y=y, mode="lines+markers", line=line), row=1, col=column)
    figure.update_xaxes(title_text="step", dtick=1)
    return figure.update_layout(showlegend=False, margin_t=64, margin_b=60)


def tiles_picture() -> "Figure":
    """Draws the pairs of tiles that a kernel loads, of 32 queries and keys in tiles of four."""
    figure = grid("Tiles that the kernel computes", ("no mask", "causal mask"), columns=2, size=(300, 300))
    for column, causal in enumerate((False, True), 1):
        colors = [[0, SOFT], [0.5, "#8fd3bd"], [1, INK]]
        _add_cells(figure, column, computed_tiles(causal=causal).tolist(), colors, 2)
    figure.update_xaxes(title_text="tile of keys")
    figure.update_yaxes(title_text="tile of queries", autorange="reversed")
    return figure.update_layout(margin_t=64, margin_b=60)


def computed_tiles(*, causal: bool, length: int = 32, block: int = 4) -> Tensor:
    """Returns 2 for each pair of tiles that is computed, 1 if the causal mask hides a part of it, else 0."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length, 4, generator=generator) for _ in range(3))
    _, traffic = run(FLASH_ATTENTION_2, q, k, v, scale=0.5, block=block, causal=causal)
    tiles = torch.zeros(length // block, length // block, dtype=torch.int32)
    row = 0
    for access in traffic:
        if traffic.name(access) == "q":
            row = traffic.row(access) // block
        elif traffic.name(access) == "k":
            column = traffic.row(access) // block
            tiles[row, column] = 1 if causal and column == row else 2
    return tiles


def weights_picture() -> "Figure":
    """Draws the attention weights of a causal call: with the identity as V, they are the output.

    Values in float64 are rounded alike on all machines.
    """
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(16, 8, generator=generator).double() for _ in range(2))
    weights, _ = run(FLASH_ATTENTION_2, q, k, torch.eye(16).double(), scale=8**-0.5, block=4, causal=True)
    figure = grid("Attention weights, causal", ("",), columns=1, size=(380, 340))
    values = [[round(weight, 4) for weight in row] for row in weights.tolist()]
    _add_cells(figure, 1, values, [[0, "#ffffff"], [1, INK]], 1)
    figure.update_xaxes(title_text="key")
    figure.update_yaxes(title_text="query", autorange="reversed")
    return figure.update_layout(margin_t=64, margin_b=60)


def pages_picture() -> "Figure":
    """Draws the owner of each token of memory, for contiguous caches and for pages."""
    cache = PagedKVCache(pages=20, page_size=4, kv_heads=1, head_dim=8, dtype=torch.float32, device="cpu")
    paged, contiguous = torch.zeros(20, 4, dtype=torch.int32), torch.zeros(20, 4, dtype=torch.int32)
    for number, length in enumerate(LENGTHS, 1):
        slots = cache.extend(cache.add(), length)
        paged.view(-1)[slots] = number
        contiguous.view(4, 20)[number - 1, :length] = number
    titles = ("contiguous: 20 tokens for each request", "pages of 4 tokens")
    figure = grid("Tokens of four requests in 20 blocks", titles, columns=2, size=(360, 100))
    shares = [(number / 4, color) for number, color in enumerate(REQUEST_COLORS)]
    for column, owners in enumerate((contiguous, paged), 1):
        _add_cells(figure, column, owners.T.tolist(), shares, 4)
    figure.update_xaxes(title_text="block")
    figure.update_yaxes(title_text="token", autorange="reversed")
    return figure.update_layout(margin_t=64, margin_b=60)


def _add_cells(
    figure: "Figure", column: int, values: list[list[float]], colors: object, highest: float
) -> None:
    """Adds a heat map. Its colours go from 0 to a highest value."""
    from plotly.graph_objects import Heatmap

    cells = Heatmap(z=values, zmin=0, zmax=highest, colorscale=colors, showscale=False, xgap=1, ygap=1)
    figure.add_trace(cells, row=1, col=column)


def main() -> None:
    """Writes the files that differ."""
    for name, figure in pictures().items():
        path = PICTURES / f"{name}.svg"
        if not is_current(figure, path):
            write_svg(figure, path)
            print(path.name)


if __name__ == "__main__":
    main()
