// The column beside the conversation: the sources of an answer, or one of them opened in its document. On a narrow screen
// the document covers the page, and the browser's back button closes it.

import { abstains } from "./answer.js";
import { citationsOf, placeOf } from "./citations.js";
import { download, readDocument, readingAddress, scrollTo } from "./document_text.js";
import { byId, el } from "./dom.js";
import { splitPath } from "./format.js";
import { sourceList } from "./sources.js";

const NARROW = "(max-width: 64rem)";

let shown = null; // the answer whose sources are shown
let opener = null; // the button that opened the document
let isSheet = false;
let number = 0; // counts openings, so that a slow document does not replace a later one

addEventListener("popstate", () => isSheet && close());
matchMedia(NARROW).addEventListener("change", ({ matches }) => !matches && isSheet && asSheet(false));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("reading").hidden && !document.querySelector("dialog[open]")) back();
});

/** Show the sources of an answer, those that it cites first. */
export function showSources(turn) {
  shown = turn;
  close();
  const cited = new Set(citationsOf(turn).map((one) => one.source));
  const sources = turn.sources.toSorted((a, b) => cited.has(b.position) - cited.has(a.position));
  byId("sources-title").textContent = abstains(turn) ? "Nearest passages" : "Sources";
  byId("sources").replaceChildren(sourceList(sources, { open: openSource, unfolded: abstains(turn) }));
}

/** Show a text in place of the sources. */
export function showInstead(...nodes) {
  shown = null;
  close();
  byId("sources").replaceChildren(...nodes);
}

function openSource(source) {
  open({ ...source, quote: source.text ?? "" }, null);
}

/** Open the document of an answer's citation, at its quote. */
export function openCitation(turn, index) {
  if (shown !== turn) showSources(turn);
  const answer = document.activeElement?.closest(".answer");
  const all = citationsOf(turn);
  const places = all.filter((one) => one.source);
  const select = (place) => {
    for (const button of answer?.querySelectorAll(".cite") ?? []) {
      if (Number(button.dataset.index) === all.indexOf(place)) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
  };
  open(all[index], { places, at: places.indexOf(all[index]), select });
}

async function open(place, walk) {
  number += 1;
  const own = number;
  walk?.select(place);
  if (byId("reading").hidden) opener = document.activeElement;
  byId("reading").replaceChildren(head(place, walk), el("p", { class: "hint", text: "Opening \u2026" }));
  byId("reading").hidden = false;
  byId("source-box").hidden = true;
  if (matchMedia(NARROW).matches && !isSheet) asSheet(true);
  byId("reading").querySelector("h2").focus({ preventScroll: true });
  try {
    const { title, text, target, hasFile } = await readDocument(place.document, place);
    if (own !== number) return;
    if (title) byId("reading").querySelector("h2").textContent = title;
    byId("reading").querySelector(".links button").hidden = !hasFile;
    byId("reading").lastChild.replaceWith(text);
    scrollTo(byId("pane"), target);
  } catch (error) {
    if (own !== number) return;
    byId("reading").lastChild.replaceWith(el("p", { class: "notice", role: "alert", text: error.message }));
  }
}

function head(place, walk) {
  const button = (text, label, onclick) => el("button", { type: "button", class: "quiet", text, "aria-label": label, onclick });
  const step = (text, label, by) => {
    const next = walk?.places[walk.at + by];
    const made = button(text, label, () => open(next, { ...walk, at: walk.at + by }));
    made.disabled = !next;
    return made;
  };
  return el(
    "header",
    { class: "reading-head" },
    el(
      "div",
      { class: "reading-tools" },
      button("\u2190 All sources", "Back to all sources", back),
      ...(walk ? [
        step("\u2191", "Previous citation", -1),
        el("span", { text: `${walk.at + 1} of ${walk.places.length}` }),
        step("\u2193", "Next citation", 1),
      ] : []),
    ),
    el("h2", { tabindex: "-1", text: splitPath(place.document).name }),
    el("p", { class: "hint", text: [place.heading, placeOf(place)].filter(Boolean).join(", ") }),
    el(
      "p",
      { class: "links" },
      el("a", { href: readingAddress(place), target: "_blank", rel: "opener", text: "Open on its own page" }),
      downloadButton(place.document),
    ),
  );
}

/** A button that saves a document's file; a failure is written beside it. */
export function downloadButton(id) {
  const button = el("button", { type: "button", class: "link", text: "Download" });
  button.addEventListener("click", async () => {
    try {
      await download(id);
    } catch (error) {
      button.after(el("span", { class: "failures", role: "alert", text: ` ${error.message}` }));
    }
  });
  return button;
}

function asSheet(on) {
  isSheet = on;
  document.body.classList.toggle("sheet", on);
  for (const part of document.querySelectorAll(".top, .skip, #threads, #talk, #ask-form")) part.inert = on;
  if (on) history.pushState(null, "");
}

function back() {
  if (isSheet) history.back(); // popstate closes
  else close();
}

function close() {
  number += 1;
  if (byId("reading").hidden) return;
  if (isSheet) asSheet(false);
  byId("reading").hidden = true;
  byId("source-box").hidden = false;
  if (opener?.isConnected) opener.focus({ preventScroll: true });
  opener = null;
}
