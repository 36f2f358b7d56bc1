#include "clock.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

#include "late_copies.h"

namespace sim {
namespace {

struct StreamState {
  double ready_at_s = 0;
  uint64_t num_launches = 0;
  Order before;  // of other streams
};

std::recursive_mutex mutex;
std::map<StreamKey, StreamState> streams;
std::array<c10::StreamId, kMaxDevices> next_stream_id = [] {
  std::array<c10::StreamId, kMaxDevices> ids;
  ids.fill(1);  // 0 is the default stream
  return ids;
}();

std::map<std::string, double> op_costs;
std::map<std::string, Cost> costs;
std::array<double, kMaxDevices> slowdown = [] {
  std::array<double, kMaxDevices> ones;
  ones.fill(1.0);
  return ones;
}();

std::atomic<bool> keeps_intervals{false};
std::vector<Interval> intervals;

std::atomic<uint64_t> synchronizations{0};
OnSynchronize synchronize_callback = nullptr;

std::array<std::atomic<bool>, kMaxDevices> initialized{};
bool bad_fork = false;

thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> this_stream{};

using Lock = std::lock_guard<std::recursive_mutex>;

void sleep_until(double moment_s) {
  const double left_s = moment_s - now_s();
  if (left_s <= 0) return;
  const auto nap = std::chrono::duration<double>(left_s);
  if (Py_IsInitialized() && PyGILState_Check()) {
    PyThreadState* state = PyEval_SaveThread();
    std::this_thread::sleep_for(nap);
    PyEval_RestoreThread(state);
  } else {
    std::this_thread::sleep_for(nap);
  }
}

void count_synchronization(const char* cause) {
  synchronizations++;
  if (synchronize_callback != nullptr) synchronize_callback(cause);
}

void merge(Order& into, const Order& other) {
  for (const auto& [stream, count] : other) into[stream] = std::max(into[stream], count);
}

void add_interval(StreamKey stream, const std::string& kind, const std::string& name, double start_s, double end_s) {
  if (keeps_intervals && end_s > start_s) intervals.push_back({stream, kind, name, start_s, end_s});
}

uint64_t occupy(StreamKey key, const std::string& kind, const std::string& name, double seconds, double not_before_s) {
  Lock lock(mutex);
  auto& stream = streams[key];
  const double start_s = std::max({stream.ready_at_s, now_s(), not_before_s});
  stream.ready_at_s = start_s + seconds * slowdown[key.device];
  add_interval(key, kind, name, start_s, stream.ready_at_s);
  return ++stream.num_launches;
}

}  // namespace

int device_count() {
  static const int count = [] {
    const std::string visible = std::getenv("SIM_VISIBLE_DEVICES") ? std::getenv("SIM_VISIBLE_DEVICES") : "";
    if (!visible.empty()) return 1 + static_cast<int>(std::count(visible.begin(), visible.end(), ','));
    const char* text = std::getenv("SIM_DEVICES");
    return text == nullptr ? 8 : std::clamp(std::atoi(text), 1, kMaxDevices);
  }();
  return count;
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

c10::DeviceIndex current_device() { return this_device; }

void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "sim: invalid device ordinal ", static_cast<int>(device));
  this_device = device;
}

c10::StreamId current_stream_id(c10::DeviceIndex device) { return this_stream[device]; }
void set_current_stream(StreamKey stream) { this_stream[stream.device] = stream.id; }
StreamKey current_stream(c10::DeviceIndex device) { return {device, this_stream[device]}; }

StreamKey new_stream(c10::DeviceIndex device) {
  initialize(device);
  Lock lock(mutex);
  return {device, next_stream_id[device]++};
}

void set_op_cost(const std::string& name, double seconds) {
  Lock lock(mutex);
  op_costs[name] = seconds;
}

void set_cost(const std::string& kind, Cost cost) {
  TORCH_CHECK(kind == "copy" || kind == "collective", "sim: there is no kind of cost called ", kind);
  Lock lock(mutex);
  costs[kind] = cost;
}

void set_slowdown(c10::DeviceIndex device, double factor) {
  Lock lock(mutex);
  slowdown.at(device) = factor;
}

void reset_costs() {
  Lock lock(mutex);
  op_costs.clear();
  costs.clear();
  slowdown.fill(1.0);
}

uint64_t launch_op(StreamKey stream, const std::string& name) {
  double seconds = 0;
  {
    Lock lock(mutex);
    auto found = op_costs.find(name);
    if (found == op_costs.end()) found = op_costs.find("");
    if (found != op_costs.end()) seconds = found->second;
  }
  return occupy(stream, "op", name, seconds, 0);
}

uint64_t launch(StreamKey stream, const std::string& kind, const std::string& name, size_t bytes, double not_before_s) {
  Cost cost;
  {
    Lock lock(mutex);
    if (auto found = costs.find(kind); found != costs.end()) cost = found->second;
  }
  return occupy(stream, kind, name, cost.fixed_s + cost.per_byte_s * static_cast<double>(bytes), not_before_s);
}

double ready_at(StreamKey key) {
  Lock lock(mutex);
  return std::max(streams[key].ready_at_s, now_s());
}

Order order_of(StreamKey key) {
  Lock lock(mutex);
  const auto& stream = streams[key];
  Order order = stream.before;
  order[key] = stream.num_launches;
  return order;
}

void record(Event& event, StreamKey stream) {
  Lock lock(mutex);
  event.stream = stream;
  event.at_s = ready_at(stream);
  event.before = order_of(stream);
  event.is_recorded = true;
}

void wait_event(StreamKey key, const Event& event) {
  if (!event.is_recorded) return;  // as on CUDA: an event that was never recorded has been reached
  {
    Lock lock(mutex);
    auto& stream = streams[key];
    stream.ready_at_s = std::max(stream.ready_at_s, event.at_s);
    merge(stream.before, event.before);
  }
  finish_copies_on_device(event.before);
}

void synchronize_stream(StreamKey key, const char* cause) {
  count_synchronization(cause);
  sleep_until(ready_at(key));
  deliver_copies(order_of(key));
}

void synchronize_event(const Event& event, const char* cause) {
  if (!event.is_recorded) return;
  count_synchronization(cause);
  sleep_until(event.at_s);
  deliver_copies(event.before);
}

void synchronize_device(c10::DeviceIndex device, const char* cause) {
  count_synchronization(cause);
  double last_s = 0;
  Order everything;
  {
    Lock lock(mutex);
    for (const auto& [key, stream] : streams) {
      if (key.device != device) continue;
      last_s = std::max(last_s, stream.ready_at_s);
      everything[key] = stream.num_launches;
    }
  }
  sleep_until(last_s);
  deliver_copies(everything);
}

bool is_reached(const Event& event) {
  if (!event.is_recorded) return true;
  if (now_s() < event.at_s) return false;
  deliver_copies(event.before);
  return true;
}

bool is_idle(StreamKey key) {
  {
    Lock lock(mutex);
    if (now_s() < streams[key].ready_at_s) return false;
  }
  deliver_copies(order_of(key));
  return true;
}

uint64_t num_synchronizations() { return synchronizations; }
void on_synchronize(OnSynchronize callback) { synchronize_callback = callback; }

void keep_intervals(bool on) { keeps_intervals = on; }

std::vector<Interval> take_intervals() {
  Lock lock(mutex);
  return std::exchange(intervals, {});
}

void initialize(c10::DeviceIndex device) {
  TORCH_CHECK(!bad_fork, "Cannot re-initialize sim in forked subprocess");
  if (initialized.at(device).exchange(true)) return;
  static std::once_flag watch_forks;
  std::call_once(watch_forks, [] { pthread_atfork(nullptr, nullptr, [] { bad_fork = true; }); });
}

std::vector<int> initialized_devices() {
  std::vector<int> found;
  for (int i = 0; i < kMaxDevices; i++)
    if (initialized[i]) found.push_back(i);
  return found;
}

bool is_in_bad_fork() { return bad_fork; }

}  // namespace sim
