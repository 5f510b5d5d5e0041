// Markdown of replies as elements: headings, lists, quotes, tables and fenced code. Text is never
// markup.
//
// Every pass is linear: a reply may be anything, and is drawn again while it streams. What is
// beyond a limit stays text.

import { h, code } from "./dom.js";
import { inline } from "./inline.js";

/** Characters of a text that is read as Markdown. */
const TEXT = 200_000;
/** Quotes and lists within each other. */
const DEPTH = 8;
/** Columns of a table. */
const COLUMNS = 40;

const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;

/**
 * Returns the blocks of a text as `{key, make}`: a block with the same key as before is the same
 * element.
 */
export function blocks(source) {
  return source.length > TEXT
    ? [{ key: source, make: () => h("p", { class: "pre" }, source) }]
    : split(source.split("\n"), 0);
}

/**
 * Each finds a block that begins at line `i`: null, or the line behind it and how its element is
 * made.
 */
const KINDS = [fence, heading, rule, quote, list, table];

function split(lines, depth) {
  const found = [];
  const find = (i) =>
    depth < DEPTH && KINDS.reduce((block, kind) => block ?? kind(lines, i, depth + 1), null);
  for (let i = 0; i < lines.length;) {
    const first = i;
    let [end, make] = find(i) || [i, null];
    if (!make) {
      while (end < lines.length && lines[end].trim() && (end === first || !find(end))) end += 1;
      const text = lines.slice(first, end).join("\n");
      make = text && (() => h("p", { class: "pre" }, inline(text)));
    }
    if (make) found.push({ key: lines.slice(first, end).join("\n"), make });
    i = Math.max(end, first + 1);
  }
  return found;
}

const nested = (lines, depth) => split(lines, depth).map(({ make }) => make());

function fence(lines, i) {
  const [, mark] = lines[i].match(/^ {0,3}(`{3,}|~{3,})/) ?? [];
  if (!mark) return null;
  const language = lines[i].trim().slice(mark.length).trim();
  if (language.includes("`")) return null;
  const isEnd = (line) => line.startsWith(mark) && [...line].every((letter) => letter === mark[0]);
  let end = i + 1;
  while (end < lines.length && !isEnd(lines[end].trim())) end += 1;
  return [
    Math.min(end + 1, lines.length),
    () => code(language.slice(0, 40), lines.slice(i + 1, end).join("\n")),
  ];
}

function heading(lines, i) {
  const [mark, { length } = ""] = lines[i].match(/^ {0,3}(#{1,6})[ \t]+/) ?? [];
  // The page has the first level, its parts the second.
  return mark
    ? [
        i + 1,
        () => h(`h${Math.min(length + 2, 6)}`, {}, inline(lines[i].slice(mark.length).trim())),
      ]
    : null;
}

function rule(lines, i) {
  return /^([-*_])(?: *\1){2,}$/.test(lines[i].trim()) ? [i + 1, () => h("hr")] : null;
}

function quote(lines, i, depth) {
  let end = i;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
  return end > i
    ? [
        end,
        () =>
          h(
            "blockquote",
            {},
            nested(
              lines.slice(i, end).map((line) => line.replace(/^ {0,3}> ?/, "")),
              depth,
            ),
          ),
      ]
    : null;
}

function list(lines, i, depth) {
  const first = lines[i].match(ITEM);
  if (!first) return null;
  const isNumbered = /\d/.test(first[2]);
  const indent = first[1].length;
  const items = [];
  let end = i;
  for (let width = 0; end < lines.length; end += 1) {
    const line = lines[end];
    const item = line.match(ITEM);
    const space = line.length - line.trimStart().length;
    if (item && space >= indent && space <= indent + 1) {
      if (/\d/.test(item[2]) !== isNumbered || rule(lines, end)) break;
      width = item[0].length;
      items.push([line.slice(width)]);
    } else if (!line.trim()) items.at(-1).push("");
    else if (space > indent) items.at(-1).push(line.slice(Math.min(space, width)));
    else break;
  }
  const start = isNumbered ? parseInt(first[2], 10) : null;
  return [
    end,
    () =>
      h(
        isNumbered ? "ol" : "ul",
        { start },
        items.map((item) => h("li", {}, nested(item, depth))),
      ),
  ];
}

const cells = (line) =>
  line
    .trim()
    .replace(/^\|/, "")
    .replace(/\|$/, "")
    .split(/(?<!\\)\|/)
    .map((cell) => cell.trim());

function table(lines, i) {
  if (!lines[i].includes("|") || !lines[i + 1]?.includes("-")) return null;
  const head = cells(lines[i]);
  const marks = cells(lines[i + 1]);
  if (
    head.length > COLUMNS ||
    marks.length !== head.length ||
    !marks.every((mark) => /^:?-+:?$/.test(mark))
  )
    return null;
  let end = i + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const line = (texts, tag, props) =>
    h(
      "tr",
      {},
      texts
        .slice(0, head.length)
        .map((text, column) =>
          h(tag, { ...props, class: marks[column].endsWith(":") ? "right" : null }, inline(text)),
        ),
    );
  return [
    end,
    () =>
      h(
        "div",
        { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" },
        h(
          "table",
          {},
          h("thead", {}, line(head, "th", { scope: "col" })),
          h(
            "tbody",
            {},
            lines.slice(i + 2, end).map((row) => line(cells(row), "td", {})),
          ),
        ),
      ),
  ];
}
