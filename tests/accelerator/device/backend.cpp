// How torch finds the device: guard (devices, streams, events), hooks (pinning, generators, resizing), generator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "clock.h"
#include "tensors.h"

namespace sim {
namespace {

StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
c10::Stream as_stream(StreamKey key) { return c10::Stream(c10::Stream::UNSAFE, {kSim, key.device}, key.id); }
c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kSim;

  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(kSim, current_device());
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kSim, current_device()}; }
  void setDevice(c10::Device device) const override { set_current_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_current_device(index_of(device)); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  c10::Stream getStream(c10::Device device) const override { return as_stream(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_stream({index_of(device), 0}); }
  c10::Stream getNewStream(c10::Device device, int) const override { return as_stream(new_stream(index_of(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    set_current_stream(key_of(stream));
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(key_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(key_of(stream), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(device, "synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Event;
    auto& recorded = *static_cast<Event*>(*event);
    recorded.is_timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    sim::record(recorded, key_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait_event(key_of(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || is_reached(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) synchronize_event(*static_cast<Event*>(event), "event.synchronize");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "both events must be recorded before elapsed_time");
    const auto &from = *static_cast<Event*>(first), &to = *static_cast<Event*>(second);
    TORCH_CHECK(from.is_timed && to.is_timed, "elapsed_time needs events made with enable_timing=True");
    TORCH_CHECK(is_reached(from) && is_reached(to), "sim error: device not ready: an event has not been reached yet");
    return (to.at_s - from.at_s) * 1e3;
  }
};

// The host's generator under the device's name: the same seed gives the same numbers on both.
struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex device) {
    device_ = {kSim, device};
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }

 private:
  at::CPUGeneratorImpl* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->set_state(*get_state());
    return copy;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    const auto made = initialized_devices();
    return std::find(made.begin(), made.end(), device) != made.end();
  }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(kSim); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Device getDeviceFromPtr(void*) const override { return {kSim, current_device()}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

const bool is_registered = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < device_count(); i++) made.push_back(new_generator(static_cast<c10::DeviceIndex>(i)));
    return made;
  }();
  return generators.at(device < 0 ? current_device() : device);
}

}  // namespace sim
