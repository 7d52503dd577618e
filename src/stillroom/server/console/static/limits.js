// Limits of a question to documents, tags (their metadata) and a filter, as one text of the filter language.

import { allDocuments } from "./document_list.js";
import { byId, el } from "./dom.js";
import { count } from "./format.js";

const MOST_ROWS = 200;

const documents = new Set();
const tags = new Map(); // name -> values

const quoted = (value) => (typeof value === "string" ? `"${value.replace(/["\\]/g, "\\$&")}"` : String(value));
const field = (name) => (/^[a-z_][\w.-]*$/i.test(name) && !/^(and|or|not|in)$/i.test(name) ? name : `\`${name}\``);
const among = (name, values) => `${name} in (${[...values].map(quoted).join(", ")})`;

/** The filter that the next question is sent with; empty if there is none. */
export function chosenWhere() {
  const parts = [...tags].filter(([, values]) => values.size).map(([name, values]) => among(field(name), values));
  if (documents.size) parts.push(among("path", documents));
  const own = byId("where").value.trim();
  if (own) parts.push(parts.length ? `(${own})` : own);
  return parts.join(" and ");
}

/** Connect the dialog and the list of limits in use. */
export function startLimits() {
  const dialog = byId("limit-dialog");
  byId("limit-button").addEventListener("click", async () => {
    dialog.showModal();
    byId("limit-error").hidden = true;
    try {
      await allDocuments();
    } catch (error) {
      byId("limit-error").textContent = error.message;
      byId("limit-error").hidden = false;
    }
    showChoices();
  });
  byId("limit-query").addEventListener("input", showChoices);
  byId("limit-clear").addEventListener("click", () => {
    documents.clear();
    tags.clear();
    showChoices();
  });
  dialog.addEventListener("close", showLimits);
}

async function showChoices() {
  const all = await allDocuments().catch(() => []);
  const query = byId("limit-query").value.toLowerCase();
  const found = all.filter((one) => `${one.id}\n${one.title}`.toLowerCase().includes(query));
  byId("limit-count").textContent =
    found.length > MOST_ROWS ? `The first ${MOST_ROWS} of ${count(found.length, "document")}` : count(found.length, "document");
  byId("limit-list").replaceChildren(...found.slice(0, MOST_ROWS).map(choice));
  byId("limit-tags").replaceChildren(...tagsOf(all).map(tagRow));
}

function choice({ id, name, title }) {
  const box = el("input", { type: "checkbox" });
  box.checked = documents.has(id);
  box.addEventListener("change", () => (box.checked ? documents.add(id) : documents.delete(id)));
  return el("li", {}, el("label", {}, box, ` ${title || name || id} `, el("small", { text: name ?? id })));
}

/** Metadata with few values: name -> values, most frequent names first. */
function tagsOf(all) {
  const found = new Map();
  for (const { metadata } of all)
    for (const [name, value] of Object.entries(metadata ?? {}))
      for (const one of [value].flat()) found.set(name, (found.get(name) ?? new Map()).set(one, true));
  return [...found].filter(([, values]) => values.size <= 24).slice(0, 12).map(([name, values]) => [name, [...values.keys()]]);
}

function tagRow([name, values]) {
  const button = (value) => {
    const chosen = () => tags.get(name)?.has(value) ?? false;
    const one = el("button", { type: "button", class: "quiet", text: String(value), "aria-pressed": String(chosen()) });
    one.addEventListener("click", () => {
      if (!tags.has(name)) tags.set(name, new Set());
      if (chosen()) tags.get(name).delete(value);
      else tags.get(name).add(value);
      one.setAttribute("aria-pressed", String(chosen()));
    });
    return one;
  };
  return el("div", { role: "group", "aria-label": name, class: "tags" }, el("span", { text: name }), ...values.map(button));
}

/** One button for each limit in use, which removes it. */
function showLimits() {
  const chip = (text, remove) => {
    const drop = () => {
      remove();
      showLimits();
      byId("question").focus();
    };
    return el("li", {}, el("button", { type: "button", class: "quiet", text: `${text} \u00d7`, "aria-label": `Remove the limit ${text}`, onclick: drop }));
  };
  const values = [...tags].flatMap(([name, all]) => [...all].map((value) => chip(`${name}: ${value}`, () => all.delete(value))));
  const names = [...documents].map((id) => chip(id.split("/").at(-1), () => documents.delete(id)));
  byId("limits").replaceChildren(...values, ...names);
}
