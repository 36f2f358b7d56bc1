// A step of a pipeline of p stages on m micro-batches: who does what when, if messages take no time.
// GPipe: all forwards, then all backwards. 1F1B: as few forwards ahead as keep everyone busy, then one of each in turn.
function schedule(kind, stage, p, m) {
  const ahead = kind === "gpipe" ? m : Math.min(p - stage - 1, m);
  const order = [];
  for (let i = 0; i < ahead; i += 1) order.push(["forward", i]);
  for (let i = 0; i < m - ahead; i += 1) order.push(["forward", ahead + i], ["backward", i]);
  for (let i = m - ahead; i < m; i += 1) order.push(["backward", i]);
  return order;
}

// Every piece of work with its begin and end; a forward waits for the stage before, a backward for the one after.
function timeline(kind, p, m, forward, backward) {
  const orders = [...Array(p).keys()].map((stage) => schedule(kind, stage, p, m));
  const done = new Map(), clocks = Array(p).fill(0), at = Array(p).fill(0), cells = [];
  let isMoving = true;
  while (isMoving) {
    isMoving = false;
    orders.forEach((order, stage) => {
      while (at[stage] < order.length) {
        const [what, i] = order[at[stage]];
        const other = what === "forward" ? stage - 1 : stage + 1;
        const needed = `${other} ${what} ${i}`;
        if (other >= 0 && other < p) {
          if (!done.has(needed)) return;
          clocks[stage] = Math.max(clocks[stage], done.get(needed));
        }
        const start = clocks[stage];
        clocks[stage] += what === "forward" ? forward : backward;
        done.set(`${stage} ${what} ${i}`, clocks[stage]);
        cells.push({ stage, what, i, start, end: clocks[stage] });
        at[stage] += 1;
        isMoving = true;
      }
    });
  }
  return { cells, total: Math.max(...clocks) };
}

const idleShare = (found, p, m, forward, backward) => 1 - m * (forward + backward) / found.total;
const bubbleFormula = (p, m) => (p - 1) / (m + p - 1);

// Micro-batches whose forward is done, or under way, and whose backward is not done: their activations are kept.
function keptAt(cells, stage, time) {
  const own = cells.filter((cell) => cell.stage === stage);
  const begun = own.filter((cell) => cell.what === "forward" && cell.start <= time).length;
  return begun - own.filter((cell) => cell.what === "backward" && cell.end <= time).length;
}

function peakKept(kind, stage, p, m) {
  let kept = 0, peak = 0;
  for (const [what] of schedule(kind, stage, p, m)) {
    kept += what === "forward" ? 1 : -1;
    peak = Math.max(peak, kept);
  }
  return peak;
}
