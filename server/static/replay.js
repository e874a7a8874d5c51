// A finished race as one HTML file that needs nothing else: style, player and data are inside, and it asks no network.

const POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"; // all that is inline is ours

/** The file's text. `read(path)` gives the text of one of this page's own files. */
export async function replayPage(race, read) {
  const names = ["theme.css", "race.css", "follow.js", "player.js"];
  const [theme, style, follow, player] = await Promise.all(names.map((name) => read(`playground/${name}`)));
  const script = follow + player.replace(/^import .*$/gm, ""); // of each other they know by being one file
  const data = JSON.stringify(race).replaceAll("<", "\\u003c"); // so that no text of a model ends the script
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="${POLICY}">
<title>A race of HAMburger Serve</title>
<style>
${theme}
${style}
</style>
</head>
<body class="replay">
<main>
<h1>A race of HAMburger Serve</h1>
<p id="prompt"></p>
<p><button type="button" id="replay">Replay</button>
<label>Speed <select id="speed"><option value="1">as it was</option><option value="0.5">half</option>
<option value="0.25" selected>a quarter</option><option value="0.1">a tenth</option></select></label></p>
<div id="lanes" class="lanes"></div>
<p id="verdict" class="verdict"></p>
</main>
<script type="application/json" id="race">${data}</script>
<script type="module">
${script}
const race = JSON.parse(document.getElementById("race").textContent);
const lanes = new Lanes(document.getElementById("lanes"), race.lanes);
document.getElementById("prompt").textContent = race.prompt;
document.getElementById("verdict").textContent = race.verdict;
let running = new AbortController();
const start = () => {
  running.abort();
  running = new AbortController();
  play(lanes, race, Number(document.getElementById("speed").value), running.signal);
};
document.getElementById("replay").addEventListener("click", start);
start();
</script>
</body>
</html>
`;
}

export function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/html" }));
  const anchor = document.createElement("a");
  anchor.href = address;
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
