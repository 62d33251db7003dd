/* Asks the server what the runs do, and takes the page with new steps into this one: figures, tables and answers. What
   the reader has opened, folded, zoomed, scrolled and searched stays. */
const line = document.getElementById("live");
let version = JSON.parse(document.getElementById("data").textContent).version, timer = null;

const nameOf = (chart) => chart.root.closest(".plot").dataset.key + chart.series[1].label + chart.series.length;
const box = () => document.getElementById("search");

/* What the reader has changed in the page as it is now, as a function that changes a new page likewise. */
function readersView() {
  const top = scrollY, words = box()?.value, focused = document.activeElement?.closest("main [data-key]")?.dataset.key;
  const folded = new Map(folds().filter((fold) => fold.open !== fold.atFirst).map((fold) => [fold.dataset.key, fold.open]));
  const aside = new Map(tables().map((table) => [table.ariaLabel, table.scrollLeft]));
  const zooms = new Map();
  for (const { chart } of all()) {
    const { min, max } = chart.scales.x, steps = chart.data[0];
    if (min > steps[0] || max < steps.at(-1)) zooms.set(nameOf(chart), { min, max });
  }
  return () => {
    for (const fold of folds()) fold.open = folded.get(fold.dataset.key) ?? fold.open;
    for (const plot of plots) if (!plot.drawn) fit(plot);
    for (const { chart } of all()) if (zooms.has(nameOf(chart))) chart.setScale("x", zooms.get(nameOf(chart)));
    for (const table of tables()) table.scrollLeft = aside.get(table.ariaLabel) ?? 0;
    if (words) {
      box().value = words;
      search();
    }
    const item = [...document.querySelectorAll("main [data-key]")].find((one) => focused && one.dataset.key === focused);
    item?.querySelector("summary, [tabindex]")?.focus({ preventScroll: true });
    scrollTo({ top, behavior: "instant" });
  };
}
const folds = () => [...document.querySelectorAll("main details[data-key]")];
const tables = () => [...document.querySelectorAll("main .wide")];

/* Remember how the folds are before the reader opens or closes one. */
function noteFolds() {
  for (const fold of folds()) fold.atFirst = fold.open;
}

async function takeNewPage() {
  const text = await (await fetch("/")).text();
  const page = new DOMParser().parseFromString(text, "text/html");
  const data = JSON.parse(page.getElementById("data").textContent);
  if (data.runs.map((run) => run.name).join() !== runs.map((run) => run.name).join()) {
    location.reload();  // a run has its first step, and gets its place in the settings
    return;
  }
  const restore = readersView();
  for (const { chart } of all()) chart.destroy();
  for (const part of ["main", "#made"]) document.querySelector(part).replaceWith(page.querySelector(part));
  document.querySelector("nav").innerHTML = page.querySelector("nav").innerHTML;
  begin(data);
  noteFolds();
  restore();
  version = data.version;
}

/* One question; the next one follows after the seconds that the server says, unless all runs have ended. */
async function ask() {
  let seconds = 5;
  try {
    const state = await (await fetch("/state")).json();
    const isReading = document.activeElement === box() && box() || !getSelection().isCollapsed;
    say(state.text, state.again === null);
    if (state.version !== version && isReading) say(`${state.text}; new steps wait while you search or select text`);
    else if (state.version !== version) await takeNewPage();
    seconds = state.again;
  } catch {
    say("the server does not answer; this page goes on when the command runs again");
  }
  timer = seconds === null ? null : setTimeout(ask, 1000 * seconds);
}

function say(text, isEnd = false) {
  line.className = isEnd ? "ended" : "";
  if (line.textContent !== text) line.textContent = text;
}

/* A page that nobody sees does not ask; when it is seen again it asks at once, also after the end of the runs. */
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden) ask();
});
noteFolds();
ask();
