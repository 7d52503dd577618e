// Creation of elements. Text is always inserted as text nodes; the console never parses HTML.

/** Create an element with children and attributes: `text` is its text, `on...` a listener; false and null are skipped. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

/** Draw a line through values (null is a gap) in a box of 100 x 30, scaled to the largest; `times` are their places. */
export function sparkline(values, label, times) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 30");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "sparkline");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  const largest = Math.max(...values.filter((value) => value !== null), 0);
  const places = times ?? values.map((_, index) => index);
  const width = Math.max(places.at(-1) - places[0], 1e-9);
  let path = "";
  let pen = "M";
  values.forEach((value, index) => {
    if (value === null) return;
    const height = largest ? 28 - (value / largest) * 25 : 28;
    path += `${pen}${((100 * (places[index] - places[0])) / width).toFixed(2)} ${height.toFixed(2)}`;
    pen = "L";
  });
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("d", path || "M0 28");
  line.setAttribute("vector-effect", "non-scaling-stroke");
  svg.append(line);
  return svg;
}
