// HTTP client: JSON, event streams, the server's error messages, and the API key of this tab.

const KEY = "stillroom-key";

/** An error reply; `message` is the server's. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function key() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function setKey(value) {
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // storage is disabled: the key is not remembered
  }
}

/** Send a request, relative to the page, so that it works below a proxy's path. Throws ServerError. */
export async function request(path, options = {}) {
  const headers = { ...options.headers };
  const used = key();
  if (used) headers.Authorization = `Bearer ${used}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?", 0);
  }
  if (response.ok) return response;
  const message = await complaint(response);
  if (response.status === 401 && used === key()) { // not for a key that was replaced meanwhile
    const detail = used ? message : ""; // no error text if no key was given yet
    document.dispatchEvent(new CustomEvent("stillroom:unauthorised", { detail }));
  }
  throw new ServerError(message, response.status);
}

export const getJson = async (path) => (await request(path)).json();

export const getText = async (path) => (await request(path)).text();

async function complaint(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server replied with status ${response.status}.`;
  }
}

/** Yield the events of a streamed answer as objects. Throws ServerError at an error event, or if the end is missing. */
export async function* answerEvents(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  for await (const data of dataLines(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(event.error.message, response.status);
    yield event;
  }
  throw new ServerError("The connection ended before the answer was complete.", 0);
}

function broken(error) {
  if (error.name === "AbortError") throw error;
  throw new ServerError("The connection broke before the answer was complete.", 0);
}

async function* dataLines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(broken);
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}
