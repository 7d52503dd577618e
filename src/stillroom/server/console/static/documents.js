// What is indexed.

import { getJson, getText } from "./api.js";
import { byId, el } from "./dom.js";
import { count } from "./format.js";
import { parse } from "./live.js";

export async function showDocuments() {
  const [health, metrics] = await Promise.all([getJson("healthz"), getText("metrics").then(parse)]);
  byId("documents-lead").textContent =
    `${count(health.documents, "document")} in ${count(metrics.stillroom_chunks ?? 0, "passage")}.`;
  byId("documents").replaceChildren(
    el("p", { class: "hint" }, "Add more with ", el("code", { text: "stillroom add PATH --kb DIR" }), "."),
  );
}
