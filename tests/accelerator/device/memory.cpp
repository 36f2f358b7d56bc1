// Device memory, metered per device, and pinned host memory that is known as such.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "tensors.h"

namespace sim {
namespace {

constexpr size_t kHeader = 64;  // before each block: its size and device
constexpr int kPoison = 0xFF;   // NaN as a float, -1 as an integer: nothing reads fresh memory unnoticed

struct Header {
  size_t bytes;
  c10::DeviceIndex device;
};

struct Meter {
  std::atomic<int64_t> current{0}, peak{0}, allocated{0}, freed{0}, count{0};

  void add(int64_t bytes) {
    allocated += bytes;
    count++;
    const int64_t total = current += bytes;
    for (int64_t seen = peak; total > seen && !peak.compare_exchange_weak(seen, total);) {
    }
  }
  void remove(int64_t bytes) {
    freed += bytes;
    count--;
    current -= bytes;
  }
};

std::array<Meter, kMaxDevices> meters;

void free_block(void* block) {
  if (block == nullptr) return;
  auto* header = static_cast<Header*>(block);
  meters[header->device].remove(static_cast<int64_t>(header->bytes));
  std::free(block);
}

size_t device_memory_bytes() {
  const char* text = std::getenv("SIM_MEMORY_BYTES");
  return text == nullptr ? size_t{16} << 30 : std::strtoull(text, nullptr, 10);
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    initialize(device);
    if (bytes == 0) return {nullptr, nullptr, &free_block, {kSim, device}};
    TORCH_CHECK_WITH(OutOfMemoryError, meters[device].current + bytes <= device_memory_bytes(),
                     "sim out of memory. Tried to allocate ", bytes, " bytes");
    auto* block = static_cast<char*>(std::aligned_alloc(kHeader, kHeader + (bytes + kHeader - 1) / kHeader * kHeader));
    *reinterpret_cast<Header*>(block) = {bytes, device};
    std::memset(block + kHeader, kPoison, bytes);
    meters[device].add(static_cast<int64_t>(bytes));
    return {block + kHeader, block, &free_block, {kSim, device}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const auto& meter = meters.at(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      auto& all = (*bytes)[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      all.current = meter.current;
      all.peak = meter.peak;
      all.allocated = meter.allocated;
      all.freed = meter.freed;
    }
    stats.allocation[0].current = meter.count;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { meters.at(device).allocated = meters.at(device).freed = 0; }
  void resetPeakStats(c10::DeviceIndex device) override { meters.at(device).peak = meters.at(device).current.load(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {device_memory_bytes() - meters.at(device).current, device_memory_bytes()};
  }
};

Memory memory;

// --- pinned host memory

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;  // by address

void free_pinned(void* data) {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(static_cast<const char*>(data));
  }
  std::free(data);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    void* data = std::aligned_alloc(kHeader, (bytes + kHeader - 1) / kHeader * kHeader);
    std::memset(data, kPoison, bytes);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<const char*>(data)] = bytes;
    return {data, data, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedMemory pinned_memory;

}  // namespace

REGISTER_ALLOCATOR(kSim, &memory);
REGISTER_HOST_ALLOCATOR(kSim, &pinned_memory);

c10::DeviceAllocator* device_allocator() { return &memory; }

bool is_pinned(const void* data) {
  const auto* address = static_cast<const char*>(data);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(address);
  if (after == pinned.begin()) return false;
  const auto& [start, bytes] = *std::prev(after);
  return address < start + bytes;
}

at::Tensor host_view(const at::Tensor& t) {
  if (!is_sim(t)) return t;
  auto* keep_alive = new c10::Storage(t.storage());
  auto drop = [](void* context) { delete static_cast<c10::Storage*>(context); };
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), t.storage().nbytes(),
      c10::DataPtr(t.storage().mutable_data(), keep_alive, drop, c10::Device(c10::DeviceType::CPU)),
      /*allocator=*/nullptr, /*resizable=*/false));
  auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       t.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return view;
}

at::Tensor to_device(const at::Tensor& t, c10::DeviceIndex device) {
  OnDevice on(device);
  at::Tensor made = at::detail::empty_strided_generic(t.sizes(), t.strides(), &memory,
                                                c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), t.scalar_type());
  HostOperations guard;
  host_view(made).copy_(t);
  return made;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  OnDevice on(impl->device().index());
  auto block = memory.allocate(bytes);
  if (const size_t kept = std::min(impl->nbytes(), bytes)) std::memcpy(block.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(block));
  impl->set_nbytes(bytes);
}

}  // namespace sim
