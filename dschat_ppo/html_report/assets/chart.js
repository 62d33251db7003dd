"use strict";
/* Draws one panel of a figure as SVG. Texts of runs enter the page as text nodes only, never as HTML. */
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 220, LEFT = 54, RIGHT = 12, TOP = 10, BOTTOM = 34;

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function draw(parent, tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function shown(value) {
  if (value === null || value === undefined) return "NaN";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

/* The mean of the values so far with exponentially falling weights; equal to the first value at the first point. */
function smooth(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/* Round numbers that divide [low, high] into about `count` parts. */
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(Number((n * step).toPrecision(12)));
  return found;
}

/* [lowest, highest] of the values with some space, or from the 2nd to the 98th percentile; never empty, and not below
   0 where no value is. */
function extent(values, withoutOutliers) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  if (!sorted.length) return [0, 1];
  const cut = withoutOutliers ? Math.floor(sorted.length * 0.02) : 0;
  const low = sorted[cut], high = sorted[sorted.length - 1 - cut];
  const constant = high - low <= 1e-9 * Math.max(Math.abs(high), Math.abs(low));  // but for rounding
  const pad = constant ? Math.abs(high) * 0.1 || 1 : (high - low) * 0.06;
  return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
}

/* The path through the points; a null interrupts it. */
function pathOf(xs, ys, x, y) {
  let path = "", pen = "M";
  xs.forEach((at, i) => {
    if (ys[i] === null || at === null) { pen = "M"; return; }
    path += `${pen}${x(at).toFixed(1)} ${y(ys[i]).toFixed(1)}`;
    pen = "L";
  });
  return path;
}

/* The areas between two lines, one for each stretch without a null. */
function areaOf(xs, lows, highs, x, y) {
  let path = "", there = [], back = [];
  const close = () => {
    if (there.length) path += `M${there.join("L")}L${back.reverse().join("L")}Z`;
    there = []; back = [];
  };
  xs.forEach((at, i) => {
    if (lows[i] === null || highs[i] === null) { close(); return; }
    there.push(`${x(at).toFixed(1)} ${y(highs[i]).toFixed(1)}`);
    back.push(`${x(at).toFixed(1)} ${y(lows[i]).toFixed(1)}`);
  });
  close();
  return path;
}

/* `marks`: the numbers below the horizontal axis; null for round ones. */
function frame(width, domainX, domainY, label, marks = null) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.setAttribute("aria-hidden", "true");
  const x = (value) => LEFT + ((value - domainX[0]) / (domainX[1] - domainX[0])) * (width - LEFT - RIGHT);
  const y = (value) => {
    const share = (value - domainY[0]) / (domainY[1] - domainY[0]);
    return HEIGHT - BOTTOM - Math.min(Math.max(share, -0.02), 1.02) * (HEIGHT - TOP - BOTTOM);
  };
  for (const tick of ticks(domainY[0], domainY[1], 5)) {
    draw(svg, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) });
    draw(svg, "text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, shown(tick));
  }
  let last = -Infinity;
  for (const tick of marks || ticks(domainX[0], domainX[1], Math.max(2, Math.floor(width / 70)))) {
    if ((label === "step" && tick !== Math.round(tick)) || x(tick) - last < 28) continue;
    draw(svg, "text", { x: x(tick), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, shown(tick));
    last = x(tick);
  }
  draw(svg, "text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, label);
  return { svg, x, y, width };
}

function stepDomain(series) {
  const steps = series.flatMap((one) => one.x);
  const low = Math.min(...steps), high = Math.max(...steps);
  return high > low ? [low, high] : [low - 1, high + 1];
}

/* The steps themselves if they are few: a single evaluation has no other step. */
function stepMarks(series) {
  const steps = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
  return steps.length <= 6 ? steps : null;
}

/* Of each stop its own events: those after the stop before it. Returns functions that give the text of a stop. */
function withEvents(steps, runs, events, text) {
  const own = [...runs].flatMap((run) => events[run]);
  return steps.map((step, n) => {
    const since = n ? steps[n - 1] : -Infinity;
    const names = own.filter((event) => event.step > since && event.step <= step).map((event) => event.name);
    return () => text(step, n) + (names.length ? `; health: ${names.join(", ")}` : "");
  });
}

function drawEvents(plane, runs, events) {
  for (const run of runs) {
    for (const event of events[run]) {
      const at = plane.x(event.step);
      if (at < LEFT - 1 || at > plane.width - RIGHT + 1) continue;
      draw(plane.svg, "line", { class: "event", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM });
      draw(plane.svg, "path", { class: "event-head", d: `M${at - 4} ${TOP - 6}h8l-4 6z` });
    }
  }
}

function drawLines(panel, width, settings, events) {
  const smoothed = panel.series.map((one) => smooth(one.y, settings.smoothing));
  const values = panel.series.flatMap((one, i) => smoothed[i].concat(one.low || one.y, one.high || []));
  const plane = frame(width, stepDomain(panel.series), extent(values, settings.outliers), "step", stepMarks(panel.series));
  const { svg, x, y } = plane;
  const runs = new Set(panel.series.map((one) => one.run)), most = Math.max(...panel.series.map((one) => one.x.length));
  drawEvents(plane, runs, events);
  panel.series.forEach((one, i) => {
    if (one.low) draw(svg, "path", { class: `range f${one.colour}`, d: areaOf(one.x, one.low, one.high, x, y) });
    if (settings.smoothing > 0) draw(svg, "path", { class: `raw c${one.colour}`, d: pathOf(one.x, one.y, x, y) });
    const isSparse = one.x.length <= 12 || one.x.length * 3 <= most;  // such as evaluations: the line only joins them
    draw(svg, "path", { class: `line c${one.colour}${isSparse ? " joined" : ""}`, d: pathOf(one.x, smoothed[i], x, y) });
    one.x.forEach((at, n) => {  // a point without neighbours has no line
      const alone = one.y[n] !== null && (one.y[n - 1] ?? null) === null && (one.y[n + 1] ?? null) === null;
      if (alone || (isSparse && one.y[n] !== null)) {
        draw(svg, "circle", { class: `point f${one.colour}`, cx: x(at), cy: y(smoothed[i][n]), r: 4 });
      }
    });
    for (const at of one.gaps) {
      const foot = HEIGHT - BOTTOM - 5;
      draw(svg, "path", { class: "gap", d: `M${x(at) - 3} ${foot - 3}l6 6m0 -6l-6 6` });
    }
  });
  const steps = [...new Set(panel.series.flatMap((one) => one.x))].sort((a, b) => a - b);
  const read = (step) => panel.series.map((one, i) => {
    const n = one.x.indexOf(step);
    return n < 0 ? null : `${one.label} ${shown(one.y[n])}` + (settings.smoothing ? ` (${shown(smoothed[i][n])})` : "");
  }).filter((part) => part !== null).join(", ");
  const texts = withEvents(steps, runs, events, (step) => `step ${step}: ${read(step)}`);
  return { ...plane, stops: steps.map((step, n) => ({ at: x(step), text: texts[n] })) };
}

function drawBands(panel, width, settings, events) {
  const tops = [], steps = panel.series[0].x;
  let base = steps.map(() => 0);
  const smoothed = panel.series.map((one) => smooth(one.y.map((value) => value ?? 0), settings.smoothing));
  for (const values of smoothed) tops.push(base = base.map((below, i) => below + values[i]));
  const high = extent(base.concat([0]), settings.outliers)[1];
  const plane = frame(width, stepDomain(panel.series), [0, high], "step", stepMarks(panel.series));
  const { svg, x, y } = plane;
  const xs = steps.length > 1 ? steps : [steps[0] - 0.5, steps[0] + 0.5];  // a single step is a bar
  const wide = (values) => (steps.length > 1 ? values : [values[0], values[0]]);
  panel.series.forEach((one, i) => {
    const below = i ? tops[i - 1] : steps.map(() => 0);
    draw(svg, "path", { class: `band f${one.colour}`, d: areaOf(xs, wide(below), wide(tops[i]), x, y) });
  });
  drawEvents(plane, [panel.series[0].run], events);
  const read = (n) => panel.series.map((one, i) => `${one.label} ${shown(smoothed[i][n])}`).join(", ");
  const text = (step, n) => `step ${step}: ${shown(tops[tops.length - 1][n])} in all; ${read(n)}`;
  const texts = withEvents(steps, [panel.series[0].run], events, text);
  return { ...plane, stops: steps.map((step, n) => ({ at: x(step), text: texts[n] })) };
}

function drawPair(panel, width, settings) {
  const ys = panel.series.map((one) => smooth(one.y, settings.smoothing));
  const xs = panel.series.map((one) => smooth(one.x, settings.smoothing));
  const plane = frame(
    width, extent(xs.flat(), settings.outliers), extent(ys.flat(), settings.outliers), `${panel.across} (up: ${panel.up})`);
  const { svg, x, y } = plane, stops = [];
  panel.series.forEach((one, i) => {
    draw(svg, "path", { class: `line c${one.colour}`, d: pathOf(xs[i], ys[i], x, y) });
    const last = one.steps.length - 1;
    one.steps.forEach((step, n) => {
      const place = { class: `f${one.colour}`, cx: x(xs[i][n]), cy: y(ys[i][n]) };
      if (one.steps.length <= 150) draw(svg, "circle", { ...place, r: 2.5 });
      if (n === last) draw(svg, "circle", { class: `line c${one.colour} ring`, cx: place.cx, cy: place.cy, r: 7 });
      const text = () => `${one.label}, step ${step}: ${panel.across} ${shown(one.x[n])}, ${panel.up} ${shown(one.y[n])}`;
      stops.push({ at: place.cx, high: place.cy, text });
    });
  });
  return { ...plane, stops };
}
