"use strict";

const COLORS = ["#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#8c6d31"];
const NAMED = { flash: "#d55e00", unfused: "#666666", KV: "#0072b2", "speed-up": "#009e73" };
const BASE = {
  font: { family: "system-ui, sans-serif", size: 13, color: "#1b1f24" },
  colorway: COLORS,
  margin: { l: 60, r: 15, t: 20, b: 50 },
  paper_bgcolor: "#fff",
  plot_bgcolor: "#fff",
  legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
  hoverlabel: { align: "left" },
};
const AXIS = { gridcolor: "#dfe4e8", linecolor: "#6b7681", automargin: true, zeroline: false };

/** Returns a text for a plot: Plotly reads some tags in texts. */
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");

/** Makes an element. Children are elements or texts, never markup. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function draw(element, data, layout = {}) {
  const whole = { ...BASE, ...layout };
  if (element.clientWidth < 600 && whole.showlegend !== false && data.length > 1) {
    // Below the plot, where each entry has a line of its own.
    const height = (layout.height || 400) + 20 * data.length;
    element.style.height = `${height}px`;
    Object.assign(whole, { height, legend: { orientation: "h", y: -90 / (height - 20 * data.length), yanchor: "top", x: 0 } });
  }
  for (const axis of new Set(["xaxis", "yaxis", ...Object.keys(layout).filter((name) => /^[xy]axis/.test(name))])) {
    whole[axis] = { ...AXIS, ...layout[axis] };
  }
  return Plotly.react(element, data, whole, { displayModeBar: false, responsive: true });
}

function figure(title, text, data, layout, kind = "") {
  const plot = make("div", { class: `plot ${kind}`, role: "img", "aria-label": `${title}. ${text}` });
  if (layout.height) plot.style.height = `${layout.height}px`;
  const whole = make("figure", {}, make("div", { class: "scroll" }, plot), ...(text ? [make("figcaption", {}, text)] : []));
  queueMicrotask(() => draw(plot, data, layout));
  return whole;
}

/* ---- Leaderboard ---- */

function board(table) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const form = document.getElementById("filters");
  const column = (name) => heads.findIndex((head) => head.textContent.trim() === name);
  const number = (row, at) => parseFloat(row.cells[at].textContent.replace(/[~,]/g, ""));

  function shows(row, wanted) {
    const shape = REPORT.shapes[row.dataset.name];
    if (wanted.model && !shape.models.some((at) => REPORT.texts[at] === wanted.model)) return false;
    if (["gpu", "pass", "dtype"].some((name) => wanted[name] && shape[name] !== wanted[name])) return false;
    const text = row.textContent.toLowerCase();
    return (wanted.text || "").toLowerCase().split(/\s+/).every((word) => text.includes(word));
  }

  function filter() {
    const wanted = Object.fromEntries([...new FormData(form)].filter(([, value]) => value));
    for (const row of rows) row.hidden = !shows(row, wanted);
    const shown = rows.filter((row) => !row.hidden);
    document.getElementById("count").textContent = `${shown.length} of ${rows.length} shapes`;
    location.replace("#" + new URLSearchParams(wanted));
    overview(shown);
  }

  function overview(shown) {
    const families = new Map();
    const [family, speed] = [column("family"), column("TFLOP/s")];
    for (const row of shown) {
      if (Number.isNaN(number(row, speed))) continue;
      const name = row.cells[family].textContent;
      const trace = families.get(name) || { name, x: [], y: [], text: [], mode: "markers", type: "scatter" };
      trace.x.push(REPORT.shapes[row.dataset.name].keys);
      trace.y.push(number(row, speed));
      trace.text.push(plain(`${row.cells[0].textContent} on ${row.cells[1].textContent}`));
      families.set(name, trace);
    }
    const traces = [...families.values()].sort((one, other) => (one.name < other.name ? -1 : 1));
    draw(document.getElementById("overview"), traces, {
      xaxis: { type: "log", dtick: Math.log10(4), title: { text: "keys" }, tickformat: ",d" },
      yaxis: { title: { text: "TFLOP/s" }, rangemode: "tozero" },
    });
  }

  function sort(at, descending) {
    const value = (row) => (at ? number(row, at) : NaN);
    const text = (row) => row.cells[at].textContent;
    rows.sort((one, other) => {
      const [first, second] = [value(one), value(other)];
      if (Number.isNaN(first) && Number.isNaN(second)) {
        const order = text(one).localeCompare(text(other), undefined, { numeric: true });
        return descending ? -order : order;
      }
      // Shapes without this number come last in both orders.
      if (Number.isNaN(first) || Number.isNaN(second)) return Number.isNaN(first) ? 1 : -1;
      return descending ? second - first : first - second;
    });
    body.append(...rows);
    heads.forEach((head, other) => {
      if (other === at) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  }

  heads.forEach((head, at) => {
    head.querySelector("button").addEventListener("click", () => sort(at, head.getAttribute("aria-sort") === "ascending"));
  });
  for (const [name, value] of new URLSearchParams(location.hash.slice(1) || location.search)) {
    if (form.elements[name]) form.elements[name].value = value;
  }
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(filter));
  filter();
}

/* ---- Shape ---- */

const milliseconds = (ms) => `${Number(ms.toPrecision(4))} ms`;
const bytes = (count) => `${count.toLocaleString("en")} B`;

function grid(caption, heads, rows, kind = "") {
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
  const lines = rows.map(([first, ...cells]) =>
    make("tr", {}, make("th", { scope: "row" }, first), ...cells.map((cell) => make("td", {}, String(cell)))),
  );
  const table = make("table", { class: kind }, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...lines));
  return make("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" }, table);
}

function times(shape, texts) {
  const bars = shape.kernels.filter((kernel) => kernel.time).map((kernel, at) => ({
    name: texts[kernel.family],
    detail: at ? "other strides" : "selected",
    time: kernel.time,
    spread: !kernel.predicted,
    color: COLORS[0],
  }));
  shape.rivals.forEach(([name, detail, predicted, ...time]) => bars.push({ name, detail, time, spread: !predicted, color: COLORS[1] }));
  const peers = shape.kernels.length ? shape.kernels[0].peers : [];
  for (const [name, ms] of peers) bars.push({ name: texts[name], detail: "", time: [ms, ms, ms], spread: false, color: COLORS[6] });
  if (!bars.length) return [];
  bars.sort((one, other) => one.time[0] - other.time[0]);
  bars.forEach((bar, at) => { bar.name = `${at + 1}. ${bar.name}`; });
  const best = shape.kernels.length && shape.kernels[0].time ? shape.kernels[0].time[0] : bars[0].time[0];
  const trace = {
    type: "bar",
    orientation: "h",
    y: bars.map((_, at) => at),
    x: bars.map((bar) => bar.time[0]),
    text: bars.map((bar) => milliseconds(bar.time[0])),
    hovertext: bars.map((bar) => plain(`${bar.name} ${bar.detail}`)),
    // Texts in short bars would be too small to read.
    textposition: "outside",
    marker: { color: bars.map((bar) => bar.color) },
    error_x: {
      type: "data",
      symmetric: false,
      array: bars.map((bar) => (bar.spread ? bar.time[2] - bar.time[0] : NaN)),
      arrayminus: bars.map((bar) => (bar.spread ? bar.time[0] - bar.time[1] : NaN)),
    },
  };
  const layout = {
    height: 110 + 28 * bars.length,
    showlegend: false,
    shapes: [{ type: "line", x0: shape.bound[0], x1: shape.bound[0], y0: 0, y1: 1, yref: "paper", line: { dash: "dash", color: "#1b1f24" } }],
    xaxis: { title: { text: "ms" }, range: [0, 1.4 * Math.max(...trace.x)] },
    yaxis: { tickvals: trace.y, ticktext: bars.map((bar) => plain(bar.name)), autorange: "reversed" },
  };
  const text = `Median times; error bars reach from the 20th to the 80th percentile of measured kernels. The dashed line is the roofline, ${milliseconds(shape.bound[0])}.`;
  const rows = bars.map((bar) => [bar.name, milliseconds(bar.time[0]), bar.spread ? bar.time.slice(1).map((ms) => Number(ms.toPrecision(4))).join(" to ") : "–", (bar.time[0] / best).toFixed(2), bar.detail]);
  return [
    make("h2", {}, "Times"),
    figure("Times", text, [trace], layout, "bars"),
    grid("Times, fastest first", ["implementation", "median", "20th to 80th percentile, ms", "over the selected", "config"], rows, "last-text"),
  ];
}

function sram(shape, texts) {
  const kernels = shape.kernels.filter((kernel) => kernel.sram.length);
  if (!kernels.length) return [];
  const parts = [...new Set(kernels.flatMap((kernel) => kernel.sram.map(([name]) => texts[name])))];
  const size = (kernel, part) => kernel.sram.reduce((sum, [name, count]) => (texts[name] === part ? sum + count : sum), 0);
  const names = kernels.map((kernel) => texts[kernel.family]);
  const traces = parts.map((part) => ({ type: "bar", orientation: "h", name: plain(part), y: names, x: kernels.map((kernel) => size(kernel, part) / 1024) }));
  const capacity = shape.capacity / 1024;
  const layout = {
    barmode: "stack",
    height: 190 + 45 * kernels.length,
    xaxis: { title: { text: "KiB" }, range: [0, capacity * 1.05] },
    yaxis: { autorange: "reversed" },
    shapes: [{ type: "line", x0: capacity, x1: capacity, y0: 0, y1: 1, yref: "paper", line: { dash: "dash", color: "#b00020" } }],
    legend: { orientation: "h", y: -0.45, yanchor: "top", x: 0 },
  };
  const text = `Shared memory of a block by the model of the family. The dashed line is the capacity, ${bytes(shape.capacity)}.`;
  const rows = parts.map((part) => [part, ...kernels.map((kernel) => bytes(size(kernel, part)))]);
  rows.push(["model, in all", ...kernels.map((kernel) => bytes(kernel.sram.reduce((sum, [, count]) => sum + count, 0)))]);
  rows.push(["compiled", ...kernels.map((kernel) => (kernel.compiled ? bytes(kernel.compiled[0]) : "–"))]);
  rows.push(["registers a thread", ...kernels.map((kernel) => (kernel.compiled ? kernel.compiled[1] : "–"))]);
  rows.push(["spilled", ...kernels.map((kernel) => (kernel.compiled ? bytes(kernel.compiled[2]) : "–"))]);
  return [make("h2", {}, "SRAM map"), figure("SRAM map", text, traces, layout, "bars"), grid("SRAM of a block", ["part", ...names], rows)];
}

function showShape(root) {
  const { texts, shapes } = REPORT;
  const name = decodeURIComponent(location.search.slice(1));
  const shape = Object.hasOwn(shapes, name) ? shapes[name] : null;
  if (!shape) {
    root.replaceChildren(make("h1", {}, "No such shape"), make("p", {}, "Choose a shape on the ", make("a", { href: "index.html" }, "leaderboard"), "."));
    return;
  }
  const [gpu, key] = name.split("/");
  document.title = `${shape.title} on ${gpu} · flashtune`;
  const roles = shape.kernels.map((_, at) => (at ? "other strides" : "selected"));
  const [matrix, softmax, memory] = shape.limits.map(milliseconds);
  const rows = [
    ["Family", ...shape.kernels.map((kernel) => texts[kernel.family])],
    ["Config", ...shape.kernels.map((kernel) => texts[kernel.config])],
    ["Time", ...shape.kernels.map((kernel) => (kernel.time ? `${milliseconds(kernel.time[0])}${kernel.predicted ? ", predicted" : ""}, ${kernel.gbps === null ? `${kernel.tflops.toFixed(0)} TFLOP/s` : `${kernel.gbps.toFixed(0)} GB/s`}, ${((100 * shape.bound[0]) / kernel.time[0]).toFixed(0)}% of the roofline` : "–"))],
  ];
  const lines = shape.kernels.map((kernel) => proof(kernel, texts));
  const evidence = Object.keys(lines[0] || {}).map((head) => [head, ...lines.map((line) => line[head])]);
  const search = make("div", { id: "search" });
  root.replaceChildren(
    make("h1", {}, `${shape.title} on ${gpu}`),
    make("p", {}, make("code", {}, key)),
    make("p", {}, `At least ${milliseconds(shape.bound[0])}, bound by ${shape.bound[1]}: matrix units ${matrix}, softmax ${softmax}, memory ${memory}.`),
    ...(shape.models.length ? [make("p", {}, "Models: ", ...shape.models.flatMap((at, place) => [place ? ", " : "", make("a", { href: `model.html?${texts[at]}` }, texts[at])]), ".")] : []),
    ...(rows[0].length > 1 ? [make("h2", {}, "Kernel"), grid(roles.length > 1 ? "Selected kernel, and the kernel for tensors with strides that it cannot address" : "Selected kernel", ["", ...roles], rows, roles.length > 1 ? "facts two" : "facts")] : [make("p", {}, "No kernel is selected yet.")]),
    ...times(shape, texts),
    ...sram(shape, texts),
    ...(rows[0].length > 1 ? [make("h2", {}, "Evidence"), grid("Evidence of the selection", ["", ...roles], evidence, roles.length > 1 ? "facts two" : "facts")] : []),
    search,
  );
  if (shape.search) {
    const script = make("script", { src: shape.search });
    script.addEventListener("load", () => search.append(...searchPlots(shape)));
    document.head.append(script);
  }
}

const STANDINGS = {
  timed: "verified and timed under the versions installed here",
  verified: "verified under the versions installed here; the time is predicted",
  unproven: "not verified under the versions installed here: checked before its first use",
};

/** Returns the evidence of a kernel, a text for each head. */
function proof(kernel, texts) {
  const [checks, worst, device, failed] = kernel.verdict || [];
  const [samples, throttled, clock] = kernel.samples || [];
  const [versions, ...further] = kernel.versions.map((at) => texts[at]);
  return {
    Status: STANDINGS[kernel.standing],
    Receipt: kernel.verdict
      ? `${texts[failed] ? `failed ${texts[failed]}` : "passed"}, ${checks.toLocaleString("en")} checks on ${texts[device]}; the largest error is ${worst.toPrecision(2)} of the tolerance`
      : "none: never verified",
    Probes: texts[kernel.probes] || "–",
    Versions: versions,
    "Also passed with": further.join("; ") || "–",
    Time: kernel.predicted || !kernel.samples
      ? "predicted by a model, not measured"
      : `median of ${samples} samples; clock ${throttled ? "" : "not "}throttled while sampling, ${clock} MHz by the datasheet`,
    "Machine code": kernel.bundle === null ? "no bundle here has it: Triton compiles it at the first call" : `from ${texts[kernel.bundle]}`,
    Digest: kernel.digest || "–",
  };
}

/** Returns the plots of a search, from the variable of its script. */
function searchPlots(shape) {
  const { candidates, figures } = SEARCH;
  const outcomes = new Map();
  for (const [, outcome] of candidates) outcomes.set(outcome, (outcomes.get(outcome) || 0) + 1);
  const ended = [...outcomes].map(([outcome, count]) => `${count} ${outcome}`).join(", ");
  const timed = candidates.map(([family, outcome, size, ms, config], at) => ({ family, outcome, size: size / 1024, ms, config, at })).filter((one) => one.ms !== null);
  const whole = [make("h2", {}, "Search"), make("p", {}, `${candidates.length} candidates by outcome: ${ended}.`)];
  if (timed.length) whole.push(...convergence(timed, candidates.length), ...sizes(timed, candidates, shape.capacity / 1024));
  for (const { title, text, data, layout } of figures) {
    whole.push(make("h3", {}, title), figure(title, text, data, { ...layout, height: 420, margin: { ...BASE.margin, r: 45 } }, title.startsWith("Parallel") ? "wide" : ""));
  }
  return whole;
}

function points(name, chosen, x, y, marker = {}) {
  return { name, mode: "markers", type: "scatter", x: chosen.map(x), y: chosen.map(y), text: chosen.map((one) => plain(`${one.family}: ${one.config}`)), marker };
}

function convergence(timed, count) {
  const families = [...new Set(timed.map((one) => one.family))];
  const traces = families.map((family) => points(family, timed.filter((one) => one.family === family), (one) => one.at + 1, (one) => one.ms));
  let best = Infinity;
  const bests = timed.map((one) => (best = Math.min(best, one.ms)));
  traces.push({ name: "best so far", mode: "lines", x: timed.map((one) => one.at + 1), y: bests, line: { shape: "hv", color: "#1b1f24" } });
  const first = timed.find((one) => one.ms === best);
  const text = `Times of the candidates in the order of the search. The best one, ${milliseconds(best)}, is number ${first.at + 1} of ${count}.`;
  return [make("h3", {}, "Convergence"), figure("Convergence of the search", text, traces, { height: 400, xaxis: { title: { text: "candidate" } }, yaxis: { title: { text: "ms" }, type: "log" } })];
}

function sizes(timed, candidates, capacity) {
  const families = [...new Set(timed.map((one) => one.family))];
  const traces = families.map((family) => points(family, timed.filter((one) => one.family === family), (one) => one.size, (one) => one.ms));
  const [fastest, slowest] = [Math.min(...timed.map((one) => one.ms)), Math.max(...timed.map((one) => one.ms))];
  const others = candidates.filter(([, , , ms]) => ms === null).map(([family, outcome, size, , config]) => ({ family, outcome, size: size / 1024, config }));
  const unfit = others.filter((one) => one.outcome === "infeasible");
  const failed = others.filter((one) => one.outcome !== "infeasible");
  if (unfit.length) traces.push(points("does not fit", unfit, (one) => Math.max(one.size, capacity), () => slowest, { symbol: "x", color: "#b00020" }));
  if (failed.length) traces.push(points("failed", failed, (one) => one.size, () => slowest, { symbol: "diamond-open", color: "#4a5560" }));
  traces.push({ name: "capacity", mode: "lines", x: [capacity, capacity], y: [fastest, slowest], line: { dash: "dash", color: "#b00020" } });
  const text = `Times of ${timed.length} candidates against the SRAM of a block. At the top, without times: ${unfit.length} that do not fit, and ${failed.length} that failed. The dashed line is the capacity, ${Math.round(capacity)} KiB.`;
  return [make("h3", {}, "Time and SRAM"), figure("Time and SRAM of the candidates", text, traces, { height: 400, xaxis: { title: { text: "SRAM of a block, KiB" } }, yaxis: { title: { text: "ms" }, type: "log" } })];
}

/* ---- Model ---- */

function showModel(root) {
  const name = decodeURIComponent(location.search.slice(1));
  const model = Object.hasOwn(MODELS, name) ? MODELS[name] : null;
  if (!model) {
    root.replaceChildren(make("h1", {}, "No such model"), make("p", {}, "Choose one of the ", make("a", { href: "models.html" }, "models"), "."));
    return;
  }
  document.title = `${name} · flashtune`;
  root.replaceChildren(
    make("h1", {}, name),
    make("p", {}, `Attention of ${model.layers} layers, batch 1, over sequence length: of unfused attention, which stores its scores, and of the kernels that dispatch selects (flash). Memory is that of a layer in addition to queries, keys and values; KV is the cache of all layers. Times are the smallest possible ones by peak rates, and not measured. `,
      make("a", { href: `index.html?model=${name}` }, `Tuned shapes of ${name}`), "."),
    ...model.sets.flatMap(curves),
  );
}

function curves({ title, tokens, panels }) {
  const plots = panels.map(([unit, lines]) => {
    const traces = Object.entries(lines).map(([name, y]) => ({ name, x: tokens, y, mode: "lines+markers", line: { color: NAMED[name] } }));
    const layout = {
      height: 270,
      xaxis: { type: "log", title: { text: "tokens" }, tickvals: tokens, tickformat: ",d" },
      yaxis: traces.length > 1 ? { type: "log", exponentformat: "power", dtick: 1 } : { rangemode: "tozero" },
      showlegend: traces.length > 1,
    };
    return make("div", {}, make("h3", {}, unit), figure(`${title}: ${unit}`, "", traces, layout));
  });
  const columns = panels.flatMap(([unit, lines]) => Object.entries(lines).map(([name, values]) => [`${unit}: ${name}`, values]));
  const rows = tokens.map((count, at) => [count.toLocaleString("en"), ...columns.map(([, values]) => Number(values[at].toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 }))]);
  return [
    make("h2", {}, title),
    make("div", { class: "grid" }, ...plots),
    make("details", {}, make("summary", {}, `Numbers of ${title}`), grid(`Numbers of ${title}`, ["tokens", ...columns.map(([head]) => head)], rows)),
  ];
}

/* ---- Start ---- */

const refresh = document.getElementById("refresh");
if (refresh) {
  setInterval(() => refresh.checked && location.reload(), 1000 * refresh.dataset.seconds);
}
const table = document.getElementById("board");
if (table) board(table);
const root = document.getElementById("shape");
if (root) showShape(root);
const modelRoot = document.getElementById("model");
if (modelRoot) showModel(modelRoot);
