// The form, the open conversation, and its answer as it is generated.

import { answerNodes, remarks } from "./answer.js";
import { answerEvents, getJson } from "./api.js";
import { byId, el } from "./dom.js";
import { count, duration } from "./format.js";
import { chosenWhere, startLimits } from "./limits.js";
import { openCitation, showInstead, showSources } from "./pane.js";
import { showThreads } from "./thread_list.js";
import { keepThread, newThread, thread as keptThread } from "./threads.js";

let running = null;
let open = null; // the conversation that is shown

/** Connect the form. */
export function start() {
  const question = byId("question");
  byId("ask-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (question.value.trim()) ask(question.value.trim());
  });
  // the browser shows its message next to an invalid field, which must be visible for that
  const unfold = (event) => event.target.closest("details")?.setAttribute("open", "");
  byId("ask-form").addEventListener("invalid", unfold, { capture: true });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask-form").requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  startLimits();
}

/** Forget the open conversation, which belongs to another key. */
export function leave() {
  running?.abort();
  running = null;
  open = null;
}

/** Show a kept conversation, or an empty page with recent questions. */
export async function showAsk(id) {
  if (!id || id !== open?.id) {
    leave();
    open = id ? keptThread(id) : null;
    if (id && !open) history.replaceState(null, "", "#ask"); // it was deleted
    byId("ask-error").hidden = true;
    if (open) showThread();
    else byId("question").value = "";
  }
  byId("desk").classList.toggle("empty", !open);
  byId("follow-row").hidden = !open?.turns.length;
  byId("follow").checked = open?.turns.length > 1;
  showThreads();
  if (!open) await showEarlier();
}

function showThread() {
  const turn = open.turns.at(-1);
  showTurns(open.turns.slice(0, -1));
  byId("asked").textContent = turn.question;
  byId("answer").replaceChildren(...answerNodes(turn, (index) => openCitation(turn, index)));
  byId("account").replaceChildren(...remarks(turn));
  byId("spoken").replaceChildren();
  byId("ask-status").textContent = "";
  showSources(turn);
}

function showTurns(turns) {
  const item = (turn) => {
    const answer = el("div", { class: "answer" }, ...answerNodes(turn, (index) => openCitation(turn, index)));
    return el("li", {}, el("p", { class: "asked", text: turn.question }), answer);
  };
  byId("turns").replaceChildren(...turns.map(item));
}

/** Show recent questions on an empty page. */
async function showEarlier() {
  let found = [];
  try {
    found = await getJson("v1/requests?limit=50");
  } catch {
    // nothing to offer
  }
  const questions = [...new Set(found.map((one) => one.question))].filter(Boolean).slice(0, 5);
  byId("earlier").hidden = !questions.length;
  byId("earlier-list").replaceChildren(...questions.map(offer));
}

function offer(text) {
  const again = () => {
    byId("question").value = text;
    byId("ask-form").requestSubmit();
  };
  return el("li", {}, el("button", { type: "button", class: "link", text, onclick: again }));
}

async function ask(question) {
  if (!open || !byId("follow").checked) open = newThread();
  const own = open;
  const turn = { question, text: "", sources: [], where: chosenWhere() };
  running?.abort();
  const controller = new AbortController();
  running = controller;
  history.replaceState(null, "", `#ask/${own.id}`);
  const view = new AnswerView(turn, own.turns);
  try {
    for await (const event of answerEvents(body(turn, own.turns), controller.signal)) {
      if (running !== controller) return;
      view.take(event);
    }
    byId("question").value = "";
    if (matchMedia("(max-width: 40rem)").matches) byId("question").blur(); // the keyboard would cover the answer
    end(own, turn, view, turn.ending ?? "stop");
  } catch (error) {
    const isKept = running === controller || own !== open;
    if (error.name === "AbortError" && turn.sources.length && isKept) end(own, turn, view, "stopped");
    else if (running === controller) view.failed(error.name === "AbortError" ? "Stopped." : error.message);
  } finally {
    if (running === controller) {
      running = null;
      view.rest();
    }
  }
}

function end(own, turn, view, ending) {
  turn.ending = ending;
  own.turns.push(turn);
  keepThread(own);
  if (own !== open) return; // another conversation was opened meanwhile
  view.finish();
  byId("follow-row").hidden = false;
}

function body({ question, where }, history) {
  const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
  return {
    messages: [
      ...history.flatMap((turn) => [
        { role: "user", content: turn.question },
        { role: "assistant", content: turn.text },
      ]),
      { role: "user", content: question },
    ],
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    stream_options: { include_usage: true },
    stillroom: { top_k: number("top-k"), mode: byId("mode").value || null, ...(where ? { where } : {}) },
  };
}

class AnswerView {
  constructor(turn, earlier) {
    this.turn = turn;
    this.unspoken = "";
    this.isDrawn = true;
    byId("desk").classList.remove("empty");
    byId("ask-error").hidden = true;
    showTurns(earlier);
    byId("asked").textContent = turn.question;
    byId("answer").replaceChildren();
    byId("answer").setAttribute("aria-busy", "true");
    byId("answer").classList.add("writing");
    byId("spoken").replaceChildren();
    byId("account").replaceChildren();
    showInstead(el("p", { class: "hint", text: "Searching \u2026" }));
    byId("stop").hidden = false;
    byId("ask-status").textContent = "Searching";
    if (earlier.length) byId("asked").scrollIntoView({ block: "start" });
  }

  take(event) {
    const { turn } = this;
    const ours = event.stillroom;
    if (ours?.hop) byId("ask-status").textContent = `Searched for: ${ours.hop.question}`;
    if (ours?.sources) {
      turn.sources = ours.sources;
      showSources(turn);
      byId("ask-status").textContent = `${count(turn.sources.length, "source")} found, generating the answer`;
    }
    for (const name of ["citations", "highlight", "confidence", "warnings"]) if (ours?.[name]) turn[name] = ours[name];
    const choice = event.choices[0];
    if (choice?.delta.content) this.write(choice.delta.content);
    if (ours?.timing) {
      const { request_id, timing, reuse, speculation, hops } = ours;
      turn.costs = { request_id, timing, reuse, speculation, hops };
      turn.ending = choice?.finish_reason;
    }
    if (event.usage && turn.costs) turn.costs.num_generated_tokens = event.usage.completion_tokens;
  }

  write(text) {
    this.turn.text += text;
    if (this.isDrawn) requestAnimationFrame(() => this.draw());
    this.isDrawn = false;
    this.unspoken += text;
    const end = Math.max(...[". ", "! ", "? ", "\n"].map((mark) => this.unspoken.lastIndexOf(mark)));
    if (end >= 0) this.speak(end + 1);
  }

  draw() {
    if (this.isDrawn) return;
    this.isDrawn = true;
    byId("answer").replaceChildren(...answerNodes(this.turn, (index) => openCitation(this.turn, index)));
  }

  /** Pass whole sentences to screen readers instead of single tokens. */
  speak(end = this.unspoken.length) {
    const text = this.unspoken.slice(0, end).trim();
    this.unspoken = this.unspoken.slice(end);
    if (text) byId("spoken").append(el("p", { text }));
  }

  finish() {
    const { turn } = this;
    this.isDrawn = false; // the citations came last
    this.draw();
    byId("account").replaceChildren(...remarks(turn));
    const seconds = turn.costs ? ` after ${duration(turn.costs.timing.total_seconds)}` : "";
    byId("ask-status").textContent = turn.ending === "stopped" ? "Stopped" : `Answer complete${seconds}`;
    if (turn.ending !== "stopped") showSources(turn);
  }

  failed(message) {
    this.draw();
    if (!this.turn.sources.length) byId("sources").replaceChildren();
    byId("ask-error").textContent = message;
    byId("ask-error").hidden = false;
    byId("ask-status").textContent = "";
  }

  rest() {
    this.speak();
    byId("answer").setAttribute("aria-busy", "false");
    byId("answer").classList.remove("writing");
    byId("stop").hidden = true;
  }
}
