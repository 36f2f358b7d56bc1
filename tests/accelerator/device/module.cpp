// What Python sees of the device: sim_device/__init__.py puts it under torch.sim.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/Generator.h>

#include "clock.h"
#include "collectives.h"
#include "late_copies.h"
#include "tensors.h"

namespace {

// Called with what made the host wait; the Python side finds file and line. Never freed: threads may outlive it.
py::object* listener = nullptr;

void tell_listener(const char* cause) {
  py::gil_scoped_acquire gil;
  if (listener != nullptr) (*listener)(cause);
}

void listen_to_synchronizations(py::object callback) {
  listener = callback.is_none() ? nullptr : new py::object(std::move(callback));
  sim::on_synchronize(listener == nullptr ? nullptr : &tell_listener);
}

py::list take_intervals() {
  py::list found;
  for (const auto& interval : sim::take_intervals())
    found.append(py::make_tuple(static_cast<int>(interval.stream.device), interval.stream.id, interval.kind,
                                interval.name, interval.start_s, interval.end_s));
  return found;
}

}  // namespace

PYBIND11_MODULE(_sim_device, m) {
  m.def("device_count", &sim::device_count);
  m.def("current_device", [] { return static_cast<int>(sim::current_device()); });
  m.def("set_device", [](int device) { sim::set_current_device(static_cast<c10::DeviceIndex>(device)); });
  m.def("initialized_devices", &sim::initialized_devices);
  m.def("is_in_bad_fork", &sim::is_in_bad_fork);
  m.def("now_s", &sim::now_s);

  m.def("set_op_cost", &sim::set_op_cost);
  m.def("set_cost", [](const std::string& kind, double fixed_s, double per_byte_s) {
    sim::set_cost(kind, {fixed_s, per_byte_s});
  });
  m.def("set_slowdown", [](int device, double factor) { sim::set_slowdown(static_cast<c10::DeviceIndex>(device), factor); });
  m.def("reset_costs", &sim::reset_costs);
  m.def("keep_intervals", &sim::keep_intervals);
  m.def("take_intervals", &take_intervals);

  m.def("num_synchronizations", &sim::num_synchronizations);
  m.def("listen", &listen_to_synchronizations);
  m.def("num_late_copies", &sim::num_late_copies);
  m.def("default_generator", [](int device) {
    return sim::default_generator(static_cast<c10::DeviceIndex>(device));
  });
  m.def("make_simccl", &sim::make_simccl);
}
