// The list of past questions, and the record of one.

import { account, phaseBar } from "./account.js";
import { answerNodes } from "./answer.js";
import { getJson } from "./api.js";
import { citationsOf } from "./citations.js";
import { readingAddress } from "./document_text.js";
import { byId, el } from "./dom.js";
import { duration, moment, percent } from "./format.js";
import { reuseMap } from "./reuse_map.js";
import { sourceList } from "./sources.js";

export async function showRequests() {
  const found = await getJson("v1/requests");
  const place = byId("requests");
  if (!found.length) {
    place.replaceChildren(el("p", { class: "hint", text: "There are no questions yet." }));
    return;
  }
  const longest = Math.max(...found.map((one) => one.timing.total_seconds));
  const keeps = found.some((one) => one.num_cached_tokens); // the reader keeps no KV
  const columns = ["When", "Question", "Phases", "First token", "Total", ...(keeps ? ["Kept"] : [])];
  const map = await reuseMap(found); // before the list is shown, so that nothing moves under the pointer
  place.replaceChildren(
    ...(map ? [map] : []),
    el(
      "table",
      { class: "rows wide" },
      el("caption", { class: "hidden", text: "Requests, latest first" }),
      el("thead", {}, el("tr", {}, ...columns.map((text) => el("th", { scope: "col", text })))),
      el("tbody", {}, ...found.map((one) => row(one, longest, keeps))),
    ),
  );
}

function row(one, longest, keeps) {
  const phases = phaseBar(one.timing, "bar thin");
  phases.style.width = `${Math.max((100 * one.timing.total_seconds) / longest, 8)}%`;
  const kept = one.num_prompt_tokens ? percent(one.num_cached_tokens / one.num_prompt_tokens) : "";
  const cell = (label, text) => el("td", { "data-label": label, class: "number", text });
  return el(
    "tr",
    {},
    el("td", { "data-label": "When", class: "when", text: moment(one.at) }),
    el(
      "th",
      { scope: "row" },
      el("a", { href: `#requests/${one.request_id}`, text: one.question || "(continued prompt)" }),
    ),
    el("td", { class: "phases" }, phases),
    cell("First token", duration(one.timing.ttft_seconds)),
    cell("Total", duration(one.timing.total_seconds)),
    keeps ? cell("Kept", kept) : null,
  );
}

export async function showRequest(id) {
  const place = byId("request");
  place.replaceChildren();
  const found = await getJson(`v1/requests/${encodeURIComponent(id)}`);
  if (!location.hash.endsWith(id)) return; // another view was opened meanwhile
  place.replaceChildren(
    el(
      "div",
      { class: "beside" },
      el(
        "article",
        { class: "panel" },
        el("h2", { class: "asked", text: found.question || "(continued prompt)" }),
        el("div", { class: "answer" }, ...answerNodes(found, (index) => (location.hash = readingAddress(citationsOf(found)[index])))),
        ...account(found).filter(Boolean),
        el("p", { class: "hint", text: `${found.request_id}, ${moment(found.at)}, ${found.model}` }),
      ),
      el("aside", { "aria-label": "Sources" }, el("h2", { text: "Sources" }), sourceList(found.sources, { open: (source) => (location.hash = readingAddress(source)) })),
    ),
  );
}
