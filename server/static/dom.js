// Small helpers to build nodes. Text becomes text nodes: nothing here, and nothing in this page, parses markup.

export const byId = (id) => document.getElementById(id);

export function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export const button = (label, onclick, attributes = {}) => node("button", { type: "button", onclick, ...attributes }, label);

/** Make `text` the text of `element`. What goes on is only added to, so that a selection survives, and an alert is not read out again. */
export function say(element, text) {
  const said = element.textContent;
  if (said === text) return;
  if (said && text.startsWith(said)) element.lastChild.appendData(text.slice(said.length));
  else element.textContent = text;
}

/** Show `shown` in the place of `hidden`, which hands its focus on. */
export function swap(hidden, shown) {
  const isFocused = document.activeElement === hidden;
  shown.hidden = false;
  hidden.hidden = true;
  if (isFocused) shown.focus();
}

export function announce(text) {
  byId("announce").textContent = text;
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Over plain HTTP from another machine browsers have no clipboard for pages.
    const area = node("textarea", { class: "unseen" });
    const focused = document.activeElement;
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    focused.focus({ preventScroll: true });
  }
  announce("Copied");
}
