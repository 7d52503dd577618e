// The list of documents: search, order, deletion of one or several after confirmation.

import { request } from "./api.js";
import { askToDelete } from "./confirm.js";
import { allDocuments } from "./document_list.js";
import { readingAddress } from "./document_text.js";
import { byId, el } from "./dom.js";
import { count, moment, size, splitPath } from "./format.js";
import { uploader } from "./uploads.js";

const PAGE = 100;

const COLUMNS = [
  { text: "Document", of: (one) => (one.name ?? one.id).toLowerCase() },
  { text: "Title", of: (one) => one.title.toLowerCase() },
  { text: "Passages", of: (one) => one.num_chunks },
  { text: "Size", of: (one) => one.num_bytes },
  { text: "Added", of: (one) => one.added_at },
];

let all = [];
let query = "";
let order = { column: 0, isDown: false };
let numShown = PAGE;
const chosen = new Set();

export async function showDocuments() {
  all = await allDocuments();
  const ids = new Set(all.map((one) => one.id));
  for (const id of chosen) if (!ids.has(id)) chosen.delete(id);
  byId("documents-lead").textContent = `${count(all.length, "document")} in this knowledge base.`;
  const search = el("input", { type: "search", id: "document-query", placeholder: "Search names, titles and tags", value: query });
  search.addEventListener("input", () => {
    query = search.value;
    numShown = PAGE;
    showRows();
  });
  byId("documents").replaceChildren(
    uploader(changed),
    el(
      "div",
      { class: "ask-row", hidden: all.length ? null : "" },
      el("label", { class: "hidden", for: "document-query", text: "Search documents" }),
      search,
      el("p", { class: "hint", id: "document-count", role: "status" }),
      el("button", { type: "button", class: "danger", id: "delete-chosen", onclick: deleteChosen }),
    ),
    el("div", { id: "document-rows" }),
  );
  showRows();
}

async function changed() {
  document.dispatchEvent(new Event("stillroom:documents"));
  await showDocuments();
}

function showRows() {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (one) => `${one.id}\n${one.title}\n${JSON.stringify(one.metadata ?? {})}`.toLowerCase();
  const found = all.filter((one) => words.every((word) => text(one).includes(word)));
  const { of } = COLUMNS[order.column];
  const sign = order.isDown ? -1 : 1;
  found.sort((a, b) => sign * (of(a) < of(b) ? -1 : of(a) > of(b) ? 1 : 0));
  const rows = found.slice(0, numShown);
  const more = el("button", { type: "button", class: "plain", text: "Show more", hidden: found.length > numShown ? null : "" });
  more.addEventListener("click", () => {
    numShown += PAGE;
    showRows();
  });
  byId("document-count").textContent = query ? `${count(found.length, "document")} found` : "";
  const none = el("p", { class: "hint", text: all.length ? "No document has these words." : "There are no documents yet." });
  byId("document-rows").replaceChildren(rows.length ? table(rows) : none, more);
  showChosen();
}

function showChosen() {
  byId("delete-chosen").textContent = `Delete ${count(chosen.size, "document")}`;
  byId("delete-chosen").hidden = !chosen.size;
}

function table(rows) {
  const body = el("tbody", {}, ...rows.map(row));
  const every = el("input", { type: "checkbox", "aria-label": "Select all documents shown" });
  every.checked = rows.every((one) => chosen.has(one.id));
  every.addEventListener("change", () => {
    for (const one of rows) every.checked ? chosen.add(one.id) : chosen.delete(one.id);
    showRows();
  });
  return el(
    "table",
    { class: "rows wide documents" },
    el("caption", { class: "hidden", text: "Documents" }),
    el("thead", {}, el("tr", {}, el("td", {}, every), ...COLUMNS.map(head), el("td", {}, el("span", { class: "hidden", text: "Delete" })))),
    body,
  );
}

function head({ text }, index) {
  const isOrder = order.column === index;
  const sort = el("button", { type: "button", class: "link", text: `${text}${isOrder ? (order.isDown ? " \u2193" : " \u2191") : ""}` });
  sort.addEventListener("click", () => {
    order = { column: index, isDown: isOrder && !order.isDown };
    showRows();
    byId("document-rows").querySelectorAll("thead button")[index].focus();
  });
  return el("th", { scope: "col", "aria-sort": isOrder ? (order.isDown ? "descending" : "ascending") : null }, sort);
}

function row(found) {
  const { folder, name } = splitPath(found.name ?? found.id);
  const cell = (label, text) => el("td", { "data-label": label, class: "number", text });
  const box = el("input", { type: "checkbox", "aria-label": `Select ${name}` });
  box.checked = chosen.has(found.id);
  box.addEventListener("change", () => {
    if (box.checked) chosen.add(found.id);
    else chosen.delete(found.id);
    showChosen();
  });
  const text =
    `${name} will no longer be found, and its kept KV is removed. A file that was not uploaded here is not deleted from disk.`;
  const remove = el("button", { type: "button", class: "quiet", text: "Delete", "aria-label": `Delete ${name}` });
  remove.addEventListener("click", () => askToDelete("Delete this document?", text, () => removeAll([found])));
  return el(
    "tr",
    {},
    el("td", { class: "pick" }, box),
    el(
      "th",
      { scope: "row", class: "source-name" },
      el("a", { href: readingAddress({ document: found.id }), text: name }),
      el("small", { text: [folder, found.status === "not_indexed" ? "not indexed: upload it again, or delete it" : ""].join(" ") }),
    ),
    el("td", { class: "title", text: found.title === name ? "" : found.title }),
    cell("Passages", found.num_chunks.toLocaleString("en")),
    cell("Size", size(found.num_bytes)),
    cell("Added", moment(found.added_at)),
    el("td", { class: "act" }, remove),
  );
}

function deleteChosen() {
  const found = all.filter((one) => chosen.has(one.id));
  const names = found.map((one) => splitPath(one.name ?? one.id).name);
  const listed = names.length > 10 ? `${names.slice(0, 10).join(", ")} and ${names.length - 10} more` : names.join(", ");
  const text = `${listed}: they will no longer be found. Files that were not uploaded here are not deleted from disk.`;
  askToDelete(`Delete ${count(found.length, "document")}?`, text, () => removeAll(found));
}

/** Delete documents one after the other, and say how many were deleted and which could not be. */
async function removeAll(found) {
  const failed = [];
  for (const [index, { id, name }] of found.entries()) {
    byId("documents-status").textContent = `Deleting ${index + 1} of ${found.length} \u2026`;
    try {
      await request(`v1/documents/${encodeURIComponent(id)}`, { method: "DELETE" });
    } catch (error) {
      failed.push(`${name ?? id}: ${error.message}`);
    }
  }
  const deleted = found.length - failed.length;
  const { name, id } = found[0];
  const told = found.length === 1 ? `${splitPath(name ?? id).name} was deleted.` : `${count(deleted, "document")} deleted.`;
  await changed();
  byId("documents-status").textContent = deleted ? told : "";
  byId("upload-failures").replaceChildren(...failed.map((text) => el("li", { text })));
  byId("main").focus();
}
