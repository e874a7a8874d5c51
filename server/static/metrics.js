// Prometheus text as samples. Knows no page.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** [{name, labels, value}] of a page of metrics. */
export function samples(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) labels[name] = value.replaceAll(/\\(.)/g, "$1");
    found.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return found;
}

/** Names of the models whose groups are composed. */
export function composedModels(text) {
  const shapes = samples(text).filter(({ name, labels }) => name === "hamburger_cache_config_info" && labels.groups === "composed");
  return new Set(shapes.map(({ labels }) => labels.model_name));
}
