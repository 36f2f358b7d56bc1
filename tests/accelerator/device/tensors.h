// Device tensors, their memory, and how the host sees it.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Generator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "clock.h"

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

inline bool is_sim(const at::Tensor& t) { return t.defined() && t.device().type() == kSim; }

// Host operations inside the device: below autograd and autocast, invisible to Python's dispatch modes.
struct HostOperations {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::autocast_dispatch_keyset |
                                           c10::DispatchKeySet({c10::DispatchKey::Python,
                                                                c10::DispatchKey::PythonTLSSnapshot,
                                                                c10::DispatchKey::Functionalize})};
};

// The device whose memory the calling thread allocates, for as long as this lives.
struct OnDevice {
  explicit OnDevice(c10::DeviceIndex device) : before(current_device()) { set_current_device(device); }
  ~OnDevice() { set_current_device(before); }
  c10::DeviceIndex before;
};

c10::DeviceAllocator* device_allocator();
bool is_pinned(const void* data);
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// The same memory as a CPU tensor; a CPU tensor is returned as it is.
at::Tensor host_view(const at::Tensor& t);
// A device tensor with this one's values; `t` is a CPU tensor.
at::Tensor to_device(const at::Tensor& t, c10::DeviceIndex device);
void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace sim
