// Small charts over time, as SVG lines.

import { h, svg, text, time } from "./dom.js";

const [WIDTH, HEIGHT] = [300, 80];
/** Room above the highest value, where it is written. */
const TOP = 22;

/** The middle one of some numbers, or null. */
function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

/**
 * A chart of one quantity. `format` writes a value. `draw(points, from, to)` shows points `{at,
 * value}` between two times in seconds since 1970.
 */
export function chart(name, format) {
  const path = svg("path", { class: "line" });
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
      [3 + ((WIDTH - 6) * (at - from)) / span, HEIGHT - 3 - ((HEIGHT - 3 - TOP) * value) / (highest || 1)]
        .map((place) => place.toFixed(1))
        .join(" "),
    );
    // A line of no length with round ends is a dot: one sample is seen, too.
    path.setAttribute("d", places.map((place, i) => (i ? `L${place}` : `M${place}h0.01`)).join(""));
    text(words, values.length ? `median ${format(median(values))}` : "nothing yet");
    text(most, values.length ? format(highest) : "");
    text(first, time(from));
    text(last, time(to));
  }
  return { element, draw };
}

/** Seconds of samples that are shown, and between two readings of them. */
const SHOWN_S = 7200;
const READ_S = 10;

/**
 * The samples of the server, `GET /v1/history`: the server keeps two hours of them, so that a page
 * that is opened or reloaded has them at once. Views share this one.
 */
export const samples = {
  list: [],
  read: 0,
  /** Returns the samples, oldest first, with what `get(path)` has of newer ones. */
  async newest(get) {
    const now = performance.now() / 1000;
    if (this.list.length && now - this.read < READ_S) return this.list;
    const { samples: newer } = await get(`/v1/history?after=${this.list.at(-1)?.at ?? 0}`);
    this.read = now;
    // Another turn may have read the same meanwhile.
    const last = this.list.at(-1)?.at ?? 0;
    const all = [...this.list, ...newer.filter(({ at }) => at > last)];
    this.list = all.filter(({ at }) => at > all.at(-1).at - SHOWN_S);
    return this.list;
  },
};
