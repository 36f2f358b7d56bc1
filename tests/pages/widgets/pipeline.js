const ROW = 34, LEFT = 62, NARROW = 15;

function settings() {
  return { kind: $("kind").value, p: Number($("stages").value), m: Number($("micro").value), forward: 1, backward: Number($("backward").value) };
}

function drawChart({ p, forward, backward }, found, now) {
  const room = Math.max(220, $("chart").clientWidth - LEFT - 6);
  const unit = Math.max(NARROW, Math.min(40, room / found.total));
  const [width, height] = [LEFT + unit * found.total + 4, ROW * p + 4];
  const svg = make("svg", { width, height, role: "img", "aria-label": "What each stage does over time" });
  const hatch = make("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  hatch.append(make("rect", { width: 6, height: 6, fill: "var(--panel)" }), make("rect", { width: 2, height: 6, fill: "var(--line)" }));
  svg.append(make("defs", {}, hatch));
  for (let stage = 0; stage < p; stage += 1) {
    const y = ROW * stage + 2;
    svg.append(make("text", { class: "name", x: 0, y: y + ROW / 2 }, `stage ${stage}`));
    svg.append(make("rect", { class: "idle", x: LEFT, y: y + 3, width: unit * found.total, height: ROW - 6, rx: 3 }));
  }
  for (const { stage, what, i, start, end } of found.cells) {
    const [x, y] = [LEFT + unit * start, ROW * stage + 5];
    svg.append(
      make("rect", { class: `cell ${what}`, x, y, width: unit * (end - start), height: ROW - 6, rx: 3 }, make("title", {}, `${what} of micro-batch ${i}`)),
      make("text", { x: LEFT + unit * (start + end) / 2, y: y + (ROW - 6) / 2 }, String(i)),
    );
  }
  const x = LEFT + unit * now;
  svg.append(make("line", { class: "now", x1: x, x2: x, y1: 0, y2: height }));
  $("chart").replaceChildren(svg);
}

function drawKept({ kind, p, m }, cells, now) {
  const row = (name, values, most) => {
    const line = make("tr", {}, make("th", { scope: "row" }, name));
    for (const value of values) line.append(make("td", { class: value === most ? "number most" : "number" }, String(value)));
    return line;
  };
  const stages = [...Array(p).keys()];
  const peaks = stages.map((stage) => peakKept(kind, stage, p, m));
  const head = make("tr", {}, make("th", { scope: "col" }, "stage"));
  for (const stage of stages) head.append(make("th", { class: "number", scope: "col" }, String(stage)));
  $("kept").replaceChildren(
    head,
    row("kept now", stages.map((stage) => keptAt(cells, stage, now)), -1),
    row("kept at most", peaks, Math.max(...peaks)),
  );
  $("peak").textContent = `${Math.max(...peaks)} of ${m}`;
}

function show() {
  const chosen = settings();
  const found = timeline(chosen.kind, chosen.p, chosen.m, chosen.forward, chosen.backward);
  $("time").max = found.total;
  const now = Math.min(Number($("time").value), found.total);
  $("clock").textContent = `${now} of ${found.total}`;
  drawChart(chosen, found, now);
  drawKept(chosen, found.cells, now);
  $("idle").textContent = percent(idleShare(found, chosen.p, chosen.m, chosen.forward, chosen.backward));
  $("formula").textContent = percent(bubbleFormula(chosen.p, chosen.m));
  $("total").textContent = `${found.total} forwards`;
}

function move(by) {
  $("time").value = Number($("time").value) + by;
  show();
}

for (let p = 1; p <= 8; p += 1) $("stages").append(make("option", { value: p }, String(p)));
for (const m of [1, 2, 3, 4, 6, 8, 12, 16]) $("micro").append(make("option", { value: m }, String(m)));
$("stages").value = 4;
$("micro").value = 8;
for (const id of ["kind", "stages", "micro", "backward"]) $(id).addEventListener("change", show);
$("time").addEventListener("input", show);
onArrows(() => move(-1), () => move(1));
addEventListener("resize", show);
setAsAsked();
$("time").max = 1000;
$("time").value = asked.get("time") || 6;
show();
