// One question with its answer: text with citations, its ending, and one line of telemetry that unfolds.

import { account } from "./account.js";
import { marksOf } from "./citations.js";
import { el } from "./dom.js";
import { count, duration, percent } from "./format.js";
import { markdown } from "./markdown.js";

const ABSTENTION = "The documents do not say.";

export const abstains = (turn) => turn.text.trim() === ABSTENTION;

/** The nodes of an answer's text. `onselect(index)` is called with the index of a selected citation. */
export const answerNodes = (turn, onselect) => markdown(turn.text, marksOf(turn, onselect));

const ENDINGS = {
  length: "The answer was cut at the longest allowed length.",
  stopped: "Stopped.",
};

/** What follows the text of a finished answer. */
export function remarks(turn) {
  const { costs } = turn;
  const notes = [
    ENDINGS[turn.ending],
    turn.ending && !turn.text ? "The model returned an empty answer." : null,
    abstains(turn) ? "The nearest passages are shown as suggestions. Other words may find more." : null,
    turn.where ? `Limited to ${turn.where}` : null,
  ].filter(Boolean);
  return [
    ...(turn.warnings ?? []).map((text) => el("p", { class: "notice", text })),
    ...notes.map((text) => el("p", { class: "hint", text })),
    ...(costs ? [telemetry(turn)] : []),
  ];
}

function telemetry({ costs, sources, confidence }) {
  return el(
    "details",
    { class: "telemetry" },
    el("summary", { text: line(costs, confidence) }),
    ...account({ ...costs, sources }).filter(Boolean),
    el("p", { class: "hint" }, el("a", { href: `#requests/${costs.request_id}`, text: costs.request_id })),
  );
}

/** Time to the first word, confidence, reuse, and the time saved, in one line. */
function line({ timing, reuse }, confidence) {
  const chunks = (reuse.segments ?? []).filter((segment) => segment.kind === "chunk");
  const kept = chunks.filter((segment) => segment.source !== "computed").length;
  const parts = [`${duration(timing.ttft_seconds)} to the first word`];
  if (confidence !== undefined) parts.push(`confidence ${percent(confidence)}`);
  if (chunks.length) parts.push(`${kept} of ${count(chunks.length, "passage")} reused`);
  else if (reuse.num_cached_tokens) parts.push(`${reuse.num_cached_tokens} of ${count(reuse.num_prompt_tokens, "token")} reused`);
  if (reuse.saved_seconds > 0.0005) parts.push(`saved ${duration(reuse.saved_seconds)}`);
  return parts.join(", ");
}
