// The form, the answer as it is generated, and its sources.

import { account } from "./account.js";
import { answerEvents, getJson } from "./api.js";
import { byId, el } from "./dom.js";
import { count, duration } from "./format.js";
import { sourceList } from "./sources.js";

let running = null;
let turns = []; // questions and answers of the conversation so far

/** Connect the form. */
export function start() {
  const question = byId("question");
  byId("ask-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (question.value.trim()) ask(question.value.trim());
  });
  // the browser shows its message next to an invalid field, which must be visible for that
  const open = (event) => event.target.closest("details")?.setAttribute("open", "");
  byId("ask-form").addEventListener("invalid", open, { capture: true });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask-form").requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
}

/** Show recent questions on an empty page. */
export async function showEarlier() {
  const place = byId("earlier");
  let found = [];
  try {
    found = await getJson("v1/requests?limit=50");
  } catch {
    // nothing to offer
  }
  const questions = [...new Set(found.map((one) => one.question))].filter(Boolean).slice(0, 5);
  place.hidden = !questions.length || !byId("result").hidden;
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
  running?.abort();
  const controller = new AbortController();
  running = controller;
  const history = byId("follow").checked ? turns : [];
  const view = new AnswerView(question, history);
  try {
    for await (const event of answerEvents(body(question, history), controller.signal)) {
      if (running !== controller) return;
      view.take(event);
    }
    view.finish();
    turns = [...history, { question, text: view.text }];
    byId("follow-row").hidden = false;
  } catch (error) {
    if (running !== controller) return;
    if (error.name === "AbortError") view.stopped();
    else view.failed(error.message);
  } finally {
    if (running === controller) {
      running = null;
      view.rest();
    }
  }
}

function body(question, history) {
  const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
  const search = { top_k: number("top-k"), mode: byId("mode").value || null };
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
    stillroom: search,
  };
}

class AnswerView {
  constructor(question, history) {
    this.text = "";
    this.sources = [];
    this.costs = null;
    this.unspoken = "";
    byId("ask-error").hidden = true;
    byId("ask-lead").hidden = true;
    byId("earlier").hidden = true;
    byId("result").hidden = false;
    byId("turns").replaceChildren(
      ...history.map((turn) => el("li", {}, el("p", { text: turn.question }), el("p", { text: turn.text }))),
    );
    byId("asked").textContent = question;
    byId("answer").replaceChildren();
    byId("answer").setAttribute("aria-busy", "true");
    byId("answer").classList.add("writing");
    byId("spoken").replaceChildren();
    byId("account").replaceChildren();
    byId("sources").replaceChildren(el("p", { class: "hint", text: "Searching \u2026" }));
    byId("stop").hidden = false;
    byId("ask-status").textContent = "Searching";
  }

  take(event) {
    const ours = event.stillroom;
    if (ours?.sources) {
      this.sources = ours.sources;
      byId("sources").replaceChildren(sourceList(this.sources));
      byId("ask-status").textContent = `${count(this.sources.length, "source")} found, generating the answer`;
    }
    const choice = event.choices[0];
    if (choice?.delta.content) this.write(choice.delta.content);
    if (ours?.timing) this.costs = { ...ours, finish_reason: choice?.finish_reason };
    if (event.usage && this.costs) this.costs.num_generated_tokens = event.usage.completion_tokens;
  }

  write(text) {
    byId("answer").append(text);
    this.text += text;
    this.unspoken += text;
    const end = Math.max(...[". ", "! ", "? ", "\n"].map((mark) => this.unspoken.lastIndexOf(mark)));
    if (end >= 0) this.speak(end + 1);
  }

  /** Pass whole sentences to screen readers instead of single tokens. */
  speak(end = this.unspoken.length) {
    const text = this.unspoken.slice(0, end).trim();
    this.unspoken = this.unspoken.slice(end);
    if (text) byId("spoken").append(el("p", { text }));
  }

  finish() {
    if (!this.costs) return;
    if (!this.text)
      byId("answer").append(el("span", { class: "hint", text: "The model returned an empty answer." }));
    const cut = this.costs.finish_reason === "length" ? [note("The answer was cut at the longest allowed length.")] : [];
    byId("account").replaceChildren(
      ...cut,
      ...account({ ...this.costs, sources: this.sources }).filter(Boolean),
      el("p", { class: "hint" }, el("a", { href: `#requests/${this.costs.request_id}`, text: this.costs.request_id })),
    );
    byId("ask-status").textContent = `Answer complete after ${duration(this.costs.timing.total_seconds)}`;
  }

  stopped() {
    byId("account").replaceChildren(note("Stopped."));
    byId("ask-status").textContent = "Stopped";
  }

  failed(message) {
    if (!this.sources.length) byId("result").hidden = true;
    byId("ask-error").textContent = message;
    byId("ask-error").hidden = false;
    byId("ask-status").textContent = "";
  }

  rest() {
    this.speak();
    byId("answer").setAttribute("aria-busy", "false");
    byId("answer").classList.remove("writing");
    byId("stop").hidden = true;
    if (!this.sources.length) byId("sources").replaceChildren();
  }
}

const note = (text) => el("p", { class: "hint", text });
