const PARTS = ["weights", "gradients", "optimizer"];

function drawBar(stage, found, scale, limit) {
  const isOver = limit > 0 && found.total > limit;
  const bar = make("div", { class: "bar", "aria-hidden": "true" });
  for (const part of PARTS) bar.append(make("i", { class: part, style: `width: ${100 * found[part] / scale}%` }));
  const track = make("div", { class: "track" }, bar);
  if (limit > 0) track.append(make("div", { class: "limit", style: `left: ${100 * limit / scale}%` }));
  const size = make("strong", isOver ? { class: "over" } : {}, readableBytes(found.total) + (isOver ? " ✗" : ""));
  return make("div", { class: "row" }, make("p", {}, make("span", {}, `stage ${stage}: ${STAGES[stage]}`), size), track);
}

function show() {
  const parameters = 1e9 * Math.max(0, Number($("billions").value)), ranks = 2 ** Number($("ranks").value);
  const [format, optimizer, limit] = [$("format").value, $("optimizer").value, 1e9 * Number($("device").value)];
  const found = STAGES.map((_, stage) => perRank(parameters, ranks, stage, format, optimizer));
  const scale = 1.02 * Math.max(1, limit, found[0].total);
  $("count").textContent = String(ranks);
  $("bars").replaceChildren(...found.map((each, stage) => drawBar(stage, each, scale, limit)));
  const head = make("tr", {}, make("th", { scope: "col" }, "stage"));
  for (const part of [...PARTS, "total"]) head.append(make("th", { class: "number", scope: "col" }, part));
  $("numbers").replaceChildren(head, ...found.map((each, stage) => {
    const row = make("tr", {}, make("th", { scope: "row" }, String(stage)));
    for (const part of [...PARTS, "total"]) row.append(make("td", { class: "number" }, readableBytes(each[part])));
    return row;
  }));
  const each = bytesPerParameter(format, optimizer);
  $("each").textContent = `Bytes per parameter: ${each.weights} for the weight, ${each.gradients} for its gradient, ${each.optimizer} for the optimizer: `
    + `${each.weights + each.gradients + each.optimizer} in all.` + (limit > 0 ? " The dashed line is what a device has." : "");
}

for (const [name, { title }] of Object.entries(FORMATS)) $("format").append(make("option", { value: name }, title));
for (const [name, { title }] of Object.entries(OPTIMIZERS)) $("optimizer").append(make("option", { value: name }, title));
$("format").value = "master";
for (const id of ["billions", "ranks", "format", "optimizer", "device"]) $(id).addEventListener("input", show);
setAsAsked();
show();
