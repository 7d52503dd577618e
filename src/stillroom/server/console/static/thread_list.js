// The list of kept conversations: open, search, delete.

import { askToDelete } from "./confirm.js";
import { byId, el } from "./dom.js";
import { count, moment } from "./format.js";
import { dropThreads, findThreads } from "./threads.js";

/** Connect the list. It follows changes of the conversations. */
export function startThreadList() {
  byId("thread-query").addEventListener("input", showThreads);
  document.addEventListener("stillroom:threads", showThreads);
  byId("threads-delete").addEventListener("click", () => {
    const ids = findThreads().map((thread) => thread.id);
    const text = "They are kept in this browser only, so they cannot be restored.";
    askToDelete(`Delete ${count(ids.length, "conversation")}?`, text, () => drop(ids));
  });
  byId("threads").open = matchMedia("(min-width: 72rem)").matches;
}

function drop(ids) {
  dropThreads(ids);
  const open = location.hash.split("/")[1];
  if (ids.includes(open)) location.hash = "#ask";
}

export function showThreads() {
  const found = findThreads(byId("thread-query").value);
  const open = location.hash.split("/")[1];
  byId("threads").hidden = !findThreads().length;
  byId("thread-none").hidden = found.length > 0;
  byId("thread-list").replaceChildren(...found.slice(0, 200).map((thread) => row(thread, open)));
}

function row(thread, open) {
  const title = thread.turns[0]?.question ?? "";
  const link = el(
    "a",
    { href: `#ask/${thread.id}`, "aria-current": thread.id === open ? "page" : null, title: moment(thread.at / 1000) },
    title,
  );
  const remove = el("button", { type: "button", class: "cross", text: "\u00d7", "aria-label": `Delete "${title}"` });
  remove.addEventListener("click", () => {
    askToDelete("Delete this conversation?", title, () => drop([thread.id]));
  });
  return el("li", {}, link, remove);
}
