// Views, theme, API key, and the line that names model and document count.

import { getJson, key, setKey } from "./api.js";
import { leave, showAsk, start } from "./ask.js";
import { showDocuments } from "./documents.js";
import { byId, el } from "./dom.js";
import { count } from "./format.js";
import { forgetLive, startLive, stopLive } from "./live.js";
import { showReading } from "./reading.js";
import { showRequest, showRequests } from "./requests.js";
import { startThreadList } from "./thread_list.js";
import { openThreads } from "./threads.js";

const VIEWS = {
  ask: showAsk,
  requests: showRequests,
  request: showRequest,
  documents: showDocuments,
  read: showReading,
  live: startLive,
};

async function route({ moves = true } = {}) {
  const [first, ...rest] = location.hash.slice(1).split("/").map(decodeURIComponent);
  const name = first === "requests" && rest[0] ? "request" : Object.hasOwn(VIEWS, first) && first !== "request" ? first : "ask";
  stopLive();
  for (const other of Object.keys(VIEWS)) byId(`view-${other}`).hidden = other !== name;
  const current = { request: "requests", read: "documents" }[name] ?? name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${current}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = name === "ask" ? "Stillroom" : `${byId(`${name}-title`).textContent} \u2013 Stillroom`;
  if (name === "ask" && !rest[0]) byId("question").focus({ preventScroll: true });
  else if (moves) byId("main").focus({ preventScroll: true });
  try {
    await VIEWS[name](...rest);
  } catch (error) {
    (byId(name) ?? byId("earlier")).replaceChildren(el("p", { class: "notice", role: "alert", text: error.message }));
  }
}

const lead = byId("ask-lead").textContent;

async function showServing() {
  try {
    const [models, health] = await Promise.all([getJson("v1/models"), getJson("healthz")]);
    const documents = health.documents === undefined ? [] : [count(health.documents, "document")]; // operators only
    byId("serving").textContent = [models.data[0].id, ...documents].join(", ");
    byId("ask-lead").textContent = lead;
    if (health.documents === 0)
      byId("ask-lead").replaceChildren(
        "There are no documents yet. ",
        el("a", { href: "#documents", text: "Add some here" }),
        " or with ",
        el("code", { text: "stillroom add PATH --kb DIR" }),
        ".",
      );
  } catch {
    byId("serving").textContent = "";
  }
}

function startTheme() {
  const button = byId("theme-button");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const name = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
  };
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("stillroom-theme", theme);
    } catch {
      // storage is disabled: the choice lasts as long as the page
    }
    name();
  });
  system.addEventListener("change", name);
  name();
}

function startKey() {
  const dialog = byId("key-dialog");
  const open = (problem) => {
    byId("key-button").hidden = false;
    if (!dialog.open) {
      byId("key").value = key();
      dialog.showModal();
    } // do not overwrite a key that is being typed
    byId("key-error").textContent = problem; // set in the open dialog, so that screen readers announce it
    byId("key-error").hidden = !problem;
  };
  const use = (value) => {
    setKey(value);
    dialog.close();
    forgetLive();
    leave();
    document.dispatchEvent(new Event("stillroom:documents"));
    openThreads().then(() => route());
  };
  byId("key-button").hidden = !key();
  byId("key-button").addEventListener("click", () => open(""));
  byId("key-forget").addEventListener("click", () => use(""));
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    use(byId("key").value.trim());
  });
  document.addEventListener("stillroom:unauthorised", (event) => open(event.detail));
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
document.addEventListener("stillroom:documents", showServing);
addEventListener("hashchange", () => route());
startTheme();
startKey();
start();
startThreadList();
showServing();
openThreads().then(() => route({ moves: false }));
