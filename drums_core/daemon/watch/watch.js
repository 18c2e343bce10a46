// Watches a daemon's desktops: looks every two seconds, changes nothing. Whatever a desktop or a task says is put in as
// text, never as markup.
"use strict";

const LOOK_MS = 2000;
const KEY = "drums-token";
const $ = (selector, within = document) => within.querySelector(selector);
const cards = new Map(); // slot id -> its card
let shown = null; // the slot whose details are open
let looking = false;

class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

async function ask(path) {
  const answer = await fetch(path, { headers: { Authorization: `Bearer ${sessionStorage.getItem(KEY)}` } });
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, problem.detail || `${path}: ${answer.status}`);
}

const document_of = async (path) => (await ask(path)).json();

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

const row = (...cells) => {
  const made = document.createElement("tr");
  made.append(...cells.map((c) => (c instanceof Node ? c : element("td", c))));
  return made;
};

async function picture(slot, image) {
  try {
    const url = URL.createObjectURL(await (await ask(`/v1/slots/${encodeURIComponent(slot)}/screenshot`)).blob());
    const old = image.src;
    image.src = url;
    image.hidden = false;
    if (old.startsWith("blob:")) URL.revokeObjectURL(old);
  } catch (e) {
    if (!(e instanceof Refused)) throw e; // one that is quarantined, busy or down has no picture now
  }
}

function card_of(slot) {
  const card = element("button", "", "slot");
  card.type = "button";
  const image = element("img");
  image.alt = `screen of ${slot.id}`;
  image.hidden = true; // until there is a picture
  const screen = element("div", "", "screen");
  screen.append(image);
  const about = element("div", "", "about");
  about.append(element("p", "", "line"), element("p", "", "task"), element("p", "", "small"));
  card.append(screen, about);
  card.addEventListener("click", () => show(slot.id));
  return card;
}

const left = (slot) => {
  if (slot.expires_in === null) return "no time limit";
  const seconds = Math.max(0, Math.round(slot.expires_in));
  return seconds < 120 ? `${seconds} s left` : `${Math.round(seconds / 60)} min left`;
};

function fill(card, slot, instructions) {
  const line = $(".line", card);
  const verdict = slot.verdict || "no episode";
  line.replaceChildren(element("span", verdict, slot.verdict || ""), ` · ${slot.state} · ${slot.id}`);
  if (slot.reason) line.append(` · ${slot.reason}`);
  $(".task", card).textContent = slot.task ? instructions.get(slot.task) || slot.task : "no task";
  $(".small", card).textContent = `${slot.image} · ${left(slot)}`;
}

const instructions = new Map();
async function learn(slots) {
  for (const id of new Set(slots.map((s) => s.task).filter((t) => t && !instructions.has(t)))) {
    instructions.set(id, (await document_of(`/v1/tasks/${encodeURIComponent(id)}`)).instruction);
  }
}

async function look() {
  const health = await document_of("/v1/health");
  $("#host").textContent = `${health.version} · ${health.slots} of ${health.max_slots} desktops`;
  const { slots } = await document_of("/v1/slots");
  await learn(slots).catch((e) => console.warn(e));
  const here = new Set(slots.map((s) => s.id));
  for (const [id, card] of cards) {
    if (!here.has(id)) {
      URL.revokeObjectURL($("img", card).src);
      card.remove();
      cards.delete(id);
    }
  }
  for (const slot of slots) {
    if (!cards.has(slot.id)) {
      cards.set(slot.id, card_of(slot));
      $("#slots").append(cards.get(slot.id));
    }
    fill(cards.get(slot.id), slot, instructions);
  }
  $("#none").hidden = slots.length > 0;
  const { episodes } = await document_of("/v1/episodes?limit=15");
  $("#episodes").replaceChildren(...episodes.map(episode_row));
  await Promise.all(slots.filter((s) => s.state === "up").map((s) => picture(s.id, $("img", cards.get(s.id)))));
  if (shown) await detail(slots.find((s) => s.id === shown));
}

function episode_row(e) {
  const verdict = element("td");
  verdict.append(element("span", e.verdict, e.verdict));
  const score = e.score === null ? "" : String(e.score);
  return row(new Date(e.started_at * 1000).toLocaleTimeString(), (e.task || "").slice(0, 8), e.origin, verdict, score,
    e.bad_gates.join(", "), e.id);
}

function show(id) {
  shown = id;
  const dialog = $("#detail");
  $("h2", dialog).textContent = id;
  $("tbody", dialog).replaceChildren();
  $(".reason", dialog).textContent = "";
  $("img", dialog).hidden = true;
  dialog.showModal();
  turn();
}

async function detail(slot) {
  const dialog = $("#detail");
  if (!slot) {
    $(".reason", dialog).textContent = "This desktop is closed.";
    return;
  }
  $("h2", dialog).textContent = `${slot.id} · ${slot.state} · ${slot.verdict || "no episode"}`;
  const report = await document_of(`/v1/slots/${encodeURIComponent(slot.id)}/gates`);
  $(".reason", dialog).textContent = report.validity.invalid_reasons.join("; ");
  $("tbody", dialog).replaceChildren(...report.gates.gates.map((g) => {
    const status = element("td");
    status.append(element("span", g.status, g.status));
    return row(g.gate, status, g.phase, g.duration_ms == null ? "" : g.duration_ms.toFixed(1), g.reason || "");
  }));
  if (slot.state === "up") await picture(slot.id, $("img", dialog));
}

async function turn() {
  if (looking || !sessionStorage.getItem(KEY) || document.hidden) return;
  looking = true;
  try {
    await look();
    $("#trouble").textContent = "";
  } catch (e) {
    if (e instanceof Refused && e.status === 401) {
      sessionStorage.removeItem(KEY);
      enter();
    }
    $("#trouble").textContent = e instanceof Refused ? e.message : `the daemon does not answer: ${e.message}`;
  } finally {
    looking = false;
  }
}

function enter() {
  const known = Boolean(sessionStorage.getItem(KEY));
  $("#ask").hidden = known;
  $("#view").hidden = !known;
  $("#forget").hidden = !known;
  if (!known) $("#host").textContent = "";
}

$("#ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("#token").value.trim());
  $("#token").value = "";
  enter();
  turn();
});
$("#forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});
$("#detail").addEventListener("close", () => (shown = null));
document.addEventListener("visibilitychange", turn);
enter();
turn();
setInterval(turn, LOOK_MS);
