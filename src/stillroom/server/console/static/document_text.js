// The text of a document: its paragraphs with their lines or pages, and the words of a citation marked in it.

import { getJson, request } from "./api.js";
import { el } from "./dom.js";
import { splitPath } from "./format.js";

const contentPath = (id) => `v1/documents/${encodeURIComponent(id)}/content`;

/** Address of a document's own page in the console, at the place of a citation. */
export function readingAddress({ document, start_line: line, end_line: last, start_page: page }) {
  const place = line ? `/L${line}-L${last}` : page ? `/p${page}` : "";
  return `#read/${encodeURIComponent(document)}${place}`;
}

/** The place that the last part of such an address names. */
export function placeFrom(text = "") {
  const lines = /^L(\d+)(?:-L(\d+))?$/.exec(text);
  const page = Number(/^p(\d+)$/.exec(text)?.[1] ?? 0);
  const line = Number(lines?.[1] ?? 0);
  return { start_line: line, end_line: Number(lines?.[2] ?? line), start_page: page, end_page: page, quote: "" };
}

/** Save the original file. The key travels in a header, so the browser cannot fetch it by a plain link. */
export async function download(id) {
  const reply = await request(`${contentPath(id)}?download=1`);
  const address = URL.createObjectURL(await reply.blob());
  el("a", { href: address, download: splitPath(id).name.split("#")[0] }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** Read a document. Returns its title, its text as a node, the first marked node in it or null, and if it has a file. */
export async function readDocument(id, place) {
  const content = await getJson(contentPath(id));
  const { paragraphs } = content;
  for (let page = content; page.has_more; paragraphs.push(...page.paragraphs))
    page = await getJson(`${contentPath(id)}?offset=${paragraphs.length}`);
  const parts = paragraphs.map((one) => paragraph(one, isWithin(one, place)));
  const within = parts.filter((_, index) => isWithin(paragraphs[index], place));
  const mark = markQuote(within.length ? within : parts, place.quote);
  for (const part of within) part.classList.add("cited");
  const text = el("div", { class: "text" });
  if (content.notice) text.append(el("p", { class: "hint", text: content.notice }));
  let path = [];
  parts.forEach((part, index) => {
    const next = paragraphs[index].heading_path ?? [];
    next.forEach((heading, level) => {
      if (heading !== path[level] || path.slice(0, level).join() !== next.slice(0, level).join())
        text.append(el("p", { class: `title level-${level}`, text: heading }));
    });
    path = next;
    text.append(part);
  });
  if (!parts.length) text.append(el("p", { class: "hint", text: "The document has no text." }));
  return { title: content.title, text, target: mark ?? within[0] ?? null, hasFile: content.has_file };
}

function isWithin(one, { start_line: line, end_line: last, start_page: page, end_page: lastPage }) {
  if (line && one.start_line) return one.start_line <= last && one.end_line >= line;
  if (page && one.start_page) return one.start_page <= lastPage && one.end_page >= page;
  return false;
}

function paragraph(one) {
  const place = one.start_line ? `L${one.start_line}` : one.start_page ? `p. ${one.start_page}` : "";
  const kind = isWrapped(one.text) ? "" : CODE.test(one.text) ? " lines code" : " lines";
  return el("p", { class: `passage-text${kind}`, "data-place": place }, one.text);
}

const CODE = /^(?: {2,}|\t)\S|[{;(\[]$/m;

/** Whether a text is prose whose lines were broken to fit a width, so that they may be joined. */
const isWrapped = (text) => text.split("\n").every((line, index, { length }) =>
  index === length - 1 || (line.length > 50 && !/^\s| \| | {3}/.test(line)));

/** Scroll the box around a node, not the page, so that the node stands in its upper third. */
export function scrollTo(box, node) {
  if (!node) return;
  const { top, height } = box.getBoundingClientRect();
  box.scrollTop += node.getBoundingClientRect().top - top - height / 3;
}

/** Mark the words of a quote; line breaks and spaces may differ. Returns the first mark, or null. */
function markQuote(parts, quote) {
  const words = quote?.trim().split(/\s+/).filter(Boolean) ?? [];
  if (!words.length) return null;
  const pattern = new RegExp(words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("\\s+"));
  for (const pieces of [...parts.map((part) => joined([part])), joined(parts)]) {
    const found = pattern.exec(pieces.map((piece) => piece.text).join("\n"));
    if (found) return markPieces(pieces, found.index, found.index + found[0].length);
  }
  return null;
}

/** Paragraphs with their texts, and where each begins when they are joined by line ends. */
function joined(parts) {
  let at = 0;
  return parts.map((part) => {
    const piece = { part, at, text: part.textContent };
    at += piece.text.length + 1;
    return piece;
  });
}

function markPieces(pieces, start, end) {
  let first = null;
  for (const { part, at, text } of pieces) {
    const [from, to] = [Math.max(start - at, 0), Math.min(end - at, text.length)];
    if (from >= to) continue;
    const mark = el("mark", { text: text.slice(from, to) });
    part.replaceChildren(text.slice(0, from), mark, text.slice(to));
    first ??= mark;
  }
  return first;
}
