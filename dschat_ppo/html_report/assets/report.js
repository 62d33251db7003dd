"use strict";
/* Draws the figures with uPlot, which sets the texts of runs as text, and filters the answers. A live page (live.js)
   calls `begin` again with each new state of the runs. */
const isPhone = matchMedia("(max-width: 600px)").matches, hidden = new Set();
const DASHES = [[], [8, 3], [3, 2], [10, 3, 2, 3], [14, 4], [6, 2, 2, 2, 2, 2], [], []];
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
let runs, figures, plots = [], smoothing = 0;

function shown(value) {
  if (value === null) return "NaN";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

/* The mean of the values so far with exponentially falling weights; equal to the first value at the first point. */
function smooth(values) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value == null) return value;
    sum = smoothing * sum + (1 - smoothing) * value;
    total = smoothing * total + (1 - smoothing);
    return sum / total;
  });
}

/* Vertical lines at the health events of the visible runs, and crosses where a line has a NaN. */
function drawMarks(chart, panel, raw, events) {
  const { ctx, bbox: { left, top, width, height } } = chart, dot = devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colour("mark");
  ctx.lineWidth = dot;
  ctx.setLineDash([2 * dot, 3 * dot]);
  for (const { step } of events()) {
    const x = chart.valToPos(step, "x", true);
    if (x < left || x > left + width) continue;
    ctx.stroke(new Path2D(`M${x} ${top}v${height}`));
    ctx.fill(new Path2D(`M${x - 4 * dot} ${top}h${8 * dot}l${-4 * dot} ${6 * dot}z`));
  }
  ctx.setLineDash([]);
  panel.series.forEach((one, i) => raw[0].forEach((at, n) => {
    if (raw[i + 1][n] !== null || hidden.has(one.run)) return;
    const x = chart.valToPos(at, "x", true), y = top + height - 6 * dot, d = 3 * dot;
    ctx.stroke(new Path2D(`M${x - d} ${y - d}l${2 * d} ${2 * d}m0 ${-2 * d}l${-2 * d} ${2 * d}`));
  }));
  ctx.restore();
}

function draw(plot, panel) {
  const raw = uPlot.join(panel.series.map((one) => [one.x, one.y]));  // undefined: no value at this step; null: NaN
  const events = () => [...new Set(panel.series.map((one) => one.run))]
    .filter((run) => !hidden.has(run)).flatMap((run) => runs[run].events);
  const place = (i) => (runs.length > 1 ? panel.series[i].run : i) % 8;  // in the palette
  const values = () => raw.map((row, i) => (i && smoothing ? smooth(row) : [...row]));
  const read = (chart, _, i, n) => {  // the last value without a cursor
    if (n === null) n = raw[i].findLastIndex((value) => value != null);
    if (raw[i][n] === undefined) return "";
    const isSmoothed = smoothing && raw[i][n] !== null;
    return shown(raw[i][n]) + (isSmoothed ? ` (${shown(chart.data[i][n])})` : "");
  };
  const where = (_, at, i, n) => {
    if (at == null) return "last";
    const names = events().filter(({ step }) => step <= at && step > (n ? raw[0][n - 1] : -Infinity));
    return shown(at) + (names.length ? `; health: ${names.map((event) => event.name).join(", ")}` : "");
  };
  const axis = { stroke: () => colour("quiet"), font: "11px system-ui, sans-serif", ticks: { show: false } };
  const holder = document.createElement("div");
  holder.className = "lines";
  const chart = new uPlot({
    width: plot.clientWidth, height: 200,
    scales: { x: { time: false } }, cursor: { y: false, dataIdx: (_, i, n) => n },
    axes: [
      { ...axis, size: 28, grid: { show: false }, values: (_, ticks) => ticks.map((at) => (at % 1 === 0 ? shown(at) : "")) },
      { ...axis, size: 54, grid: { stroke: () => colour("rule"), width: 1 }, values: (_, ticks) => ticks.map(shown) },
    ],
    series: [{ label: "step", value: where }, ...panel.series.map((one, i) => ({
      label: one.label, show: !hidden.has(one.run), stroke: () => colour(`c${place(i)}`), width: 2, dash: DASHES[place(i)], value: read,
      points: { fill: () => colour("page") },
    }))],
    legend: { markers: { width: 0, fill: (_, i) => `var(--c${place(i - 1)})` } },
    hooks: { draw: [(drawn) => drawMarks(drawn, panel, raw, events)] },
  }, values(), holder);
  holder.tabIndex = 0;
  holder.setAttribute("role", "group");
  holder.setAttribute("aria-label", plot.getAttribute("aria-label"));
  holder.querySelector(".u-legend").setAttribute("aria-live", "polite");
  holder.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const next = (chart.cursor.idx ?? -1) + moves[event.key], n = Math.min(Math.max(next, 0), raw[0].length - 1);
    chart.setCursor({ left: chart.valToPos(raw[0][n], "x"), top: 0 });
  });
  const update = () => {
    chart.setData(values());
    panel.series.forEach((one, i) => chart.setSeries(i + 1, { show: !hidden.has(one.run) }));
  };
  plot.append(...(panel.title ? [Object.assign(document.createElement("h4"), { textContent: panel.title })] : []), holder);
  return { chart, update };
}

/* A figure in a closed part of the page has no width, and is drawn when it gets one. */
function fit(plot) {
  const width = plot.clientWidth;
  if (width && !plot.drawn) plot.drawn = figures[plot.dataset.figure].map((panel) => draw(plot, panel));
  else if (width) for (const { chart } of plot.drawn) chart.setSize({ width, height: 200 });
}
const resized = new ResizeObserver((entries) => { for (const { target } of entries) fit(target); });

/* Show the figures of these data in the <main> that is there now. */
function begin(data) {
  ({ runs, figures } = data);
  resized.disconnect();
  plots = [...document.querySelectorAll(".plot")];
  for (const part of document.querySelectorAll(".part")) part.open = !isPhone;
  document.getElementById("search")?.addEventListener("input", search);
  for (const plot of plots) {
    fit(plot);  // at once, so that the page has its height
    resized.observe(plot);
  }
}
const all = () => plots.flatMap((plot) => plot.drawn || []);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => all().forEach(({ chart }) => chart.redraw()));
document.getElementById("smoothing").addEventListener("input", ({ target }) => {
  smoothing = target.value / 100;
  for (const { update } of all()) update();
});
for (const box of document.querySelectorAll("[data-run]")) {
  box.addEventListener("change", () => {
    hidden[box.checked ? "delete" : "add"](Number(box.dataset.run));
    for (const { update } of all()) update();
  });
}

document.querySelector("nav").addEventListener("click", ({ target }) => {
  const part = target.hash && document.querySelector(`${target.hash} > .part`);
  if (part) part.open = true;
});
function search() {
  const words = document.getElementById("search").value.trim().toLowerCase();
  for (const card of document.querySelectorAll(".card")) card.hidden = !card.textContent.toLowerCase().includes(words);
  for (const group of document.querySelectorAll(".group")) {
    group.hidden = !group.querySelector(".card:not([hidden])");
    if (words) group.open = !group.hidden;
  }
}
begin(JSON.parse(document.getElementById("data").textContent));
