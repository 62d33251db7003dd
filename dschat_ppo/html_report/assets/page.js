/* Puts the figures into the page, and reads values under the pointer or by the arrow keys. */
const data = JSON.parse(document.getElementById("data").textContent);
const settings = { smoothing: 0, outliers: false, events: true, hidden: new Set() };
const PRINTED_WIDTH = 340;  // of a figure, in CSS pixels: half a sheet
const KINDS = { lines: drawLines, stacked: drawBands, pair: drawPair };

function legend(series, kind) {
  const list = make("ul", { class: "legend" });
  for (const one of series) {
    const key = document.createElementNS(SVG, "svg");
    for (const [name, value] of Object.entries({ class: "key", width: 26, height: 10, "aria-hidden": "true" })) key.setAttribute(name, value);
    if (kind === "stacked") draw(key, "rect", { class: `f${one.colour}`, width: 22, height: 10 });
    else draw(key, "path", { class: `line c${one.colour}`, d: "M1 5H25" });
    list.append(make("li", one.about ? { title: one.about } : {}, key, ` ${one.label}`));
  }
  return list;
}

function valuesOf(series) {
  const item = (one) => make("li", one.about ? { title: one.about } : {}, `${one.label} `, make("strong", {}, shown(one.y[0])));
  return make("ul", { class: "legend" }, ...series.map(item));
}

/* Moves the cursor to a stop and says its values. */
function watch(chart, drawn, readout) {
  let current = -1;
  const cursor = draw(drawn.svg, "line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const show = (number) => {
    current = Math.min(Math.max(number, 0), drawn.stops.length - 1);
    const stop = drawn.stops[current];
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, stop.at);
    cursor.setAttribute("visibility", "visible");
    readout.textContent = stop.text();
  };
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) * drawn.width) / box.width, y = ((event.clientY - box.top) * drawn.width) / box.width;
    let best = 0, least = Infinity;
    drawn.stops.forEach((stop, n) => {
      const far = Math.hypot(stop.at - x, stop.high === undefined ? 0 : stop.high - y);
      if (far < least) { best = n; least = far; }
    });
    show(best);
  });
  chart.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: current + 1, ArrowLeft: current < 0 ? drawn.stops.length - 1 : current - 1, Home: 0, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]);
  });
}

function fill(plot, width = plot.clientWidth) {
  const figure = data.figures[plot.dataset.figure];
  plot.replaceChildren();
  plot.drawnAt = width;
  const events = data.runs.map((run) => (settings.events ? run.events : []));
  for (const panel of figure.panels) {
    const series = panel.series.filter((one) => !settings.hidden.has(one.run));
    if (!series.length) continue;
    if (panel.title) plot.append(make("h4", panel.about ? { title: panel.about } : {}, panel.title));
    const steps = new Set(series.flatMap((one) => one.x));
    if (figure.kind === "lines" && steps.size === 1) {  // a curve needs two points
      plot.append(make("p", { class: "single" }, `One point, at step ${[...steps][0]}:`), valuesOf(series));
      continue;
    }
    const drawn = KINDS[figure.kind]({ ...panel, series }, Math.max(260, width), settings, events);
    const about = `${plot.dataset.summary} ${panel.title}`.trim();
    const readout = make("p", { class: "readout", "aria-live": "polite" });
    const image = make("div", { role: "img", "aria-label": about }, drawn.svg);
    const chart = make("div", { class: "chart", tabindex: 0, role: "group", "aria-label": "Chart; the arrow keys read its values" }, image);
    watch(chart, drawn, readout);
    plot.append(chart, legend(series, figure.kind), readout);
  }
  if (!plot.children.length) plot.append(make("p", { class: "empty" }, "All runs of this figure are hidden."));
}

/* A figure in a closed part of the page has no width, and is drawn when it gets one. */
const parts = [...document.querySelectorAll("details.part")];
if (matchMedia("(max-width: 600px)").matches) for (const part of parts) part.open = false;
document.querySelector("nav").addEventListener("click", ({ target }) => {
  const part = target.hash && document.querySelector(`${target.hash} > .part`);
  if (part) part.open = true;
});
const plots = [...document.querySelectorAll(".plot")];
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) if (target.clientWidth && target.drawnAt !== target.clientWidth) fill(target);
});
for (const plot of plots) resized.observe(plot);
/* Figures on the screen at once, the others when the settings rest. */
let resting;
function redraw() {
  const later = [];
  for (const plot of plots) {
    const { top, bottom, width } = plot.getBoundingClientRect();
    if (width && bottom > 0 && top < innerHeight) fill(plot);
    else if (width) later.push(plot);
  }
  clearTimeout(resting);
  resting = setTimeout(() => later.forEach((plot) => fill(plot)), 100);
}
for (const plot of plots) if (plot.clientWidth) fill(plot);
addEventListener("beforeprint", () => {
  for (const plot of plots) if (plot.clientWidth) fill(plot, PRINTED_WIDTH);
});
addEventListener("afterprint", redraw);

const slider = document.getElementById("smoothing");
slider.addEventListener("input", () => {
  settings.smoothing = slider.value / 100;
  slider.nextElementSibling.textContent = `${slider.value} %`;
  redraw();
});
for (const name of ["outliers", "events"]) {
  const box = document.getElementById(name);
  if (box) box.addEventListener("change", () => { settings[name] = box.checked; redraw(); });
}
for (const box of document.querySelectorAll("[data-run]")) {
  box.addEventListener("change", () => {
    settings.hidden[box.checked ? "delete" : "add"](Number(box.dataset.run));
    redraw();
  });
}
const cards = document.querySelector(".cards");
if (cards) showAnswers(cards, data);
