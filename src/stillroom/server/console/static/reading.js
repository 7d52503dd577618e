// A document on a page of its own.

import { placeFrom, readDocument } from "./document_text.js";
import { byId, el } from "./dom.js";
import { splitPath } from "./format.js";
import { downloadButton } from "./pane.js";

export async function showReading(id = "", place = "") {
  byId("read-title").textContent = splitPath(id).name;
  byId("read-tools").replaceChildren(downloadButton(id));
  byId("read").replaceChildren(el("p", { class: "hint", text: "Opening \u2026" }));
  const address = location.hash;
  const { title, text, target, hasFile } = await readDocument(id, placeFrom(place));
  if (location.hash !== address) return; // another view was opened meanwhile
  if (title) byId("read-title").textContent = title;
  document.title = `${byId("read-title").textContent} \u2013 Stillroom`;
  byId("read-tools").hidden = !hasFile;
  byId("read").replaceChildren(text);
  target?.scrollIntoView({ block: "center" });
}
