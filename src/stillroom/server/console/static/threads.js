// Conversations, kept in this browser for each server and API key. They are never sent anywhere.

import { key } from "./api.js";

const PREFIX = "stillroom-thread";

let kept = new Map(); // the conversations of the key in use, by id
let store = null;
let owner = "";

/** Load the conversations of the API key in use. Only a hash of the key is stored. */
export async function openThreads() {
  const text = `${location.origin}${location.pathname}\n${key()}`;
  try {
    // browsers hash only on pages from https or from this machine; elsewhere conversations last as long as the tab
    store = crypto.subtle ? localStorage : sessionStorage;
    owner = `${PREFIX}:${crypto.subtle ? await hash(text) : "tab"}:`;
  } catch {
    store = null; // storage is disabled: conversations last as long as the page
  }
  load();
}

async function hash(text) {
  const bytes = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text)));
  return [...bytes.slice(0, 16)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function load() {
  kept = new Map();
  for (const name of Object.keys(store ?? {}).filter((name) => name.startsWith(owner))) {
    try {
      const thread = JSON.parse(store.getItem(name));
      if (Array.isArray(thread.turns)) kept.set(name.slice(owner.length), thread);
    } catch {
      store.removeItem(name); // not written by this page
    }
  }
}

addEventListener("storage", (event) => {
  if (!event.key?.startsWith(owner)) return; // another tab changed a conversation
  load();
  document.dispatchEvent(new Event("stillroom:threads"));
});

export const newThread = () => ({ id: `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`, turns: [] });

export const thread = (id) => kept.get(id) ?? null;

/** Conversations that contain all words of `query`, latest first. */
export function findThreads(query = "") {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const text = ({ turns }) => turns.map((turn) => `${turn.question}\n${turn.text}`).join("\n").toLowerCase();
  const found = [...kept.values()].filter((one) => words.every((word) => text(one).includes(word)));
  return found.sort((a, b) => b.at - a.at);
}

/** Keep a conversation. If the browser's space is used up, the oldest ones are removed. */
export function keepThread(one) {
  one.at = Date.now();
  kept.set(one.id, one);
  while (store) {
    try {
      store.setItem(owner + one.id, JSON.stringify(one));
      break;
    } catch {
      const oldest = findThreads().at(-1);
      if (oldest === one) break;
      dropThreads([oldest.id]);
    }
  }
  document.dispatchEvent(new Event("stillroom:threads"));
}

export function dropThreads(ids) {
  for (const id of ids) {
    kept.delete(id);
    store?.removeItem(owner + id);
  }
  document.dispatchEvent(new Event("stillroom:threads"));
}
