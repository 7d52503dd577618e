// Map of KV reuse: passages by recent questions, each cell with the origin of the passage's KV as colour and letter.

import { getJson } from "./api.js";
import { el } from "./dom.js";
import { count, duration, moment, splitPath } from "./format.js";

const MOST_QUESTIONS = 20;
const MOST_ROWS = 15;

const records = new Map(); // request id -> record; records do not change

export const ORIGINS = { device: "device", host: "host memory", disk: "disk", placed: "another position", prepared: "prepared in its document", computed: "computed" };
const LETTERS = { device: "D", host: "H", disk: "S", placed: "P", prepared: "A", computed: "\u00b7" };

/** Source of a segment's KV: its tier, `placed`, `prepared` or `computed`. */
export const origin = (segment) => (["placed", "prepared"].includes(segment.reason) ? segment.reason : segment.source);

/** The map of these questions, latest last; null if none of them reports the parts of its prompt. */
export async function reuseMap(summaries) {
  const ids = summaries.slice(0, MOST_QUESTIONS).map((one) => one.request_id).reverse();
  const missing = ids.filter((id) => !records.has(id));
  await Promise.all(missing.map(async (id) => records.set(id, await getJson(`v1/requests/${encodeURIComponent(id)}`))));
  const questions = ids.map((id) => records.get(id)).filter((one) => one.reuse.segments?.some((part) => part.chunk_id));
  if (!questions.length) return null;
  const rows = rowsOf(questions);
  const more = rows.length > MOST_ROWS ? `, the ${MOST_ROWS} most used of ${count(rows.length, "passage")}` : "";
  const saved = questions.reduce((sum, one) => sum + one.reuse.saved_seconds, 0);
  return el(
    "section",
    { class: "map", "aria-labelledby": "map-title" },
    el("h2", { id: "map-title", text: "Reuse of passages" }),
    el("p", { class: "sum", text: `The last ${count(questions.length, "question")}${more}. Saved: ${duration(saved)}.` }),
    el("p", { class: "facts" }, ...Object.entries(ORIGINS).map(([kind, text]) => el("span", {}, cell(kind), ` ${text}`))),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Map of reuse" }, table(questions, rows.slice(0, MOST_ROWS))),
  );
}

/** Passages by the number of questions that used them: name, and the origin of their KV in each question. */
function rowsOf(questions) {
  const rows = new Map();
  questions.forEach((question, index) => {
    for (const segment of question.reuse.segments.filter((one) => one.chunk_id)) {
      const source = question.sources.find((one) => one.chunk_id === segment.chunk_id);
      if (!rows.has(segment.chunk_id)) rows.set(segment.chunk_id, { source, origins: [] });
      rows.get(segment.chunk_id).origins[index] = origin(segment);
    }
  });
  return [...rows.values()].sort((a, b) => b.origins.flat().length - a.origins.flat().length);
}

const cell = (kind) =>
  el("span", { class: `cell ${kind}` }, el("span", { "aria-hidden": "true", text: LETTERS[kind] }), el("span", { class: "hidden", text: ORIGINS[kind] }));

function table(questions, rows) {
  const heads = questions.map((one, index) =>
    el("th", { scope: "col" }, el("a", {
      href: `#requests/${one.request_id}`,
      text: String(index + 1),
      title: `${one.question}\n${moment(one.at)}`,
      "aria-label": `Question ${index + 1}: ${one.question}`,
    })),
  );
  const name = ({ source }) => (source ? [splitPath(source.document).name, source.heading.split(" > ").at(-1)].join(" \u203a ") : "passage");
  const line = (row) =>
    el("tr", {}, el("th", { scope: "row", text: name(row) }), ...questions.map((_, index) => el("td", {}, row.origins[index] ? cell(row.origins[index]) : null)));
  const saved = questions.map(({ reuse }) => el("td", { text: reuse.saved_seconds > 0.0005 ? duration(reuse.saved_seconds) : "\u2013" }));
  return el(
    "table",
    { class: "grid" },
    el("caption", { class: "hidden", text: "Origin of the KV of each passage in recent questions" }),
    el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "Passage" }), ...heads)),
    el("tbody", {}, ...rows.map(line)),
    el("tfoot", {}, el("tr", {}, el("th", { scope: "row", text: "Saved" }), ...saved)),
  );
}
