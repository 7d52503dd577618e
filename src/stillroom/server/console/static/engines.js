// The engines of a front, or the servers of a remote engine: one table, from a reading of /metrics.

import { el } from "./dom.js";
import { duration, percent, size } from "./format.js";

const TIERS = { device: "device", host: "host", disk: "disk", network: "KV tier" };
const COLUMNS = ["Engine", "State", "Starts", "Requests", "Queue", "KV reused", "KV kept", "Blocks in use", "First token", "Predicted"];

/** Labels of a series, such as `{engine="http://a:9100",tier="host"}`. */
const labels = (text) =>
  Object.fromEntries([...text.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, name, value]) => [name, value]));

/** Engines by address: name, whether they get requests, and the values of their series. */
export function enginesOf(reading) {
  const found = new Map();
  for (const [series, value] of Object.entries(reading)) {
    const [, name, text] = /^stillroom_engine_(\w+)(\{.*\})$/.exec(series) ?? [];
    if (!name) continue;
    const own = labels(text);
    const engine = found.get(own.engine) ?? { address: own.engine };
    found.set(own.engine, engine);
    if (name === "alive") Object.assign(engine, { name: own.name, isAlive: value === 1 });
    else engine[[name, own.tier ?? own.state].filter(Boolean).join(":")] = value;
  }
  return [...found.values()];
}

/** The table; null if the server has no engines elsewhere. */
export function engineTable(reading) {
  const engines = enginesOf(reading);
  if (!engines.length) return null;
  return el(
    "section",
    { class: "account" },
    el("h2", { id: "engines-title", text: "Engines" }),
    el("p", {
      class: "hint",
      text: "State, requests, queue and KV as each last reported; the rest since this server started, for its own requests.",
    }),
    el(
      "table",
      { class: "rows wide", "aria-labelledby": "engines-title" },
      el("thead", {}, el("tr", {}, ...COLUMNS.map((text) => el("th", { scope: "col", text })))),
      el("tbody", {}, ...engines.map(row)),
    ),
  );
}

function row(engine) {
  const known = (name, shown) => (engine[name] === undefined ? "\u2013" : shown(engine[name]));
  const mean = (name) => (engine.first_tokens_total ? duration(engine[name] / engine.first_tokens_total) : "\u2013");
  const kept = Object.keys(TIERS).filter((tier) => engine[`kept_bytes:${tier}`]);
  const blocks = engine["kv_blocks:used"] + engine["kv_blocks:free"];
  const cells = [
    engine.isAlive ? "gets requests" : "no requests; the log says why",
    known("runs_total", (number) => number.toLocaleString("en")),
    known("outstanding_requests", (number) => number.toLocaleString("en")),
    known("queue_seconds", duration),
    engine.prompt_tokens_total ? percent(engine.cached_tokens_total / engine.prompt_tokens_total) : "\u2013",
    kept.map((tier) => `${size(engine[`kept_bytes:${tier}`])} ${TIERS[tier]}`).join(", ") || "\u2013",
    blocks ? percent(engine["kv_blocks:used"] / blocks) : "\u2013",
    mean("first_token_seconds_total"),
    mean("predicted_first_token_seconds_total"),
  ];
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, engine.address, el("small", { text: ` ${engine.name}` })),
    ...cells.map((text, at) => el("td", { "data-label": COLUMNS[at + 1], text })),
  );
}
