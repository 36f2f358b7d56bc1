// Streams, events and the device clock.
//
// An operation runs at once on the host, but it occupies its stream for a cost that a test sets. Each stream knows
// the moment at which it will have finished what it was given; the host does not wait for it. Whoever synchronises
// sleeps until that moment. So host timers lie and events tell the truth, as on CUDA.
//
// Streams also keep vector clocks: which launches of which streams come before their next one. They decide when a late
// copy (late_copies.h) must have happened.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace sim {

constexpr int kMaxDevices = 16;

struct StreamKey {
  c10::DeviceIndex device;
  c10::StreamId id;
  auto operator<=>(const StreamKey&) const = default;
};

// For each stream, the number of its launches that are known to come before.
using Order = std::map<StreamKey, uint64_t>;

struct Event {
  StreamKey stream{0, 0};
  double at_s = 0;  // when the stream reaches it
  Order before;     // what has happened by then
  bool is_timed = false;
  bool is_recorded = false;
};

// What the device did and when, for tests that want the truth.
struct Interval {
  StreamKey stream;
  std::string kind;  // "op", "copy" or "collective"
  std::string name;
  double start_s;
  double end_s;
};

struct Cost {
  double fixed_s = 0;
  double per_byte_s = 0;
};

int device_count();
double now_s();

// Which device and streams the calling thread works on.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::StreamId current_stream_id(c10::DeviceIndex device);
void set_current_stream(StreamKey stream);
StreamKey current_stream(c10::DeviceIndex device);
StreamKey new_stream(c10::DeviceIndex device);

// Costs. `name` is an operator such as "aten::mm"; "" is every operator without a cost of its own.
void set_op_cost(const std::string& name, double seconds);
void set_cost(const std::string& kind, Cost cost);  // "copy" or "collective"
void set_slowdown(c10::DeviceIndex device, double factor);
void reset_costs();

// Occupy a stream. `not_before_s` is for work that also waits for something outside this device.
uint64_t launch_op(StreamKey stream, const std::string& name);
uint64_t launch(StreamKey stream, const std::string& kind, const std::string& name, size_t bytes,
                double not_before_s = 0);

double ready_at(StreamKey stream);  // when the stream will be idle, never in the past
void record(Event& event, StreamKey stream);
void wait_event(StreamKey stream, const Event& event);
Order order_of(StreamKey stream);  // everything that comes before its next launch

// The host waits. These count as host synchronisations, with the name of what caused them.
void synchronize_stream(StreamKey stream, const char* cause);
void synchronize_event(const Event& event, const char* cause);
void synchronize_device(c10::DeviceIndex device, const char* cause);
bool is_reached(const Event& event);
bool is_idle(StreamKey stream);

uint64_t num_synchronizations();
using OnSynchronize = void (*)(const char* cause);
void on_synchronize(OnSynchronize callback);

void keep_intervals(bool on);
std::vector<Interval> take_intervals();

// A device is initialised by its first allocation or stream, as a CUDA context is. A forked child of a process with an
// initialised device may not use any.
void initialize(c10::DeviceIndex device);
std::vector<int> initialized_devices();
bool is_in_bad_fork();

}  // namespace sim
