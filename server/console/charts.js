// Small charts over time, as SVG: dots for requests, lines for samples.

import { h, svg, text, time } from "./dom.js";

const [WIDTH, HEIGHT] = [300, 80];

/** The middle one of some numbers, or null. */
function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

/**
 * A chart of one quantity. `format` writes a value. `draw(points, from, to)` shows points `{at,
 * value}` between two times in
 * seconds since 1970; `isLine` joins them.
 */
export function chart(name, format, isLine = false) {
  const path = svg("path", { class: isLine ? "line" : "dots" });
  const picture = svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      class: "plot",
      "aria-hidden": "true",
    },
    path,
  );
  const [words, most, first, last] = ["span", "span", "span", "span"].map((tag) =>
    h(tag, { class: "muted small" }),
  );
  const element = h(
    "figure",
    { class: "card chart" },
    h("figcaption", { class: "row" }, h("span", { class: "strong" }, name), words),
    h("div", { class: "plot-box" }, most, picture),
    h("div", { class: "row" }, first, last),
  );

  function draw(points, from, to) {
    const values = points.map(({ value }) => value);
    const highest = Math.max(...values, 0);
    const span = Math.max(to - from, 1);
    const places = points.map(({ at, value }) =>
      [3 + ((WIDTH - 6) * (at - from)) / span, HEIGHT - 3 - ((HEIGHT - 6) * value) / (highest || 1)]
        .map((place) => place.toFixed(1))
        .join(" "),
    );
    // A line of no length with round ends is a dot, also where the picture is stretched.
    path.setAttribute(
      "d",
      isLine
        ? places.map((place, i) => `${i ? "L" : "M"}${place}`).join("")
        : places.map((place) => `M${place}h0.01`).join(""),
    );
    text(words, values.length ? `median ${format(median(values))}` : "nothing yet");
    text(most, values.length ? format(highest) : "");
    text(first, time(from));
    text(last, time(to));
  }
  return { element, draw };
}

/**
 * Samples of the last quarter of an hour, taken once a second while the view of requests is open.
 */
export class Samples {
  #points = [];

  add(value) {
    const at = Date.now() / 1000;
    this.#points.push({ at, value });
    while (this.#points[0].at < at - 900) this.#points.shift();
  }

  points() {
    return this.#points;
  }
}
