// Timeline of an answer's phases, and the source of each part of its prompt.

import { el } from "./dom.js";
import { count, duration, percent, splitPath } from "./format.js";
import { origin, ORIGINS } from "./reuse_map.js";

/** Phases in order, with kind, name and seconds; queue, load and prefill are one phase if they are unknown. */
export function phases(timing) {
  const found = [["search", "Search", timing.retrieval_seconds]];
  if (timing.prefill_seconds === null || timing.prefill_seconds === undefined) {
    found.push(["prefill", "To the first token", timing.ttft_seconds - timing.retrieval_seconds]);
  } else {
    found.push(["queue", "Queue", timing.queue_seconds]);
    found.push(["load", "Load", timing.load_seconds]);
    found.push(["prefill", "Prefill", timing.prefill_seconds]);
  }
  found.push(["decode", "Decode", timing.total_seconds - timing.ttft_seconds]);
  return found.map(([kind, name, seconds]) => ({ kind, name, seconds: Math.max(seconds, 0) }));
}

/** A bar of proportional parts. It repeats the text next to it, so it is hidden from screen readers. */
export function bar(parts, classes = "bar") {
  const line = el("div", { class: classes, "aria-hidden": "true" });
  const sum = parts.reduce((all, { size }) => all + size, 0);
  for (const { kind, size, title } of parts) {
    if (!size) continue;
    const part = el("span", { class: `part ${kind}`, title });
    part.style.flexGrow = (1000 * size) / sum;
    line.append(part);
  }
  return line;
}

export const phaseBar = (timing, classes) =>
  bar(
    phases(timing).map(({ kind, name, seconds }) => ({ kind, size: seconds, title: `${name}: ${duration(seconds)}` })),
    classes,
  );

/** "Where the time went", what was searched for in several hops, and "Where the prompt came from". */
export function account(answer) {
  const { timing, reuse, sources } = answer;
  const from = reuse.segments?.length ? origins(reuse, sources) : plainOrigins(reuse, timing);
  return [timeline(answer), searches(answer.hops), from];
}

/** The searches of a question with several hops, in order; null for one search. */
function searches(hops) {
  if (!hops?.length) return null;
  const rows = hops.map(({ question, sources, answer }) => {
    const found = count(sources.length, "new passage") + (answer ? `; so far: ${answer}` : "");
    return el("li", {}, question, " ", el("small", { text: found }));
  });
  return el(
    "section",
    { class: "account" },
    el("h3", { text: "What was searched for" }),
    el("ol", { class: "hops" }, ...rows),
  );
}

const MEANINGS = {
  search: "finding the passages",
  queue: "waiting for the model",
  load: "loading kept KV",
  prefill: "reading the prompt",
  decode: "writing the answer",
};

function timeline({ timing, speculation, hops, num_generated_tokens: generated }) {
  const rows = phases(timing).map(({ kind, name, seconds }) =>
    el(
      "div",
      {},
      el("dt", {}, el("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), name),
      el("dd", {}, el("b", { text: duration(seconds) }), el("small", { text: kind === "search" && hops?.length ? "finding passages, and reading between searches" : MEANINGS[kind] })),
    ),
  );
  const per = timing.tpot_seconds ? `, then ${duration(timing.tpot_seconds)} per token` : "";
  const written = generated ? ` for ${count(generated, "token")}` : "";
  return el(
    "section",
    { class: "account" },
    el("h3", { text: "Where the time went" }),
    phaseBar(timing),
    el("dl", { class: "legend" }, ...rows),
    el("p", {
      class: "sum",
      text: `First token after ${duration(timing.ttft_seconds)}${per}; ${duration(timing.total_seconds)} in all${written}.`,
    }),
    overlap(speculation),
  );
}

function overlap(speculation) {
  if (!speculation) return null;
  if (speculation.outcome === "right" && speculation.ahead_seconds > 0)
    return el("p", {
      class: "sum",
      text: `The model began to read ${duration(speculation.ahead_seconds)} before the search ended.`,
    });
  if (speculation.outcome === "wrong")
    return el("p", {
      class: "sum",
      text: `${count(speculation.num_started, "prompt")} started before the search ended, in vain: the search ended with other passages.`,
    });
  return null;
}

const NAMES = { system: "Instructions", question: "Question", chunk: "Passage", turn: "Earlier turn" };

function origins(reuse, sources) {
  const byChunk = new Map(sources.map((source) => [source.chunk_id, source]));
  const name = (segment) => {
    const source = byChunk.get(segment.chunk_id);
    if (!source) return NAMES[segment.kind] ?? segment.kind;
    return `${source.position}. ${splitPath(source.document).name}`;
  };
  const rows = reuse.segments.map((segment) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", text: name(segment) }),
      el("td", { class: "number", text: segment.num_tokens.toLocaleString("en") }),
      el(
        "td",
        {},
        el("span", { class: `swatch ${origin(segment)}`, "aria-hidden": "true" }),
        ORIGINS[segment.source] ?? segment.source,
      ),
      el("td", { text: reason(segment) }),
    ),
  );
  return el(
    "section",
    { class: "account" },
    el("h3", { text: "Where the prompt came from" }),
    bar(
      reuse.segments.map((segment) => ({
        kind: origin(segment),
        size: segment.num_tokens,
        title: `${name(segment)}: ${count(segment.num_tokens, "token")}, ${segment.source}`,
      })),
    ),
    el("p", { class: "sum", text: savings(reuse) }),
    el(
      "table",
      { class: "rows parts" },
      el("caption", { class: "hidden", text: "Parts of the prompt" }),
      el("thead", {}, el("tr", {}, ...["Part", "Tokens", "From", "Why"].map((text) => el("th", { scope: "col", text })))),
      el("tbody", {}, ...rows),
    ),
  );
}

function reason(segment) {
  const again = segment.num_recomputed ? `, ${count(segment.num_recomputed, "token")} recomputed` : "";
  const words = {
    hit: "kept from an earlier question",
    placed: "kept from another position in a prompt",
    prepared: "prepared in its document before the question",
  };
  return (words[segment.reason] ?? segment.reason) + again;
}

const segmentsOf = (reuse, reason) => reuse.segments?.some((segment) => segment.reason === reason);

function savings(reuse) {
  if (!reuse.num_cached_tokens) return `All ${count(reuse.num_prompt_tokens, "token")} of the prompt were computed.`;
  const share = percent(reuse.num_cached_tokens / reuse.num_prompt_tokens);
  const saved = reuse.saved_seconds > 0.0005 ? `, which saved about ${duration(reuse.saved_seconds)}` : "";
  return (
    `${reuse.num_cached_tokens.toLocaleString("en")} of ${count(reuse.num_prompt_tokens, "token")} (${share}) ` +
    `were kept${segmentsOf(reuse, "prepared") ? ", some prepared before any question" : " from earlier questions"}${saved}.`
  );
}

function plainOrigins(reuse) {
  if (!reuse.num_prompt_tokens) return null;
  return el("section", { class: "account" }, el("h3", { text: "Where the prompt came from" }), el("p", { class: "sum", text: savings(reuse) }));
}
