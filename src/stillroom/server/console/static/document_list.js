// All documents of the knowledge base, read page by page.

import { getJson } from "./api.js";

const PAGE = 1000;

let known = null;

document.addEventListener("stillroom:documents", () => (known = null));

/** All documents, as `GET /v1/documents` describes them; kept until one of them changes. */
export function allDocuments() {
  known ??= read().catch((error) => {
    known = null;
    throw error;
  });
  return known;
}

async function read() {
  const found = [];
  for (let page = null; page === null || page.has_more; ) {
    const after = page ? `&after=${encodeURIComponent(page.last_id)}` : "";
    page = await getJson(`v1/documents?limit=${PAGE}${after}`);
    found.push(...page.data);
  }
  return found;
}
