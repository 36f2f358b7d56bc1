const HUES = [168, 28, 232, 328, 96, 268, 200, 52];
const LETTERS = "ABCDEFGH";
const colour = (chunk) => `light-dark(hsl(${HUES[chunk]} 65% 31%), hsl(${HUES[chunk]} 55% 64%))`;
const SIZE = 300, CENTRE = 150, RADIUS = 104;
let numDone = 0;
let timer = 0;

const ranks = () => Number($("ranks").value);
const place = (turn, radius) => {
  const angle = 2 * Math.PI * turn - Math.PI / 2;
  return [CENTRE + radius * Math.cos(angle), CENTRE + radius * Math.sin(angle)];
};

function drawRing(n, step) {
  const svg = make("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, role: "img", "aria-label": "The ring, with the chunks under way" });
  const isCrowded = n > 5; // then arrows are short: smaller ranks, and the chunks outside of the ring
  const node = isCrowded ? 17 : 21, chips = isCrowded ? RADIUS + 25 : RADIUS;
  const gap = (node + 5) / (2 * Math.PI * RADIUS);
  for (let rank = 0; rank < n; rank += 1) {
    const [begin, end] = [rank / n + gap, (rank + 1) / n - gap - 0.012];
    const [[ax, ay], [bx, by]] = [place(begin, RADIUS), place(end, RADIUS)];
    const large = end - begin > 0.5 ? 1 : 0;
    const used = step ? " used" : "";
    svg.append(make("path", { class: `way${used}`, d: `M${ax} ${ay} A${RADIUS} ${RADIUS} 0 ${large} 1 ${bx} ${by}` }));
    const angle = 2 * Math.PI * end;
    const [tx, ty] = place(end + 0.012, RADIUS);
    const wing = (turn) => `${tx - 11 * Math.cos(angle + turn)} ${ty - 11 * Math.sin(angle + turn)}`;
    svg.append(make("path", { d: `M${tx} ${ty} L${wing(0.45)} L${wing(-0.45)} Z`, fill: step ? "var(--accent)" : "var(--line)" }));
  }
  for (let rank = 0; rank < n; rank += 1) {
    const [x, y] = place(rank / n, RADIUS);
    svg.append(make("circle", { class: "rank", cx: x, cy: y, r: node }), make("text", { x, y }, String(rank)));
  }
  for (const { from, chunk } of step ? step.moves : []) {
    const [x, y] = place((from + 0.5) / n, chips);
    svg.append(
      make("rect", { class: "chip", x: x - 11, y: y - 11, width: 22, height: 22, rx: 5, style: `fill: ${colour(chunk)}` }),
      make("text", { x, y }, LETTERS[chunk]),
    );
  }
  $("ring").replaceChildren(svg);
}

function drawGrid(n, step) {
  const held = holdings(n, numDone);
  const head = make("tr", {}, make("th"));
  for (let chunk = 0; chunk < n; chunk += 1) {
    head.append(make("th", { scope: "col" }, make("span", { class: "chunk", style: `--of: ${colour(chunk)}` }, LETTERS[chunk])));
  }
  const rows = held.map((chunks, rank) => {
    const row = make("tr", {}, make("th", { class: "rank", scope: "row" }, innerWidth < 480 ? `${rank}` : `rank ${rank}`));
    chunks.forEach((from, chunk) => row.append(cell(n, rank, chunk, from, step)));
    return row;
  });
  $("grid").replaceChildren(head, ...rows);
}

function cell(n, rank, chunk, from, step) {
  const moves = step ? step.moves : [];
  const names = [];
  if (moves.some((move) => move.from === rank && move.chunk === chunk)) names.push("sends");
  if (moves.some((move) => move.to === rank && move.chunk === chunk)) names.push("gets");
  if (from.length === n) names.push("whole");
  const marks = make("span", { class: "in", style: `--of: ${colour(chunk)}`, "aria-hidden": "true" });
  for (let each = 0; each < n; each += 1) marks.append(make("i", from.includes(each) ? { class: "is" } : {}));
  const title = `chunk ${LETTERS[chunk]}: sum of ${from.length === n ? "all ranks" : `rank ${from.join(" + ")}`}`;
  return make("td", { class: names.join(" "), title }, from.length === n ? "✓" : from.length === 1 ? "\u00a0" : `${from.length}`, marks);
}

function told(n, step) {
  if (!step) return `Begin: every rank has its own values, in ${n} chunks. Nothing has been sent.`;
  const example = step.moves[0];
  const what = step.part === "reduce-scatter"
    ? "each rank sends one chunk to its right, and adds the one that arrives to its own"
    : "the finished chunks go round, and are copied instead of added";
  const end = numDone === 2 * (n - 1) ? " Every rank has the whole sum." : step.part === "reduce-scatter" && step.number === n - 1
    ? " Each rank now has one chunk that is the sum of all." : "";
  return `Step ${numDone} of ${2 * (n - 1)}, ${step.part} ${step.number} of ${n - 1}: ${what}. Rank 0 sends ${LETTERS[example.chunk]}.${end}`;
}

function show() {
  const n = ranks(), size = Number($("size").value), most = 2 * (n - 1);
  numDone = Math.max(0, Math.min(numDone, most));
  const step = numDone ? ringSteps(n)[numDone - 1] : null;
  drawRing(n, step);
  drawGrid(n, step);
  $("said").textContent = told(n, step);
  $("sent").textContent = readableBytes(sentBytes(n, numDone, size));
  $("least").textContent = readableBytes(leastBytes(n, size));
  $("naive").textContent = readableBytes(throughOneRankBytes(n, size));
  $("share").max = most;
  $("share").value = numDone;
  // not `disabled`: a button that is disabled while it has the focus loses it
  for (const id of ["first", "back"]) $(id).setAttribute("aria-disabled", numDone === 0);
  for (const id of ["forth", "last"]) $(id).setAttribute("aria-disabled", numDone === most);
}

function go(to) { numDone = to; show(); }

function stop() {
  clearInterval(timer);
  timer = 0;
  $("play").textContent = "play";
  $("play").setAttribute("aria-pressed", "false");
}

function play() {
  if (timer) { stop(); return; }
  if (numDone === 2 * (ranks() - 1)) go(0);
  $("play").textContent = "pause";
  $("play").setAttribute("aria-pressed", "true");
  timer = setInterval(() => { go(numDone + 1); if (numDone === 2 * (ranks() - 1)) stop(); }, 1200);
}

for (let n = 2; n <= 8; n += 1) $("ranks").append(make("option", { value: n }, String(n)));
$("ranks").value = 4;
$("ranks").addEventListener("change", () => { stop(); go(0); });
$("size").addEventListener("change", show);
$("first").addEventListener("click", () => go(0));
$("back").addEventListener("click", () => go(numDone - 1));
$("forth").addEventListener("click", () => go(numDone + 1));
$("last").addEventListener("click", () => go(2 * (ranks() - 1)));
$("play").addEventListener("click", play);
onArrows(() => go(numDone - 1), () => go(numDone + 1));
addEventListener("resize", show);
setAsAsked();
go(Number(asked.get("step")) || 0);
