// What a token or a step of the trace tells when it is looked at, and the slider over the steps.
// The coloured text is in the page already; all texts go in as text, never as HTML.
"use strict";

const trace = JSON.parse(document.getElementById("trace").textContent);
const card = document.getElementById("card");
const VISIBLE = { " ": "␣", "\n": "↵", "\t": "⇥" };
const ABSENT = "not recorded";
let pinned = false;
let looked = null;

function made(tag, text, kind) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (kind) node.className = kind;
  return node;
}

function name(id) {
  const text = trace.names[id];
  return text ? text.replace(/[ \n\t]/g, (letter) => VISIBLE[letter]) : "(no text)";
}

function probability(value) {
  if (value === undefined || value === null) return ABSENT;
  return value > 0 && value < 0.001 ? value.toExponential(1) : String(Number(value.toFixed(3)));
}

function q(step, i) {
  const certain = step.drafts && !step.q;
  return certain ? "1  (proposer: a guess without a law)" : `${probability(step.q?.[i])}  (proposer)`;
}

function milliseconds(value) {
  return value >= 100 ? value.toFixed(0) : value.toPrecision(2);
}

function time(step) {
  if (!step.ms) return ABSENT;
  const total = step.ms.reduce((sum, part) => sum + part, 0);
  const parts = trace.parts.map((part, i) => [part, step.ms[i]]).filter(([, ms]) => ms > 0);
  const split = parts.map(([part, ms]) => `${part} ${milliseconds(ms)}`).join(", ");
  return `${milliseconds(total)} ms (${split})${step.rows ? `, shared by ${step.rows} requests` : ""}`;
}

function outcome(step) {
  const by = step.source ? `${step.source} ` : "";
  const what = step.drafted ? `${by}drafted ${step.drafted}, ${step.accepted} accepted` : "nothing drafted";
  return step.asked > step.drafted ? `${what} (asked for ${step.asked})` : what;
}

// What the card tells of token i of a step: pairs of a word and its value.
function facts(step, i, number, of, reason) {
  const kind = step.kinds[i];
  const told = [["kind", `${kind}: ${trace.kinds[kind]}`]];
  if (reason) told.push(["text", reason]);
  if (i < step.drafted) {
    if (kind === "correction") {
      told.push(["drafted", step.drafts ? `${name(step.drafts[i])} (id ${step.drafts[i]}), not accepted` : ABSENT]);
    }
    const whose = kind === "correction" ? " of the draft" : "";
    told.push([`p${whose}`, `${probability(step.p?.[i])}  (target)`]);
    told.push([`q${whose}`, q(step, i)]);
    told.push(["alpha", `${probability(step.alpha?.[i])}  (overlap of p and q here)`]);
  }
  if (step.own) told.push(["this token", `${probability(step.own[i])}  (target, ${trace.law} law)`]);
  told.push(["step", `${number} of ${of}: ${outcome(step)}`], ["time", time(step)]);
  return told;
}

function alternatives(step, i) {
  if (!step.top?.[i]?.length) return made("p", "generation.logprobs=3 shows alternatives", "small");
  const list = made("div", undefined, "best");
  for (const [id, p] of step.top[i]) {
    const bar = made("i");
    bar.style.width = `${100 * p}%`;
    list.append(made("span", name(id), "name"), made("span", probability(p)), bar);
  }
  return list;
}

function look(node, step, i, ...rest) {
  close();
  looked = node;
  node.classList.add("looked");
  const head = made("div", undefined, "head");
  const button = made("button", "×");
  button.setAttribute("aria-label", "close");
  button.addEventListener("click", close);
  head.append(made("span", name(step.tokens[i]), "name"), made("span", `id ${step.tokens[i]}`, "small"), button);
  const list = made("dl");
  for (const [word, value] of facts(step, i, ...rest)) list.append(made("dt", word), made("dd", value));
  list.append(made("dt", "most likely"));
  const best = made("dd");
  best.append(alternatives(step, i));
  list.append(best);
  card.replaceChildren(head, list);
  card.hidden = false;
  place(node);
}

// Below the token, or above it where the window ends.
function place(node) {
  const at = [...node.getClientRects()].at(-1);
  const room = document.documentElement;
  const left = Math.max(8, Math.min(at.left, room.clientWidth - card.offsetWidth - 8));
  const below = at.bottom + 6 + card.offsetHeight <= room.clientHeight || at.top < card.offsetHeight + 6;
  card.style.left = `${left + window.scrollX}px`;
  card.style.top = `${(below ? at.bottom + 6 : at.top - card.offsetHeight - 6) + window.scrollY}px`;
}

function close() {
  looked?.classList.remove("looked");
  looked = null;
  pinned = false;
  card.hidden = true;
}

function named(id, kind) {
  const cell = made("td", undefined, "name");
  cell.append(made("span", name(id), kind));
  return cell;
}

function row(head, cells) {
  const line = made("tr");
  line.append(made("th", head), ...cells);
  return line;
}

// The draft of a step with the fate of each token, and what the target added.
function table(step) {
  const drafts = step.drafts ?? step.tokens.slice(0, step.accepted); // of an interrupted step no others are known
  const emitted = step.tokens.slice(step.accepted);
  const kind = step.kinds.at(-1);
  const rows = made("tbody");
  const fate = drafts.map((_, i) => made("td", i < step.accepted ? "accepted" : "not accepted"));
  rows.append(
    row("token", [
      ...drafts.map((id, i) => named(id, i < step.accepted ? "t accepted" : "lost")),
      ...emitted.map((id) => named(id, `t ${kind}`)),
    ]),
    row("", [...fate, ...emitted.map(() => made("td", kind))]),
  );
  const certain = step.drafts?.map(() => 1);
  const numbers = { "p, target": step.p, "q, proposer": step.q ?? certain, alpha: step.alpha };
  for (const [word, values] of Object.entries(numbers).filter(([, each]) => each?.length)) {
    const cells = drafts.map((_, i) => made("td", i in values ? probability(values[i]) : "–"));
    rows.append(row(word, [...cells, ...emitted.map(() => made("td", ""))]));
  }
  const all = made("table");
  all.append(rows);
  const scroll = made("div", undefined, "scroll");
  scroll.append(all);
  return scroll;
}

function request(section, { steps, blank }) {
  const tokens = [...section.querySelectorAll(".answer .t")];
  if (!tokens.length) return null;
  const places = steps.flatMap((step, number) => step.tokens.map((_, i) => [number, i]));
  const answer = section.querySelector(".answer");
  const slider = section.querySelector("input");
  const output = section.querySelector("output");
  const panel = section.querySelector(".step");
  const dropped = [...answer.querySelectorAll("del")].map((node) => [node, Number(node.dataset.step)]);

  // The text after so many steps, and the last of them.
  function show(wanted) {
    const count = Math.max(0, Math.min(steps.length, Math.trunc(wanted) || 0));
    close();
    slider.value = count;
    output.textContent = `${count} of ${steps.length}`;
    for (const [node, [number]] of tokens.map((token, j) => [token, places[j]])) {
      node.classList.toggle("later", number >= count);
      node.classList.toggle("now", number === count - 1);
    }
    for (const [node, number] of dropped) node.classList.toggle("later", number >= count);
    const step = steps[count - 1];
    if (!step) return panel.replaceChildren(made("p", "Before the first step.", "small"));
    const draws = step.drafted ? outcome(step) : `nothing drafted: a plain step of the target`;
    panel.replaceChildren(made("p", `Step ${count}: ${draws}. ${time(step)}`, "small"), table(step));
  }

  function open(j) {
    if (!tokens[j] || tokens[j].classList.contains("later")) return;
    const [number, i] = places[j];
    look(tokens[j], steps[number], i, number + 1, steps.length, blank[j]);
  }

  // One stop of the tab key; arrows go from token to token, or from step to step.
  function go(j) {
    if (!tokens[j] || tokens[j].classList.contains("later")) return;
    for (const node of tokens) node.tabIndex = -1;
    tokens[j].tabIndex = 0;
    tokens[j].focus();
  }

  const moves = {
    ArrowRight: (j) => j + 1,
    ArrowLeft: (j) => j - 1,
    ArrowDown: (j) => places.findIndex(([number]) => number === places[j][0] + 1),
    ArrowUp: (j) => places.findIndex(([number]) => number === places[j][0] - 1),
  };
  const at = (event) => tokens.indexOf(event.target.closest(".t"));
  answer.addEventListener("keydown", (event) => {
    const j = at(event);
    if (j < 0 || !(event.key in moves)) return;
    event.preventDefault();
    go(moves[event.key](j));
  });
  answer.addEventListener("focusin", (event) => open(at(event)));
  answer.addEventListener("pointerover", (event) => event.pointerType === "mouse" && !pinned && open(at(event)));
  answer.addEventListener("pointerleave", () => !pinned && close());
  answer.addEventListener("click", (event) => {
    open(at(event));
    pinned = looked !== null;
  });
  slider.addEventListener("input", () => show(Number(slider.value)));
  for (const node of tokens) node.tabIndex = -1;
  tokens[0].tabIndex = 0;
  show(steps.length);
  return { section, show, open };
}

const sections = [...document.querySelectorAll("section.request")];
const requests = sections.map((section, i) => request(section, trace.requests[i]));

// #request=1&step=5&token=9, counted from 1
function follow() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const chosen = requests[Number(asked.get("request") ?? 1) - 1];
  if (!chosen || (!asked.has("step") && !asked.has("token") && !asked.has("request"))) return;
  chosen.section.scrollIntoView();
  if (asked.has("step")) chosen.show(Number(asked.get("step")));
  if (asked.has("token")) chosen.open(Number(asked.get("token")) - 1);
}

document.addEventListener("keydown", (event) => event.key === "Escape" && close());
document.addEventListener("click", (event) => event.target.closest(".answer, #card") || close());
window.addEventListener("hashchange", follow);
follow();
