// Safe Markdown: paragraphs, headings, lists, quotes, tables, code, bold, italics and links, made of DOM nodes. HTML
// stays text. Every node keeps to its place in the text, so that marks (citations, a highlight) can be given by offset.

import { el } from "./dom.js";

const FENCE = /^ {0,3}(```|~~~)/;
const HEADING = /^ {0,3}#{1,6}\s+/;
const ITEM = /^\s*(?:[-*+]|\d{1,9}[.)])\s+/;
const QUOTE = /^ {0,3}> ?/;
const SEPARATOR = /^\s*\|?(\s*:?-+:?\s*\|)+(\s*:?-+:?\s*)?$/;
const INLINE = new RegExp(
  [
    /`(?<code>[^`\n]+)`/,
    /\*\*(?<bold>[^*]+)\*\*/,
    /\*(?<italic>[^*\s][^*]*)\*/,
    /(?<!\w)_(?<under>[^_\s][^_]*)_(?!\w)/,
    /\[(?<label>[^\][]+)\]\((?<target>https?:\/\/[^\s()]+)\)/,
    /\[(?<marker>\d{1,3})\]/,
    /(?<address>https?:\/\/[^\s<>()[\]"'`]*[^\s<>()[\]"'`.,;:!?])/,
  ]
    .map((one) => one.source)
    .join("|"),
  "g",
);

const NO_MARKS = { cuts: [], wrap: (text) => text, upTo: () => [], marker: () => null };

/**
 * Return the nodes of a text.
 *
 * `marks` has `cuts`, offsets at which texts are divided; `wrap(text, from)`, the node of a piece; `upTo(offset)`, nodes to
 * insert at an offset or before it that were not inserted yet; `marker(number, offset)`, the node of `[number]`, or null.
 */
export function markdown(text, marks = NO_MARKS) {
  let at = 0;
  const lines = text.split("\n").map((line) => {
    const found = { text: line, at };
    at += line.length + 1;
    return found;
  });
  return [...blocks(lines, { text, marks }), ...marks.upTo(Infinity)];
}

const isBlank = (line) => !line.text.trim();

const without = (line, length) => ({ text: line.text.slice(length), at: line.at + Math.min(length, line.text.length) });

const startsBlock = (line) => [FENCE, HEADING, ITEM, QUOTE].some((start) => start.test(line.text));

function blocks(lines, whole) {
  const nodes = [];
  let index = 0;
  const take = (holds) => {
    const from = index;
    while (index < lines.length && holds(lines[index], index - from)) index += 1;
    return lines.slice(from, index);
  };
  while (index < lines.length) {
    const line = lines[index];
    if (isBlank(line)) index += 1;
    else if (FENCE.test(line.text)) {
      const fence = FENCE.exec(line.text)[1];
      index += 1;
      nodes.push(codeBlock(take((one) => !one.text.trimStart().startsWith(fence))));
      index += 1;
    } else if (HEADING.test(line.text)) {
      nodes.push(el("p", { class: "title" }, ...inline([without(line, HEADING.exec(line.text)[0].length)], whole)));
      index += 1;
    } else if (QUOTE.test(line.text)) {
      const quoted = take((one) => QUOTE.test(one.text)).map((one) => without(one, QUOTE.exec(one.text)[0].length));
      nodes.push(el("blockquote", {}, ...blocks(quoted, whole)));
    } else if (ITEM.test(line.text)) {
      nodes.push(list(take((one, number) => number === 0 || belongs(one, lines[index - 1], line)), whole));
    } else if (line.text.includes("|") && SEPARATOR.test(lines[index + 1]?.text ?? "")) {
      nodes.push(table(take((one) => one.text.includes("|")), whole));
    } else nodes.push(el("p", {}, ...inline(take((one, n) => n === 0 || !(isBlank(one) || startsBlock(one))), whole)));
  }
  return nodes;
}

const codeBlock = (lines) =>
  el("pre", { tabindex: "0" }, el("code", { text: lines.map((line) => line.text).join("\n") }));

const indent = (line) => line.text.search(/\S|$/);

/** Whether a line continues a list: another item, an indented line, or the rest of a paragraph. */
function belongs(line, before, first) {
  if (isBlank(line)) return true;
  if (ITEM.test(line.text)) return indent(line) >= indent(first);
  return indent(line) > indent(first) || !(isBlank(before) || startsBlock(line));
}

function list(lines, whole) {
  const items = [];
  for (const line of lines) {
    if (ITEM.test(line.text) && indent(line) <= indent(lines[0]))
      items.push([without(line, ITEM.exec(line.text)[0].length)]);
    else items.at(-1).push(without(line, Math.min(indent(line), ITEM.exec(lines[0].text)[0].length)));
  }
  const number = /^\s*(\d+)/.exec(lines[0].text)?.[1];
  const contents = items.map((item) => blocks(item, whole).flatMap((node, index, { length }) =>
    node.nodeName === "P" && (index === 0 || length === 1) ? [...node.childNodes] : [node]));
  return el(number ? "ol" : "ul", { start: number }, ...contents.map((nodes) => el("li", {}, ...nodes)));
}

function table(lines, whole) {
  const row = (line, tag) => {
    const found = [...line.text.replace(/\|\s*$/, "").replace(/^\s*\|/, (edge) => " ".repeat(edge.length)).matchAll(/[^|]+/g)];
    const cell = ({ 0: text, index }) => {
      const trimmed = text.trim();
      return { text: trimmed, at: line.at + index + text.indexOf(trimmed) };
    };
    return el("tr", {}, ...found.map((one) => el(tag, {}, ...inline([cell(one)], whole))));
  };
  const [head, , ...body] = lines;
  const content = el("table", {}, el("thead", {}, row(head, "th")), el("tbody", {}, ...body.map((line) => row(line, "td"))));
  return el("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": "Table" }, content);
}

/** The nodes of a paragraph's lines; lines that follow each other in the text are read as one. */
function inline(lines, whole) {
  const end = (line) => line.at + line.text.length;
  const isRun = lines.every((line, index) => index === 0 || line.at === end(lines[index - 1]) + 1);
  if (isRun) return spans(lines[0].at, end(lines.at(-1)), whole);
  return lines.flatMap((line) => [...spans(line.at, end(line), whole), " "]);
}

function spans(from, to, whole) {
  const nodes = [];
  let at = from;
  const { marks } = whole;
  for (const found of whole.text.slice(from, to).matchAll(INLINE)) {
    const start = from + found.index;
    const { marker } = found.groups;
    const node = marker && marks.marker(Number(marker), start);
    if (marker && !node) continue;
    nodes.push(...runs(at, start, whole)); // before the span, whose marks come later
    if (node && typeof nodes.at(-1) === "string") nodes.push(nodes.pop().replace(/ $/, "\u00a0")); // no line begins with [1]
    nodes.push(node ?? span(found, start, whole));
    at = start + found[0].length;
  }
  return [...nodes, ...runs(at, to, whole)];
}

function span({ 0: all, groups }, start, whole) {
  const inner = (text) => spans(start + all.indexOf(text), start + all.indexOf(text) + text.length, whole);
  const link = (href, nodes) => el("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...nodes);
  if (groups.code) return el("code", {}, ...runs(start + 1, start + all.length - 1, whole));
  if (groups.bold) return el("b", {}, ...inner(groups.bold));
  if (groups.italic ?? groups.under) return el("i", {}, ...inner(groups.italic ?? groups.under));
  if (groups.label) return link(groups.target, inner(groups.label));
  return link(groups.address, runs(start, start + all.length, whole));
}

/** Plain text, divided where a mark begins or ends. */
function runs(from, to, { text, marks }) {
  const nodes = [];
  let at = from;
  for (const cut of [...marks.cuts.filter((one) => one > from && one < to), to]) {
    nodes.push(...marks.upTo(at));
    if (cut > at) nodes.push(marks.wrap(text.slice(at, cut), at));
    at = cut;
  }
  return [...nodes, ...marks.upTo(to)];
}
