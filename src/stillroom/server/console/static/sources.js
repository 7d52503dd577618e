// The passages that an answer was made from.

import { placeOf } from "./citations.js";
import { el } from "./dom.js";
import { splitPath } from "./format.js";

/** A list of cards, each with its text on demand. `open(source)`, if given, shows a source in its document. */
export function sourceList(sources, { open = null, unfolded = false } = {}) {
  if (!sources.length) return el("p", { class: "hint", text: "No passages: the prompt was continued without a search." });
  const best = Math.max(...sources.map((source) => source.score));
  return el("ol", { class: "sources" }, ...sources.map((source) => card(source, best, open, unfolded)));
}

function card(source, best, open, unfolded) {
  const { folder, name } = splitPath(source.document);
  const score = el("span", { class: "score", "aria-hidden": "true" }, el("span"));
  score.firstChild.style.width = `${best > 0 ? Math.max((100 * source.score) / best, 2) : 0}%`;
  const title = open
    ? el("button", { type: "button", class: "link open", text: name, onclick: () => open(source) })
    : el("b", { text: name });
  return el(
    "li",
    { class: "source" },
    el(
      "div",
      { class: "source-head" },
      el("span", { class: "position", text: String(source.position) }),
      el("div", { class: "source-name" }, title, el("small", { text: folder })),
    ),
    source.heading ? el("p", { class: "heading", text: source.heading }) : null,
    el("p", { class: "facts" }, place(source), copies(source), earlier(source), el("span", { text: `score ${figure(source.score)}` }), score),
    el(
      "details",
      { open: unfolded ? "" : null },
      el("summary", { text: "Text" }),
      source.text === null || source.text === undefined
        ? el("p", { class: "hint", text: "The document has since been changed or removed." })
        : el("p", { class: "passage", text: source.text, tabindex: "0" }),
      found(source.scores),
    ),
  );
}

const place = (source) => (placeOf(source) ? el("span", { text: placeOf(source) }) : null);

const copies = ({ also_in: others }) =>
  others?.length ? el("span", { text: `also in ${others.map((one) => splitPath(one.document).name).join(", ")}` }) : null;

const earlier = (source) => (source.turns_ago ? el("span", { text: "from an earlier question" }) : null);

const RETRIEVERS = { dense: "by meaning", sparse: "by words" };

function found(scores) {
  const parts = Object.entries(scores ?? {}).map(([name, score]) => `${RETRIEVERS[name] ?? name} ${figure(score)}`);
  return parts.length ? el("p", { class: "hint", text: `Found ${parts.join(", ")}.` }) : null;
}

const figure = (score) => String(Number(score.toPrecision(3)));
