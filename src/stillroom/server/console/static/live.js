// Live figures, computed from readings of /metrics two seconds apart.

import { getJson, getText } from "./api.js";
import { byId, el, sparkline } from "./dom.js";
import { engineTable } from "./engines.js";
import { count, duration, percent, size, trim } from "./format.js";

const PERIOD_MS = 2000;
const IDLE_PERIOD_MS = 10_000;
const KEPT_SECONDS = 600;

let readings = [];
let timer = null;

/** Read figures every two seconds until `stopLive`. */
export async function startLive() {
  every(PERIOD_MS);
  const own = timer;
  try {
    await read();
  } catch (error) {
    if (timer === own) every(null);
    throw error;
  }
}

/** Read figures less often while another view is open, so that Live has a history. */
export function stopLive() {
  every(readings.length ? IDLE_PERIOD_MS : null);
  byId("live-error").hidden = true;
}

/** Forget the figures, which another key may not see. */
export function forgetLive() {
  readings = [];
  every(null);
}

function every(period) {
  clearInterval(timer);
  const own = period && setInterval(() => {
    const isShown = period === PERIOD_MS;
    if (document.visibilityState === "visible") read().catch((error) => timer === own && isShown && showStale(error));
  }, period);
  timer = own;
}

/** Say that the figures shown are old. */
function showStale(error) {
  if (!byId("live-error").hidden) return;
  byId("live-error").textContent = `${error.message} These are the last figures received.`;
  byId("live-error").hidden = false;
}

async function read() {
  let text;
  try {
    text = await getText("metrics");
  } catch (error) {
    if (error.status !== 403) throw error;
    forgetLive();
    return showOwn(await getJson("v1/requests?limit=60"));
  }
  const reading = parse(text);
  reading.at = performance.now() / 1000;
  const before = readings.at(-1);
  if (before && before.stillroom_documents !== reading.stillroom_documents) {
    document.dispatchEvent(new Event("stillroom:documents"));
  }
  readings = [...readings.filter((one) => reading.at - one.at <= KEPT_SECONDS), reading];
  byId("live-error").hidden = true;
  if (!byId("view-live").hidden) show();
}

/** Parse Prometheus text: values by metric (summed over labels), and by metric with labels. */
export function parse(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const found = /^([a-z_]+)(\{.*\})? (\S+)$/.exec(line);
    if (!found) continue;
    const [, name, labels, value] = found;
    values[name] = (values[name] ?? 0) + Number(value);
    if (labels) values[name + labels] = Number(value);
  }
  return values;
}

/** Chunks kept in their document's context, and their bytes, in the tier that has most of them. */
export function prepared(reading) {
  const kept = ["device", "host", "disk"].map((tier) => ({
    tier,
    chunks: reading[`stillroom_kv_cache_prepared_chunks{tier="${tier}"}`] ?? 0,
    bytes: reading[`stillroom_kv_cache_prepared_bytes{tier="${tier}"}`] ?? 0,
  }));
  return kept.reduce((most, one) => (one.chunks >= most.chunks ? one : most));
}

const steps = (name) =>
  readings.slice(1).map((reading, index) => {
    const before = readings[index];
    return { seconds: reading.at - before.at, grown: Math.max((reading[name] ?? 0) - (before[name] ?? 0), 0) };
  });

/** Seconds covered by the readings, which begin when the view is opened. */
const seconds = () => Math.round(readings[readings.length - 1].at - readings[0].at);

const span = () => (seconds() < 120 ? count(seconds(), "second") : `${Math.floor(seconds() / 60)} minutes`);

const grown = (name) => steps(name).reduce((sum, step) => sum + step.grown, 0);

/** Ratios per interval; null if the denominator did not grow. */
function ratios(above, below) {
  const bottoms = steps(below);
  return steps(above).map((step, index) => (bottoms[index].grown ? step.grown / bottoms[index].grown : null));
}

/** Rates as means over five intervals, because answers are counted when they end. */
function rates(name) {
  const all = steps(name);
  return all.map((_, index) => {
    const window = all.slice(Math.max(index - 4, 0), index + 1);
    return window.reduce((sum, step) => sum + step.grown, 0) / window.reduce((sum, step) => sum + step.seconds, 0);
  });
}

function show() {
  const now = readings[readings.length - 1];
  byId("live-engines").replaceChildren(...[engineTable(now)].filter(Boolean));
  const of = (name) => now[name] ?? 0;
  const ttft = "stillroom_time_to_first_token_seconds";
  const answers = grown(`${ttft}_count`);
  const speed = rates("stillroom_generated_tokens_total");
  const prompt = of("stillroom_prompt_tokens_total");
  const used = of('stillroom_kv_blocks{state="used"}');
  const total = of("stillroom_kv_blocks");
  const active = readings.map((reading) => reading.stillroom_active_requests ?? 0);
  const kv = [
    tile(
      "Kept",
      prompt ? percent(of("stillroom_cached_tokens_total") / prompt) : "\u2013",
      "of prompt tokens since the start were reused",
      ratios("stillroom_cached_tokens_total", "stillroom_prompt_tokens_total"),
    ),
    tile(
      "KV memory",
      percent(used / total),
      `${used.toLocaleString("en")} of ${total.toLocaleString("en")} blocks in use`,
      readings.map((reading) => reading['stillroom_kv_blocks{state="used"}'] ?? 0),
    ),
  ];
  const most = prepared(now);
  const computed = of("stillroom_prepared_chunks_total");
  const ahead = tile(
    "Prepared",
    count(most.chunks, "passage"),
    `${size(most.bytes)} ${most.tier === "disk" ? "on disk" : `on the ${most.tier}`}, ${computed.toLocaleString("en")} computed since the start`,
    readings.map((reading) => prepared(reading).chunks),
  );
  byId("live").replaceChildren(
    tile(
      "First token",
      answers ? duration(grown(`${ttft}_sum`) / answers) : "\u2013",
      answers ? `mean of ${answers} in ${span()}` : seconds() ? `no answers in ${span()}` : "measured from now on",
      ratios(`${ttft}_sum`, `${ttft}_count`),
    ),
    tile(
      "Generated",
      `${trim(speed.length ? speed[speed.length - 1] : 0)} tokens/s`,
      `${of("stillroom_generated_tokens_total").toLocaleString("en")} tokens since the start`,
      speed,
    ),
    tile(
      "Requests",
      `${of('stillroom_active_requests{state="running"}')} running`,
      `${of('stillroom_active_requests{state="waiting"}')} waiting, ${of("stillroom_requests_total")} answered`,
      active,
    ),
    ...(total ? kv : []), // a reader keeps none
    ...(most.chunks || computed ? [ahead] : []),
    tile(
      "Documents",
      of("stillroom_documents").toLocaleString("en"),
      `${of("stillroom_chunks").toLocaleString("en")} passages`,
      null,
    ),
  );
}

/** Without an operator's key: figures of the caller's own requests. */
function showOwn(requests) {
  const latest = requests.map((one) => one.timing.ttft_seconds).reverse();
  const mean = latest.reduce((sum, seconds) => sum + seconds, 0) / latest.length;
  const tokens = (name) => requests.reduce((sum, one) => sum + one[name], 0);
  const prompt = tokens("num_prompt_tokens");
  byId("live-lead").textContent =
    `From your last ${count(requests.length, "request")}. Figures of the whole server need an operator's key.`;
  byId("live-engines").replaceChildren();
  byId("live").replaceChildren(
    tile("First token", latest.length ? duration(mean) : "\u2013", "mean", latest),
    tile("Kept", prompt ? percent(tokens("num_cached_tokens") / prompt) : "\u2013", "of prompt tokens were reused", null),
  );
}

function tile(name, value, detail, values) {
  return el(
    "div",
    { class: "tile" },
    el("h2", { text: name }),
    el("p", { class: "value", text: value }),
    el("p", { class: "hint", text: detail }),
    ...(values && values.length > 1 ? chart(values, name) : []),
  );
}

/** A line through values, by time where each belongs to an interval between readings. */
function chart(values, name) {
  const times = readings.slice(readings.length - values.length).map((reading) => reading.at);
  const isByTime = times.length === values.length;
  const ends = isByTime ? [`${duration(Math.round(times.at(-1) - times[0]))} ago`, "now"] : ["earlier", "latest"];
  return [
    sparkline(values, `${name} over time`, isByTime ? times : null),
    el("p", { class: "axis", "aria-hidden": "true" }, ...ends.map((text) => el("span", { text }))),
  ];
}
