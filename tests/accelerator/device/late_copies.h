// Copies that arrive later.
//
// A `non_blocking` copy between host and device returns at once. Until it happens its target holds poison, and its
// source is read when it happens, not when it was asked for. It happens
//   - on the device, when an operation of the same stream touches its memory, or when another stream waits for an event
//     recorded after it;
//   - for the host, when the host synchronises with something that comes after it.
// A missing synchronisation is a wrong number, in every run alike.
#pragma once

#include <ATen/core/Tensor.h>

#include "clock.h"

namespace sim {

// `source` and `target` are seen from the host (host_view in tensors.h); `stream` is where the copy was launched as
// number `launch`. The storages are those of the tensors that a later operation would touch.
struct LateCopy {
  at::Tensor source;
  at::Tensor target;
  const void* source_storage;
  const void* target_storage;
  StreamKey stream;
  uint64_t launch;
  bool is_for_host;
  bool is_read = false;
  at::Tensor values;  // what was read, for the host
};

void add_late_copy(LateCopy copy);

// An operation on `stream` is about to touch this storage.
void finish_copies_of(const void* storage, StreamKey stream);
// Everything in `before` precedes what the device does next.
void finish_copies_on_device(const Order& before);
// Everything in `before` precedes what the host does next.
void deliver_copies(const Order& before);

size_t num_late_copies();
void poison(const at::Tensor& host_view);

}  // namespace sim
