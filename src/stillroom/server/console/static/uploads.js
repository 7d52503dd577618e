// Uploads of documents, with progress and cancellation.

import { key, ServerError } from "./api.js";
import { byId, el } from "./dom.js";
import { count, percent, size } from "./format.js";

let running = null;

addEventListener("beforeunload", (event) => running && event.preventDefault()); // leaving cancels the upload

/** The field for files. `changed()` shows the documents again and is awaited. */
export function uploader(changed) {
  const input = el("input", { type: "file", id: "files", multiple: "", disabled: running !== null, onchange: () => send([...input.files], changed) });
  const zone = el(
    "div",
    { class: "uploader" },
    el("label", { for: "files", text: "Add documents" }),
    input,
    el("p", { class: "hint", text: "Or drop files here. Uploading a file again replaces its documents." }),
    el(
      "div",
      { class: "ask-row", id: "upload-running", hidden: running === null },
      el("progress", { id: "upload-progress", max: "1", value: "0", "aria-label": "Upload" }),
      el("button", { type: "button", class: "quiet", id: "upload-cancel", text: "Cancel", onclick: () => running?.abort() }),
    ),
    el("p", { id: "documents-status", class: "hint", role: "status" }),
    el("ul", { id: "upload-failures", class: "failures" }),
  );
  zone.addEventListener("dragover", (event) => event.preventDefault());
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    send([...event.dataTransfer.files], changed);
  });
  return zone;
}

async function send(files, changed) {
  if (!files.length || running) return;
  const show = (text, share) => {
    if (byId("documents-status").textContent !== text) byId("documents-status").textContent = text;
    byId("upload-progress").value = share;
  };
  const begin = (on) => {
    byId("upload-running").hidden = !on;
    byId("files").disabled = on;
  };
  begin(true);
  show(`Sending ${count(files.length, "file")} \u2026`, 0);
  let results = [];
  try {
    results = await upload(files, show);
  } catch (error) {
    results = [{ name: "", error }];
  }
  running = null;
  begin(false);
  await changed().catch((error) => results.push({ name: "", error }));
  report(results);
}

/** Send files. Resolves to a result for each file. Aborting the request cancels the upload on the server too. */
function upload(files, show) {
  const form = new FormData();
  for (const file of files) form.append("file", file);
  return new Promise((resolve, reject) => {
    const sender = new XMLHttpRequest(); // fetch does not report how much was sent
    running = sender;
    let read = 0;
    let results = null;
    const take = (event) => {
      if (event.data) results = event.data;
      else if (event.error) reject(new ServerError(event.error.message, sender.status));
      else if (event.num_bytes_total) {
        const share = event.num_bytes_done / event.num_bytes_total;
        show(`Indexing, ${percent(share)}: ${count(event.num_chunks, "passage")}`, share);
      }
    };
    sender.upload.onprogress = ({ loaded, total }) => {
      if (total) show(loaded < total ? `Sending, ${size(loaded)} of ${size(total)}` : "Indexing \u2026", loaded / total);
    };
    sender.onprogress = () => {
      const end = sender.responseText.lastIndexOf("\n\n") + 1;
      const lines = sender.responseText.slice(read, end).split("\n");
      read = Math.max(read, end);
      if (sender.status !== 200) return;
      for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") take(JSON.parse(line.slice(6)));
    };
    sender.onload = () => {
      if (results) return resolve(results);
      let message = "The connection ended before the upload was complete.";
      if (sender.status !== 200) message = complaint(sender);
      reject(new ServerError(message, sender.status));
    };
    sender.onerror = () => reject(new ServerError("The connection broke before the upload was complete.", 0));
    sender.onabort = () => reject(new ServerError("The upload was cancelled.", 0));
    sender.open("POST", "v1/documents");
    sender.setRequestHeader("Accept", "text/event-stream");
    if (key()) sender.setRequestHeader("Authorization", `Bearer ${key()}`);
    sender.send(form);
  });
}

function complaint(sender) {
  try {
    return JSON.parse(sender.responseText).error.message;
  } catch {
    return `The server replied with status ${sender.status}.`;
  }
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
