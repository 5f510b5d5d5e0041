// Markdown within a paragraph: emphasis, code and links. Linear, as the blocks are.

import { h } from "./dom.js";

/** Characters of a paragraph in which emphasis and links are found. */
const PARAGRAPH = 20_000;
/** Emphasis within emphasis. */
const OPEN = 16;

const TOKEN = /\\[!-/:-@[-`{-~]|`+|\*{1,3}|__?|~~|!?\[|https?:\/\//g;
const LINK =
  /!?\[([^[\]\n]{1,500})\]\(<?(https?:\/\/(?:[^\s()<>]|\([^\s()<>]{0,200}\)){1,1000})>?(?:\s{1,9}"[^"\n]{0,200}")?\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`\\|*[\]]{1,1000}/y;
const WORD = /[\p{L}\p{N}]/u;
const EMPHASIS = {
  "*": (nodes) => h("em", {}, nodes),
  _: (nodes) => h("em", {}, nodes),
  "**": (nodes) => h("strong", {}, nodes),
  __: (nodes) => h("strong", {}, nodes),
  "***": (nodes) => h("strong", {}, h("em", {}, nodes)),
  "~~": (nodes) => h("del", {}, nodes),
};

/** Returns the emphasis, code and links within a paragraph, as nodes and texts. */
export function inline(text, canLink = true) {
  if (text.length > PARAGRAPH) return [text];
  const token = new RegExp(TOKEN);
  const open = [{ mark: "", nodes: [] }];
  const unclosed = new Set();
  const put = (...nodes) => open.at(-1).nodes.push(...nodes);
  const flatten = () => {
    const { mark, nodes } = open.pop();
    put(mark, ...nodes);
  };
  let done = 0;
  for (let found = token.exec(text); found; found = token.exec(text)) {
    const { 0: mark, index } = found;
    let end = index + mark.length;
    put(text.slice(done, index));
    if (mark[0] === "\\") put(mark[1]);
    else if (mark[0] === "`") {
      const close = unclosed.has(mark) ? -1 : closing(text, mark, end);
      if (close < 0) unclosed.add(mark);
      put(close < 0 ? mark : h("code", {}, text.slice(end, close)));
      if (close >= 0) end = close + mark.length;
    } else if (mark.endsWith("[") || mark.endsWith("/")) {
      const [node, length] = (canLink && link(text, index)) || [mark, mark.length];
      put(node);
      end = index + length;
    } else {
      const [before, after] = [text[index - 1] ?? " ", text[end] ?? " "];
      const isInWord = (letter) => WORD.test(letter) && (mark[0] === "_" || mark === "*");
      const place =
        /\s/.test(before) || (mark[0] === "_" && isInWord(after))
          ? -1
          : open.findLastIndex((one) => one.mark === mark && one.nodes.some(Boolean));
      if (place > 0) {
        while (open.length - 1 > place) flatten();
        const { nodes } = open.pop();
        put(EMPHASIS[mark](nodes));
      } else if (open.length < OPEN && !/\s/.test(after) && !isInWord(before))
        open.push({ mark, nodes: [] });
      else put(mark);
    }
    done = end;
    token.lastIndex = end;
  }
  put(text.slice(done));
  while (open.length > 1) flatten();
  return open[0].nodes;
}

/** Returns where the code that `mark` opens is closed, by as many backticks: -1 if it is not. */
function closing(text, mark, from) {
  for (let at = text.indexOf(mark, from); at >= 0; at = text.indexOf(mark, at)) {
    let end = at;
    while (text[end] === "`") end += 1;
    if (end - at === mark.length) return at;
    at = end;
  }
  return -1;
}

/**
 * Returns the link at `index`, an element and how long its text is. Links lead to pages of the web,
 * in a tab of their own.
 */
function link(text, index) {
  LINK.lastIndex = ADDRESS.lastIndex = index;
  const named = LINK.exec(text);
  const bare = named ? null : ADDRESS.exec(text)?.[0].replace(/[.,;:!?]{1,9}$/, "");
  const address = named ? named[2] : bare?.includes("(") ? bare : bare?.replace(/\).{0,9}$/, "");
  if (!address || !URL.canParse(address)) return null;
  const label = named ? inline(named[1], false) : [address];
  return [
    h("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, label),
    named ? named[0].length : address.length,
  ];
}
