// The list of documents, one page at a time; uploads with progress; deletion with confirmation.

import { getJson, request, streamEvents } from "./api.js";
import { byId, el } from "./dom.js";
import { count, moment, size, splitPath } from "./format.js";

const PAGE = 100;

export async function showDocuments() {
  const page = await getJson(`v1/documents?limit=${PAGE}`);
  const body = el("tbody");
  const more = el("button", { type: "button", class: "plain", text: "Show more" });
  const add = (found) => {
    body.append(...found.data.map(row));
    more.hidden = !found.has_more;
    more.onclick = () => morePages(found.last_id, add);
  };
  add(page);
  byId("documents").replaceChildren(
    uploader(),
    page.data.length ? table(body) : el("p", { class: "hint", text: "There are no documents yet." }),
    more,
  );
  const { documents } = await getJson("healthz");
  const all = documents ?? (page.has_more ? null : page.data.length);
  byId("documents-lead").textContent = all === null ? "" : `${count(all, "document")} in this knowledge base.`;
}

async function changed() {
  document.dispatchEvent(new Event("stillroom:documents"));
  await showDocuments();
}

async function morePages(after, add) {
  try {
    add(await getJson(`v1/documents?limit=${PAGE}&after=${encodeURIComponent(after)}`));
  } catch (error) {
    report([{ name: "", error }]);
  }
}

function table(body) {
  const columns = ["Document", "Title", "Passages", "Size", "Added"];
  const heads = columns.map((text) => el("th", { scope: "col", text }));
  return el(
    "table",
    { class: "rows wide documents" },
    el("caption", { class: "hidden", text: "Documents" }),
    el("thead", {}, el("tr", {}, ...heads, el("td", {}, el("span", { class: "hidden", text: "Delete" })))),
    body,
  );
}

function row(found) {
  const { folder, name } = splitPath(found.name ?? found.id);
  const cell = (label, text) => el("td", { "data-label": label, class: "number", text });
  const remove = el("button", {
    type: "button",
    class: "quiet",
    text: "Delete",
    "aria-label": `Delete ${name}`,
    onclick: () => askToDelete(found.id, name),
  });
  return el(
    "tr",
    {},
    el("th", { scope: "row", class: "source-name" }, el("b", { text: name }), el("small", { text: folder })),
    el("td", { class: "title", text: found.title === name ? "" : found.title }),
    cell("Passages", found.num_chunks.toLocaleString("en")),
    cell("Size", size(found.num_bytes)),
    cell("Added", moment(found.added_at)),
    el("td", { class: "act" }, remove),
  );
}

function askToDelete(id, name) {
  const dialog = byId("delete-dialog");
  byId("delete-name").textContent = name;
  byId("delete-form").onsubmit = async (event) => {
    event.preventDefault();
    dialog.close();
    if (event.submitter?.value !== "delete") return;
    try {
      await request(`v1/documents/${encodeURIComponent(id)}`, { method: "DELETE" });
      await changed();
      byId("documents-status").textContent = `${name} was deleted.`;
      byId("main").focus();
    } catch (error) {
      report([{ name, error }]);
    }
  };
  dialog.showModal();
}

function uploader() {
  const input = el("input", { type: "file", id: "files", multiple: "", onchange: () => send([...input.files]) });
  const zone = el(
    "div",
    { class: "uploader" },
    el("label", { for: "files", text: "Add documents" }),
    input,
    el("p", { class: "hint", text: "Or drop files here. Uploading a file again replaces its documents." }),
    el("progress", { id: "upload-progress", max: "1", value: "0", hidden: "", "aria-label": "Upload" }),
    el("p", { id: "documents-status", class: "hint", role: "status" }),
    el("ul", { id: "upload-failures", class: "failures" }),
  );
  zone.addEventListener("dragover", (event) => event.preventDefault());
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    send([...event.dataTransfer.files]);
  });
  return zone;
}

async function send(files) {
  if (!files.length) return;
  const form = new FormData();
  for (const file of files) form.append("file", file);
  const progress = byId("upload-progress");
  progress.hidden = false;
  byId("files").disabled = true;
  byId("documents-status").textContent = `Sending ${count(files.length, "file")} \u2026`;
  let results = [];
  try {
    for await (const event of streamEvents("v1/documents", { method: "POST", body: form })) {
      if (event.data) results = event.data;
      else progress.value = event.num_bytes_total ? event.num_bytes_done / event.num_bytes_total : 0;
    }
    await changed();
  } catch (error) {
    results = [...results, { name: "", error }];
    progress.hidden = true;
    byId("files").disabled = false;
  }
  report(results);
}

function report(results) {
  const failed = results.filter((result) => result.error);
  const by = (status) => results.filter((result) => result.status === status).length;
  const told = ["added", "updated", "unchanged"].filter(by).map((status) => `${by(status)} ${status}`);
  if (failed.length) told.push(`${failed.length} failed`);
  byId("documents-status").textContent = `${told.join(", ")}.`;
  byId("upload-failures").replaceChildren(
    ...failed.map(({ name, error }) => el("li", { text: name ? `${name}: ${error.message}` : error.message })),
  );
}
