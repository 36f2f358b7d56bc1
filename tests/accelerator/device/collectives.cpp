// simccl: collectives for device tensors, as strict as NCCL.
//
// It refuses tensors of the host's, of another device and with gaps. Each group has a stream of its own: a collective
// waits there for the caller's stream, lasts a settable time, and its result is late (late_copies.h) until somebody waits
// for it. `wait()` orders streams and does not block the host. The bytes travel by gloo.
//
// All ranks of a group end a collective together: the latest of them to begin decides, as the members' clocks are one
// (the machine's monotonic clock).
#include "collectives.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "late_copies.h"
#include "tensors.h"

namespace sim {
namespace {

using c10d::Backend;
using c10d::OpType;
using c10d::ReduceOp;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

size_t bytes_of(const Tensors& tensors) {
  size_t bytes = 0;
  for (const auto& t : tensors) bytes += t.nbytes();
  return bytes;
}

Tensors host_copies(const Tensors& tensors) {
  HostOperations guard;
  Tensors copies;
  for (const auto& t : tensors) copies.push_back(host_view(t).contiguous().clone());
  return copies;
}

// A group's stream on one device, current for as long as this lives, and behind the caller's stream.
class OnCommStream {
 public:
  OnCommStream(StreamKey comm) : comm_(comm), before_(current_stream(comm.device)) {
    Event here;
    record(here, before_);
    wait_event(comm, here);
    set_current_stream(comm);
  }
  ~OnCommStream() { set_current_stream(before_); }

 private:
  StreamKey comm_, before_;
};

// A collective under way on the device. The host has done its part.
class DeviceWork : public Work {
 public:
  DeviceWork(int rank, OpType op, Tensors outputs, StreamKey comm) : Work(rank, op), outputs_(std::move(outputs)) {
    record(end_, comm);
    const c10::Device device(kSim, comm.device);
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{device});
    future_->markCompleted(c10::IValue(outputs_));  // records the group's stream, which is current
  }
  bool isCompleted() override { return is_reached(end_); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override { wait_event(current_stream(end_.stream.device), end_); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  Tensors result() override { return outputs_; }

 protected:
  Event end_;
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A barrier blocks the host until the device is through with it, as NCCL's does.
class BarrierWork final : public DeviceWork {
 public:
  using DeviceWork::DeviceWork;
  bool wait(std::chrono::milliseconds) override {
    synchronize_event(end_, "barrier");
    return true;
  }
};

// A message between two ranks: under way until somebody waits for it.
class MessageWork final : public Work {
 public:
  MessageWork(int rank, OpType op, std::vector<WorkPtr> parts, Tensors moments, Tensors payload, Tensors outputs,
              StreamKey comm)
      : Work(rank, op), parts_(std::move(parts)), moments_(std::move(moments)), payload_(std::move(payload)),
        outputs_(std::move(outputs)), comm_(comm) {}

  bool isCompleted() override { return is_over_; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    finish();
    wait_event(current_stream(comm_.device), end_);
    return true;
  }
  Tensors result() override { return outputs_; }

 private:
  void finish() {
    if (is_over_) return;
    for (auto& part : parts_) part->wait();
    const double sent_s = moments_[0].item<double>();
    const auto launched = launch(comm_, "collective", "message", bytes_of(payload_), sent_s);
    for (size_t i = 0; i < outputs_.size(); i++)
      add_late_copy({payload_[i], host_view(outputs_[i]), nullptr, outputs_[i].storage().unsafeGetStorageImpl(), comm_,
                     launched, false});
    record(end_, comm_);
    is_over_ = true;
  }

  std::vector<WorkPtr> parts_;
  Tensors moments_, payload_, outputs_;
  StreamKey comm_;
  Event end_;
  bool is_over_ = false;
};

class SimCCL final : public Backend {
 public:
  explicit SimCCL(c10::intrusive_ptr<Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "simccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return in_place(OpType::BROADCAST, tensors, [&](Tensors& host) { gloo_->broadcast(host, options)->wait(); });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return in_place(OpType::ALLREDUCE, tensors, [&](Tensors& host) { reduce_all(host, options.reduceOp); });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return in_place(OpType::ALLREDUCE_COALESCED, tensors, [&](Tensors& host) {
      for (auto& t : host) {
        Tensors one{t};
        reduce_all(one, options.reduceOp);
      }
    });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return in_place(OpType::REDUCE, tensors, [&](Tensors& host) { gloo_->reduce(host, options)->wait(); });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(OpType::ALLGATHER, inputs, outputs.at(0), [&](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists{out};
      gloo_->allgather(lists, in, options)->wait();
    });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return run(OpType::_ALLGATHER_BASE, {input}, {output}, [&](Tensors& in, Tensors& out) {
      gloo_->_allgather_base(out[0], in[0], options)->wait();
    });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return run(OpType::COALESCED, inputs, outputs, [&](Tensors& in, Tensors& out) {
      for (size_t i = 0; i < in.size(); i++) gloo_->_allgather_base(out[i], in[i], options)->wait();
    });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return run(OpType::_REDUCE_SCATTER_BASE, {input}, {output},
               [&](Tensors& in, Tensors& out) { reduce_and_cut(in[0], out[0], options.reduceOp); });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return run(OpType::REDUCE_SCATTER, inputs.at(0), outputs, [&](Tensors& in, Tensors& out) {
      reduce_all(in, options.reduceOp);
      out[0].copy_(in[getRank()]);
    });
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return run(OpType::COALESCED, inputs, outputs, [&](Tensors& in, Tensors& out) {
      for (size_t i = 0; i < in.size(); i++) reduce_and_cut(in[i], out[i], options.reduceOp);
    });
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    return run(OpType::ALLTOALL_BASE, {input}, {output}, [&](Tensors& in, Tensors& out) {
      gloo_->alltoall_base(out[0], in[0], output_sizes, input_sizes, options)->wait();
    });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const Tensors sent = inputs.empty() ? Tensors{} : inputs[0];
    return run(OpType::SCATTER, sent, outputs, [&](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists;
      if (!in.empty()) lists.push_back(in);
      gloo_->scatter(out, lists, options)->wait();
    });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const Tensors received = outputs.empty() ? Tensors{} : outputs[0];
    return run(OpType::GATHER, inputs, received, [&](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists;
      if (!out.empty()) lists.push_back(out);
      gloo_->gather(lists, in, options)->wait();
    });
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    const auto comm = check(tensors);
    OnCommStream on(comm);
    const auto payload = host_copies(tensors);
    const Tensors moments{moment(ready_at(comm))};
    return message(OpType::SEND, moments, payload, {}, comm, [&](Tensors& part, int at) {
      return gloo_->send(part, to, at);
    }, tag);
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    const auto comm = check(tensors);
    OnCommStream on(comm);
    const auto payload = host_copies(tensors);
    const Tensors moments{moment(0)};
    return message(OpType::RECV, moments, payload, tensors, comm, [&](Tensors& part, int at) {
      return gloo_->recv(part, from, at);
    }, tag);
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    const auto comm = comm_ ? *comm_ : comm_stream(current_device());  // as NCCL: where it was last used
    OnCommStream on(comm);
    launch(comm, "collective", "barrier", 0, latest(ready_at(comm)));
    return c10::make_intrusive<BarrierWork>(getRank(), OpType::BARRIER, Tensors{}, comm);
  }

 private:
  template <typename Act>
  WorkPtr in_place(OpType op, Tensors& tensors, Act act) {
    return run(op, tensors, tensors, [&](Tensors& in, Tensors& out) {
      act(in);
      for (size_t i = 0; i < in.size(); i++) out[i] = in[i];
    });
  }

  // `act(in, out)` is given copies on the host; what it leaves in `out` arrives late.
  template <typename Act>
  WorkPtr run(OpType op, const Tensors& inputs, const Tensors& outputs, Act act) {
    Tensors all = inputs;
    all.insert(all.end(), outputs.begin(), outputs.end());
    const auto comm = check(all);
    OnCommStream on(comm);
    auto in = host_copies(inputs), out = host_copies(outputs);
    const double start_s = latest(ready_at(comm));
    {
      HostOperations guard;
      act(in, out);
    }
    const size_t bytes = std::max(bytes_of(inputs), bytes_of(outputs));
    const auto launched = launch(comm, "collective", c10d::opTypeToString(op), bytes, start_s);
    for (size_t i = 0; i < outputs.size(); i++)
      add_late_copy({out[i].view(outputs[i].sizes()), host_view(outputs[i]), nullptr,
                     outputs[i].storage().unsafeGetStorageImpl(), comm, launched, false});
    return c10::make_intrusive<DeviceWork>(getRank(), op, outputs, comm);
  }

  template <typename Post>
  WorkPtr message(OpType op, Tensors moments, Tensors payload, Tensors outputs, StreamKey comm, Post post, int tag) {
    std::vector<WorkPtr> parts{post(moments, 2 * tag), post(payload, 2 * tag + 1)};
    return c10::make_intrusive<MessageWork>(getRank(), op, std::move(parts), std::move(moments), std::move(payload),
                                            std::move(outputs), comm);
  }

  // As NCCL: device tensors only, of one device, without gaps. The stream to use.
  StreamKey check(const Tensors& tensors) {
    TORCH_CHECK(!tensors.empty(), "simccl: no tensors");
    for (const auto& t : tensors) {
      TORCH_CHECK(is_sim(t), "simccl: tensors must be on the device, found one on ", t.device());
      TORCH_CHECK(t.device() == tensors[0].device(), "simccl: tensors on ", t.device(), " and ", tensors[0].device());
      TORCH_CHECK(t.is_non_overlapping_and_dense(), "simccl: tensors must be contiguous");
    }
    return comm_stream(tensors[0].device().index());
  }

  StreamKey comm_stream(c10::DeviceIndex device) {
    if (!comm_ || comm_->device != device) {
      TORCH_CHECK(!comm_, "simccl: a group is used with one device per rank, found ", static_cast<int>(device), " and ",
                  static_cast<int>(comm_->device));
      comm_ = new_stream(device);
    }
    return *comm_;
  }

  static at::Tensor moment(double seconds) {
    HostOperations guard;
    return at::full({1}, seconds, at::kDouble);
  }

  // When the last rank is ready to begin.
  double latest(double own_s) {
    Tensors moments{moment(own_s)};
    c10d::AllreduceOptions options;
    options.reduceOp = ReduceOp::MAX;
    gloo_->allreduce(moments, options)->wait();
    return moments[0].item<double>();
  }

  void reduce_all(Tensors& host, const ReduceOp& op) {
    const bool is_average = op == ReduceOp::AVG;
    for (auto& t : host) {
      c10d::AllreduceOptions options;
      options.reduceOp = is_average ? ReduceOp(ReduceOp::SUM) : op;
      Tensors one{t};
      gloo_->allreduce(one, options)->wait();
      if (is_average) t.div_(getSize());
    }
  }

  void reduce_and_cut(const at::Tensor& in, at::Tensor& out, const ReduceOp& op) {
    Tensors whole{in};
    reduce_all(whole, op);
    out.copy_(whole[0].flatten().chunk(getSize())[getRank()].view(out.sizes()));
  }

  c10::intrusive_ptr<Backend> gloo_;
  std::optional<StreamKey> comm_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_simccl(c10::intrusive_ptr<c10d::Backend> gloo) {
  return c10::make_intrusive<SimCCL>(std::move(gloo));
}

}  // namespace sim
