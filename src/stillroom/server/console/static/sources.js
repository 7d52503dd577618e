// The passages that an answer was made from.

import { el } from "./dom.js";
import { splitPath } from "./format.js";

/** A list of cards, each with its text on demand. */
export function sourceList(sources) {
  if (!sources.length) return el("p", { class: "hint", text: "No passages: the prompt was continued without a search." });
  const best = Math.max(...sources.map((source) => source.score));
  return el("ol", { class: "sources" }, ...sources.map((source) => card(source, best)));
}

function card(source, best) {
  const { folder, name } = splitPath(source.document);
  const score = el("span", { class: "score", "aria-hidden": "true" }, el("span"));
  score.firstChild.style.width = `${best > 0 ? Math.max((100 * source.score) / best, 2) : 0}%`;
  return el(
    "li",
    { class: "source" },
    el(
      "div",
      { class: "source-head" },
      el("span", { class: "position", text: String(source.position) }),
      el("div", { class: "source-name" }, el("b", { text: name }), el("small", { text: folder })),
    ),
    source.heading ? el("p", { class: "heading", text: source.heading }) : null,
    el("p", { class: "facts" }, place(source), earlier(source), el("span", { text: `score ${figure(source.score)}` }), score),
    el(
      "details",
      {},
      el("summary", { text: "Text" }),
      source.text === null || source.text === undefined
        ? el("p", { class: "hint", text: "The document has since been changed or removed." })
        : el("p", { class: "passage", text: source.text }),
      found(source.scores),
    ),
  );
}

function place(source) {
  const parts = [];
  if (source.start_page)
    parts.push(source.end_page > source.start_page ? `pages ${source.start_page}\u2013${source.end_page}` : `page ${source.start_page}`);
  if (source.start_line)
    parts.push(source.end_line > source.start_line ? `lines ${source.start_line}\u2013${source.end_line}` : `line ${source.start_line}`);
  return parts.length ? el("span", { text: parts.join(", ") }) : null;
}

const earlier = (source) => (source.turns_ago ? el("span", { text: "from an earlier question" }) : null);

const RETRIEVERS = { dense: "by meaning", sparse: "by words" };

function found(scores) {
  const parts = Object.entries(scores ?? {}).map(([name, score]) => `${RETRIEVERS[name] ?? name} ${figure(score)}`);
  return parts.length ? el("p", { class: "hint", text: `Found ${parts.join(", ")}.` }) : null;
}

const figure = (score) => String(Number(score.toPrecision(3)));
