// Citations of an answer: which sentence is supported by which words of which document.

import { el } from "./dom.js";
import { splitPath } from "./format.js";

/**
 * Return an answer's citations with offsets in UTF-16 units; the server counts characters. An answer of a server that
 * sends no citations has those that its text names as [n].
 */
export function citationsOf({ text, sources, citations }) {
  const unit = units(text);
  const document = (one) => sources.find((source) => source.position === one.source)?.document ?? "";
  if (citations?.length)
    return citations.map((one) => ({ ...one, document: document(one), start: unit(one.start), end: unit(one.end) }));
  return [...text.matchAll(/\[(\d{1,3})\]/g)].flatMap(({ 1: number, index }) => {
    const source = sources.find((one) => one.position === Number(number));
    return source ? [{ ...source, source: source.position, quote: "", start: index, end: index, is_explicit: true }] : [];
  });
}

function units(text) {
  if (!/[\ud800-\udbff]/.test(text)) return (characters) => characters;
  const characters = [...text];
  return (number) => characters.slice(0, number).join("").length;
}

/** "page 3" or "lines 10-14"; empty where the format has neither. */
export function placeOf({ start_page: page, end_page: lastPage, start_line: line, end_line: lastLine }) {
  const range = (noun, first, last) => (last > first ? `${noun}s ${first}\u2013${last}` : `${noun} ${first}`);
  return [page ? range("page", page, lastPage) : "", line ? range("line", line, lastLine) : ""].filter(Boolean).join(", ");
}

export const nameOf = (one) => [splitPath(one.document).name, placeOf(one)].filter(Boolean).join(", ");

const SUPPORT = { partly: "partly supported", unsupported: "not supported by the documents" };

/** The marks of an answer for `markdown`: a button for each citation, a label where support is missing, the highlight. */
export function marksOf(answer, onselect) {
  const citations = citationsOf(answer);
  const unit = units(answer.text);
  const highlight = (answer.highlight ?? [0, 0]).map(unit);
  const sentences = unsupported(citations);
  const button = (citation) => citationButton(citation, citations.indexOf(citation), onselect);
  const waiting = [
    ...sentences.map((one) => ({ at: one.end, make: () => el("small", { class: "support", text: ` ${SUPPORT[one.support]}` }) })),
    ...citations.filter((one) => one.source && !one.is_explicit).map((one) => ({ at: one.end, make: () => button(one) })),
  ].sort((a, b) => a.at - b.at);
  return {
    cuts: [...new Set([...highlight, ...sentences.flatMap((one) => [one.start, one.end]), ...waiting.map((one) => one.at)])].sort(
      (a, b) => a - b,
    ),
    wrap: (text, from) => {
      const inside = (one) => from >= one.start && from < one.end;
      const weak = sentences.find(inside);
      const words = from >= highlight[0] && from < highlight[1] ? el("mark", { text }) : text;
      return weak ? el("span", { class: `sentence ${weak.support}` }, words) : words;
    },
    upTo: (offset) => {
      const due = waiting.filter((one) => one.at <= offset);
      waiting.splice(0, due.length);
      return due.map((one) => one.make());
    },
    marker: (number, offset) => {
      const before = citations.filter((one) => one.source === number && one.end <= offset);
      const best = before.sort((a, b) => b.end - a.end)[0] ?? citations.find((one) => one.source === number);
      return best ? button(best) : null;
    },
  };
}

/** Sentences that no citation supports fully, once each. */
function unsupported(citations) {
  const bySentence = new Map();
  for (const one of citations) {
    const name = `${one.start}-${one.end}`;
    bySentence.set(name, [...(bySentence.get(name) ?? []), one]);
  }
  return [...bySentence.values()].flatMap((all) => {
    if (all.some((one) => !(one.support in SUPPORT))) return [];
    return [all.find((one) => one.support === "partly") ?? all[0]];
  });
}

function citationButton(citation, index, onselect) {
  const label = `Source ${citation.source}: ${nameOf(citation)}`;
  return el("button", {
    type: "button",
    class: "cite",
    text: `[${citation.source}]`,
    "aria-label": label,
    title: citation.heading ? `${label}\n${citation.heading}` : label,
    "data-index": index,
    onclick: () => onselect(index),
  });
}
