// A ring all-reduce on n ranks. The tensor is cut into n chunks; in each step every rank sends one of them to its right.
const modulo = (a, n) => ((a % n) + n) % n;

function ringSteps(n) {
  const ranks = [...Array(n).keys()];
  const step = (part, number, first) => ({
    part,
    number: number + 1,
    moves: ranks.map((rank) => ({ from: rank, to: modulo(rank + 1, n), chunk: modulo(rank + first - number, n) })),
  });
  const numbers = [...Array(n - 1).keys()];
  return [...numbers.map((s) => step("reduce-scatter", s, 0)), ...numbers.map((s) => step("all-gather", s, 1))];
}

// After so many steps: by rank and chunk, whose values are in the sum it holds.
function holdings(n, numDone) {
  let held = [...Array(n).keys()].map((rank) => Array.from({ length: n }, () => [rank]));
  for (const { part, moves } of ringSteps(n).slice(0, numDone)) {
    const next = held.map((chunks) => [...chunks]);
    for (const { from, to, chunk } of moves) {
      const arrived = held[from][chunk];
      next[to][chunk] = part === "all-gather" ? arrived : [...held[to][chunk], ...arrived].sort((a, b) => a - b);
    }
    held = next;
  }
  return held;
}

const sentBytes = (n, numDone, size) => numDone * size / n;
const leastBytes = (n, size) => 2 * (n - 1) / n * size;
// All through rank 0, which sends the whole sum to each of the others.
const throughOneRankBytes = (n, size) => (n - 1) * size;
