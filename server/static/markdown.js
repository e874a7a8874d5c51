// Markdown as nodes. markdown-it only parses; its tokens become elements of a short list, so no text is ever markup.

import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";
import { button, copy, node } from "./dom.js";

const ELEMENTS = new Set([
  "p", "ul", "ol", "li", "blockquote", "em", "strong", "s", "table", "thead", "tbody", "tr", "th", "td", "hr", "br",
]);
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

const parser = new MarkdownIt({ html: false, linkify: false });

/** Make `root` show `text`. What is the same stays, and what goes on is only added to, so that focus and selections survive. */
export function show(text, root) {
  const fresh = document.createDocumentFragment();
  build(parser.parse(text, {}), fresh);
  become(root, fresh);
}

function become(old, fresh) {
  const before = [...old.childNodes];
  const after = [...fresh.childNodes];
  after.forEach((made, index) => {
    const was = before[index];
    if (!was) old.append(made);
    else if (was.isEqualNode(made)) return;
    else if (was.nodeType === Node.TEXT_NODE && made.data?.startsWith(was.data)) was.appendData(made.data.slice(was.length));
    else if (was.cloneNode(false).isEqualNode(made.cloneNode(false)) && made.hasChildNodes()) become(was, made);
    else was.replaceWith(made);
  });
  for (const gone of before.slice(after.length)) gone.remove();
}

function build(tokens, root) {
  const open = [root];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.nesting === -1) open.pop();
    else if (token.nesting === 1) {
      const made = opened(token);
      parent.append(made);
      open.push(made);
    } else if (token.type === "inline") build(token.children, parent);
    else parent.append(leaf(token));
  }
}

function opened(token) {
  if (token.type === "heading_open") return node("h3", { class: `size-${token.tag}` }); // below the page's own headings
  if (token.type === "link_open") return link(token.attrGet("href"));
  if (token.hidden || !ELEMENTS.has(token.tag)) return node("span"); // hidden: a tight list's paragraph
  return node(token.tag, { start: token.tag === "ol" ? token.attrGet("start") : null });
}

function leaf(token) {
  switch (token.type) {
    case "fence":
    case "code_block":
      return code(token.content, token.info.trim().split(/\s+/)[0]);
    case "code_inline":
      return node("code", {}, token.content);
    case "image": // never loaded: its address would tell others what is read here
      return link(token.attrGet("src"), `image: ${token.content || token.attrGet("src")}`);
    case "softbreak":
      return document.createTextNode("\n");
    case "hardbreak":
      return node("br");
    case "hr":
      return node("hr");
    default:
      return document.createTextNode(token.content);
  }
}

function link(target, ...children) {
  let scheme = "";
  try {
    scheme = new URL(target).protocol;
  } catch {
    // A relative one leads nowhere: the model does not know where this page is.
  }
  if (!SCHEMES.has(scheme)) return node("span", {}, ...children);
  return node("a", { href: target, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

function code(content, language) {
  const read = (event) => copy(event.target.closest(".code").querySelector("code").textContent); // it may have grown
  const bar = node("div", { class: "code-bar" }, node("span", {}, language || "code"), button("Copy", read));
  return node("div", { class: "code" }, bar, node("pre", { tabindex: "0", role: "group", "aria-label": "Code" }, node("code", {}, content)));
}
