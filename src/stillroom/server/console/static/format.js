// Formatting of numbers, sizes, times and paths, as on the command line.

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "unknown";
  if (seconds < 0.0005) return "0 ms";
  if (seconds < 1) return `${trim(seconds * 1000)} ms`;
  if (seconds < 60) return `${trim(seconds)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

export const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

export function percent(share) {
  if (share > 0 && share < 0.001) return "< 0.1 %";
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let value = bytes;
  while (value >= 1024 && units.length > 1) {
    value /= 1024;
    units.shift();
  }
  return `${trim(value)} ${units[0]}`;
}

export const moment = (seconds) =>
  new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });

/** Round to at most three significant digits. */
export const trim = (value) => (value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(value < 10 ? 2 : 3))));

/** Split a path into folder and file name. */
export function splitPath(path) {
  const cut = path.lastIndexOf("/") + 1;
  return { folder: path.slice(0, cut), name: path.slice(cut) };
}
