/* Answers side by side: two evaluations of the same prompts, or the samples of training in their order. */
const CARDS = matchMedia("(max-width: 600px)").matches ? 5 : 20;  // shown at once

function aboutAnswer(row) {
  const ends = { eos: "ended", stop: "ended at a stop string", length: "cut at the length limit", chosen: "chosen", rejected: "rejected", data: "an answer of the data" };
  const parts = [];
  if (row.score !== null) parts.push(`score ${shown(row.score)}`);
  for (const [source, score] of Object.entries(row.scores || {})) parts.push(`${source} ${score === null ? "-" : shown(score)}`);
  if (row.kl !== null) parts.push(`KL ${shown(row.kl)} per token`);
  if (row.tokens !== null) parts.push(`${row.tokens} tokens`);
  if (ends[row.ended]) parts.push(ends[row.ended]);
  return parts.join(", ");
}

function answerColumn(title, rows) {
  const column = make("div", {}, make("p", { class: "about" }, make("strong", {}, title)));
  for (const row of rows) {
    column.append(make("p", { class: "about" }, aboutAnswer(row)));
    column.append(row.text ? make("p", { class: "text" }, row.text) : make("p", { class: "empty" }, "empty answer"));
  }
  if (!rows.length) column.append(make("p", { class: "empty" }, "no answer to this prompt"));
  return column;
}

function choice(label, options) {
  const select = make("select", {}, ...options.map(([value, text]) => make("option", { value }, text)));
  return { select, label: make("label", {}, `${label} `, select) };
}

function card(prompt, columns) {
  const text = make("p", { class: "text" }, prompt);
  const heading = make("p", { class: "about" }, "Prompt");
  return make("article", { class: "answer-card" }, heading, text, make("div", { class: "columns" }, ...columns));
}

/* Cards that match the search, `CARDS` at a time. `matching()` returns functions that make one card each. */
function pager(parent, filters, matching) {
  const count = make("p", { class: "about", "aria-live": "polite" }), list = make("div");
  const more = make("button", { type: "button", class: "more" }, "Show more");
  let made = [], visible = 0;
  const extend = () => {
    list.append(...made.slice(visible, visible + CARDS).map((build) => build()));
    visible = Math.min(visible + CARDS, made.length);
    count.textContent = made.length ? `${visible} of ${made.length} shown` : "Nothing matches.";
    more.hidden = visible >= made.length;
  };
  const restart = () => { made = matching(); visible = 0; list.replaceChildren(); extend(); };
  more.addEventListener("click", extend);
  filters.addEventListener("input", restart);
  filters.addEventListener("submit", (event) => event.preventDefault());
  parent.append(filters, count, list, more);
  restart();
}

function searchBox() {
  const box = make("input", { type: "search", placeholder: "prompt or answer" });
  return { box, label: make("label", {}, "Search ", box) };
}

function holds(rows, words) {
  return !words || rows.some((row) => row.prompt.toLowerCase().includes(words) || row.text.toLowerCase().includes(words));
}

function showHeldOut(parent, rows, runs) {
  const name = (run) => (runs.length > 1 ? `${runs[run].name}, ` : "");
  const keys = [...new Set(rows.map((row) => `${row.run}:${row.step}`))];
  const options = keys.map((key) => [key, `${name(key.split(":")[0])}step ${key.split(":")[1]}`]);
  const left = choice("Left", options), right = choice("Right", options);
  const ends = runs.map((_, run) => keys.filter((key) => key.startsWith(`${run}:`)).pop()).filter(Boolean);
  left.select.value = ends.length > 1 ? ends[0] : keys[0];  // of several runs the last evaluations, of one its first and last
  right.select.value = ends.length > 1 ? ends[1] : ends[0];
  const search = searchBox(), sides = keys.length > 1 ? [left, right] : [left];
  const titles = Object.fromEntries(options);
  const prompts = new Map();
  for (const row of rows) {
    if (!prompts.has(row.prompt)) prompts.set(row.prompt, []);
    prompts.get(row.prompt).push(row);
  }
  const of = (own, key) => own.filter((row) => `${row.run}:${row.step}` === key);
  const build = (prompt, own) => () => {
    const made = card(prompt, sides.map(({ select }) => answerColumn(titles[select.value], of(own, select.value))));
    if (keys.length > 2) {
      const all = make("details", {}, make("summary", {}, `All ${keys.length} evaluations`));
      all.addEventListener("toggle", () => {
        if (all.open && all.children.length === 1) {
          all.append(make("div", { class: "columns" }, ...keys.map((key) => answerColumn(titles[key], of(own, key)))));
        }
      });
      made.append(all);
    }
    return made;
  };
  parent.append(make("h3", {}, "Held-out prompts"));
  const choices = keys.length > 1 ? sides.map((side) => side.label) : [];
  const said = "Every evaluation has the same prompts: choose two evaluations to compare their answers.";
  if (choices.length) parent.append(make("p", { class: "quiet" }, said));
  pager(parent, make("form", { class: "filters" }, ...choices, search.label), () => {
    const words = search.box.value.trim().toLowerCase();
    return [...prompts].filter(([, own]) => holds(own, words)).map(([prompt, own]) => build(prompt, own));
  });
}

function showTraining(parent, rows, runs) {
  const name = (run) => (runs.length > 1 ? `${runs[run].name}, ` : "");
  const keys = [...new Set(rows.map((row) => `${row.run}:${row.step}`))];
  const options = [["", "all steps"], ...keys.map((key) => [key, `${name(key.split(":")[0])}step ${key.split(":")[1]}`])];
  const step = choice("Step", options), search = searchBox();
  const order = choice("Order", [["step", "by step"], ["low", "lowest score first"], ["high", "highest score first"]]);
  const titles = Object.fromEntries(options);
  const score = (row) => row.score ?? 0;
  const orders = { step: () => 0, low: (a, b) => score(a) - score(b), high: (a, b) => score(b) - score(a) };
  parent.append(make("h3", {}, "Training samples"));
  parent.append(make("p", { class: "quiet" }, "Responses to prompts of the training data: the lowest and highest scores show what the reward prefers."));
  pager(parent, make("form", { class: "filters" }, step.label, order.label, search.label), () => {
    const words = search.box.value.trim().toLowerCase();
    const found = rows.filter((row) => (!step.select.value || `${row.run}:${row.step}` === step.select.value) && holds([row], words));
    return found.sort(orders[order.select.value]).map((row) => () => card(row.prompt, [answerColumn(titles[`${row.run}:${row.step}`], [row])]));
  });
}

function showAnswers(parent, { answers, runs }) {
  const kinds = { "held-out": showHeldOut, training: showTraining };
  for (const [kind, show] of Object.entries(kinds)) {
    const rows = answers.filter((row) => row.kind === kind);
    if (rows.length) show(parent, rows, runs);
  }
}
