"use strict";
// The page keeps the conversation: turns of {question, answers: one text for each model}.
const byId = (id) => document.getElementById(id);
const turns = [];
let models = [];
let number = 0; // of the next answer: another one draws other random numbers
let running = null; // AbortController of the answers that are being generated

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text; // never as HTML: models write what they like
  return made;
}

function messages(model, count) {
  const system = byId("system").value;
  const found = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns.slice(0, count)) {
    found.push({ role: "user", content: turn.question }, { role: "assistant", content: turn.answers[model] });
  }
  found.push({ role: "user", content: turns[count].question });
  return found;
}

function settings() {
  const found = {};
  for (const input of byId("settings").querySelectorAll("input")) {
    found[input.name] = input.value; // the server checks it and names what is wrong
  }
  return found;
}

function show(turn) {
  turn.section = element("section", "turn");
  turn.section.append(element("div", "question text", turn.question));
  const answers = element("div", "answers");
  turn.places = models.map((model) => {
    const place = element("article", "answer");
    const parts = { text: element("div", "text"), note: element("div", "note") };
    const heading = element("h2", "", model.name);
    heading.title = model.path;
    place.append(heading, parts.text, parts.note);
    answers.append(place);
    return parts;
  });
  turn.section.append(answers);
  byId("turns").append(turn.section);
}

// The lines of a reply as they arrive.
async function* lines(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
}

function describe(end) {
  const speed = end.seconds > 0 ? `, ${(end.tokens / end.seconds).toFixed(1)} tokens/s` : "";
  const cut = end.end === "length" ? ", cut at the length limit" : "";
  const dropped = end.dropped ? `; the ${end.dropped} oldest exchanges were not read: the conversation exceeds the model's positions` : "";
  return `${end.tokens} tokens${speed}${cut}${dropped}`;
}

async function answer(turn, index, model, signal) {
  const place = turn.places[model];
  const fail = (reason) => {
    place.note.textContent = reason;
    place.note.classList.add("error");
    return false;
  };
  let ended = false;
  try {
    const reply = await fetch("/answer", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ model, messages: messages(model, index), settings: settings(), number }),
      signal,
    });
    if (!reply.ok) return fail((await reply.json()).error);
    for await (const line of lines(reply)) {
      if (line.error) return fail(line.error);
      if (line.text) {
        const atEnd = window.innerHeight + window.scrollY >= document.body.scrollHeight - 80;
        turn.answers[model] += line.text;
        place.text.textContent = turn.answers[model];
        if (atEnd) window.scrollTo(0, document.body.scrollHeight); // who has scrolled up reads there
      }
      if (line.end) {
        ended = true;
        place.note.textContent = describe(line);
      }
    }
  } catch (problem) {
    if (problem.name !== "AbortError") return fail("lost the connection to the server");
    place.note.textContent = "stopped";
    return true;
  }
  return ended || fail("the answer ended early; the terminal may say why");
}

async function ask(question) {
  const turn = { question, answers: models.map(() => "") };
  const index = turns.push(turn) - 1;
  show(turn);
  running = new AbortController();
  refresh();
  const done = await Promise.all(models.map((_, model) => answer(turn, index, model, running.signal)));
  running = null;
  number += 1;
  if (!done.every(Boolean)) { // every conversation keeps the turn, or none
    turns.pop();
    if (!byId("message").value) byId("message").value = question;
  }
  refresh();
  byId("message").focus();
}

function drop() {
  const turn = turns.pop();
  turn.section.remove();
  refresh();
  return turn.question;
}

function refresh() {
  const busy = running !== null;
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  for (const id of ["undo", "retry", "reset"]) byId(id).disabled = busy || turns.length === 0;
}

function send(event) {
  event.preventDefault();
  const question = byId("message").value;
  if (running || !question.trim()) return;
  byId("message").value = "";
  for (const section of byId("turns").querySelectorAll("section")) { // failed turns
    if (!turns.some((turn) => turn.section === section)) section.remove();
  }
  ask(question);
}

async function start() {
  const info = await (await fetch("/info")).json();
  models = info.models;
  byId("names").textContent = models.map((model) => model.name).join(" and ");
  byId("names").title = models.map((model) => model.path).join(" and ");
  document.title = `Chat: ${byId("names").textContent}`;
  byId("system").value = info.system;
  byId("system-label").hidden = !models.every((model) => model.has_template);
  for (const setting of info.settings) {
    const label = element("label", "", setting.name);
    const input = element("input");
    Object.assign(input, {
      type: "number", name: setting.name, value: setting.value, min: setting.least, max: setting.most,
      step: setting.integer ? 1 : "any", title: setting.help,
    });
    label.append(input);
    byId("settings").append(label);
  }
  byId("form").addEventListener("submit", send);
  byId("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  byId("stop").addEventListener("click", () => running && running.abort());
  byId("undo").addEventListener("click", drop);
  byId("retry").addEventListener("click", () => ask(drop()));
  byId("reset").addEventListener("click", () => {
    while (turns.length) drop();
    number = 0;
  });
}

start();
