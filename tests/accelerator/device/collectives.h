#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

// Collectives for device tensors, carried by a gloo group.
c10::intrusive_ptr<c10d::Backend> make_simccl(c10::intrusive_ptr<c10d::Backend> gloo);

}  // namespace sim
