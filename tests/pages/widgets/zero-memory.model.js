// Bytes of state per rank: weights, gradients and the optimizer's state. Activations come on top, and depend on the batch.
const FORMATS = {
  fp32: { title: "fp32", weights: 4, gradients: 4, master: 0, moment: 4 },
  autocast: { title: "bf16 by autocast: weights stay fp32", weights: 4, gradients: 4, master: 0, moment: 4 },
  master: { title: "16-bit weights, fp32 master copy", weights: 2, gradients: 2, master: 4, moment: 4 },
  bf16: { title: "bf16 for everything", weights: 2, gradients: 2, master: 0, moment: 2 },
};
const OPTIMIZERS = {
  adam: { title: "Adam, AdamW: two moments", moments: 2 },
  momentum: { title: "SGD with momentum: one", moments: 1 },
  sgd: { title: "plain SGD: none", moments: 0 },
};
const STAGES = [
  "all on every rank (DDP)",
  "optimizer state divided",
  "and gradients",
  "and weights (FSDP)",
];

function bytesPerParameter(format, optimizer) {
  const { weights, gradients, master, moment } = FORMATS[format];
  return { weights, gradients, optimizer: master + OPTIMIZERS[optimizer].moments * moment };
}

// Stage 1 divides the optimizer's state by the ranks, stage 2 gradients too, stage 3 weights too.
function perRank(parameters, ranks, stage, format, optimizer) {
  const each = bytesPerParameter(format, optimizer);
  const state = {
    weights: parameters * each.weights / (stage >= 3 ? ranks : 1),
    gradients: parameters * each.gradients / (stage >= 2 ? ranks : 1),
    optimizer: parameters * each.optimizer / (stage >= 1 ? ranks : 1),
  };
  return { ...state, total: state.weights + state.gradients + state.optimizer };
}
