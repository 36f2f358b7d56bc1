#include "late_copies.h"

#include <ATen/ATen.h>

#include <limits>
#include <list>
#include <mutex>

#include "tensors.h"

namespace sim {
namespace {

std::recursive_mutex mutex;
std::list<LateCopy> late;
std::atomic<size_t> num_late{0};  // so that an operation looks at one number when there is nothing to do

using Lock = std::lock_guard<std::recursive_mutex>;

bool comes_before(const LateCopy& copy, const Order& before) {
  auto found = before.find(copy.stream);
  return found != before.end() && copy.launch <= found->second;
}

// Reads the source now. What is for the host stays poison there until the host synchronises.
void read_source(LateCopy& copy) {
  if (copy.is_read) return;
  HostOperations guard;
  if (copy.is_for_host)
    copy.values = copy.source.clone();
  else
    copy.target.copy_(copy.source);
  copy.is_read = true;
}

void deliver(LateCopy& copy) {
  read_source(copy);
  HostOperations guard;
  if (copy.is_for_host) copy.target.copy_(copy.values);
}

// `act` says whether the copy is done with.
template <typename Act>
void for_each_late(Act act) {
  if (num_late == 0) return;
  std::list<LateCopy> finished;  // freed outside the lock: freeing a tensor can need the interpreter's lock
  {
    Lock lock(mutex);
    for (auto copy = late.begin(); copy != late.end();) {
      auto next = std::next(copy);
      if (act(*copy)) finished.splice(finished.end(), late, copy);
      copy = next;
    }
    num_late = late.size();
  }
}

}  // namespace

void poison(const at::Tensor& t) {
  if (t.numel() == 0) return;
  HostOperations guard;
  if (t.is_floating_point() || t.is_complex())
    t.fill_(std::numeric_limits<double>::quiet_NaN());
  else if (t.scalar_type() == at::kBool)
    t.fill_(true);
  else
    t.fill_(t.scalar_type() == at::kByte ? 0xAB : -85);  // -85 is 0xAB in a signed byte
}

void add_late_copy(LateCopy copy) {
  poison(copy.target);
  Lock lock(mutex);
  late.push_back(std::move(copy));
  num_late = late.size();
}

void finish_copies_of(const void* storage, StreamKey stream) {
  for_each_late([&](LateCopy& copy) {
    if (copy.stream != stream || (copy.source_storage != storage && copy.target_storage != storage)) return false;
    read_source(copy);
    return !copy.is_for_host;
  });
}

void finish_copies_on_device(const Order& before) {
  for_each_late([&](LateCopy& copy) {
    if (!comes_before(copy, before)) return false;
    read_source(copy);
    return !copy.is_for_host;
  });
}

void deliver_copies(const Order& before) {
  for_each_late([&](LateCopy& copy) {
    if (!comes_before(copy, before)) return false;
    deliver(copy);
    return true;
  });
}

size_t num_late_copies() { return num_late; }

}  // namespace sim
