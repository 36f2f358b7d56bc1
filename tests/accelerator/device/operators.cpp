// Every operator, by the host's own kernel on the device's memory; strict where CUDA is strict.
//
// A few operators are the device's own: making, copying, viewing and resizing tensors, and reading a number. All others
// fall through to `run_on_host`, which checks devices, advances the clock, and hands the CPU kernel views of the
// device's memory. What synchronises the host on CUDA is counted here.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <set>
#include <unordered_map>

#include "late_copies.h"
#include "tensors.h"

namespace sim {
namespace {

const c10::DispatchKeySet kSimKeys(c10::DispatchKey::PrivateUse1);

c10::DeviceIndex index_of(std::optional<at::Device> device) {
  return device && device->has_index() ? device->index() : current_device();
}

// --- making and viewing

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(index_of(device));
  return at::detail::empty_generic(size, device_allocator(), kSimKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(index_of(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kSimKeys, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& t, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}
at::Tensor view(const at::Tensor& t, at::IntArrayRef size) { return at::native::view(t, size); }
at::Tensor reshape_alias(const at::Tensor& t, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(t, size, stride);
}

const at::Tensor& resize(const at::Tensor& t, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat> format) {
  finish_copies_of(t.storage().unsafeGetStorageImpl(), current_stream(t.device().index()));
  t.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(symbolic));
  if (format && *format != at::MemoryFormat::Preserve) t.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  const size_t needed = (t.storage_offset() + t.numel()) * t.element_size();
  if (t.storage().nbytes() < needed) resize_storage(t.storage(), needed);
  return t;
}

at::Tensor& set_storage_at(at::Tensor& t, at::Storage storage, int64_t offset, at::IntArrayRef size,
                           at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(t, std::move(storage), offset, size, stride);
}
at::Tensor& set_storage(at::Tensor& t, at::Storage storage) {
  const auto length = static_cast<int64_t>(storage.nbytes() / t.dtype().itemsize());
  return at::native::set_storage_cpu_(t, std::move(storage), 0, {length}, {});
}
at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& source) {
  return at::native::set_storage_cpu_(t, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// `parameter.data = parameter.to(device)`: torch allows it for the devices it knows by name.
bool has_compatible_type(const at::Tensor& t, const at::Tensor& other) {
  const auto is_dense = [](const at::Tensor& x) { return x.layout() == at::kStrided && (x.is_cpu() || is_sim(x)); };
  return (is_dense(t) && is_dense(other)) ||
         t.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(other.key_set());
}

// --- copying

const void* storage_of(const at::Tensor& t) { return t.storage().unsafeGetStorageImpl(); }

void touch(const at::Tensor& t, StreamKey stream) {
  if (num_late_copies() != 0 && t.has_storage()) finish_copies_of(storage_of(t), stream);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const auto& on_device = is_sim(target) ? target : source;
  const auto stream = current_stream(on_device.device().index());
  initialize(on_device.device().index());
  touch(source, stream);
  touch(target, stream);
  const bool crosses = is_sim(source) != is_sim(target);
  const auto launched = launch(stream, crosses ? "copy" : "op", "aten::copy_", target.nbytes());
  auto from = host_view(source), to = host_view(target);
  // Copies from pageable memory read it before they return, as CUDA's do.
  const bool is_late = crosses && non_blocking && (is_sim(source) || is_pinned(source.const_data_ptr()));
  if (is_late) {
    add_late_copy({from, to, storage_of(source), storage_of(target), stream, launched, !is_sim(target)});
    return target;
  }
  if (crosses && !non_blocking)
    synchronize_stream(stream, is_sim(source) ? "copy to the host" : "copy from the host");
  HostOperations guard;
  to.copy_(from);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& t) {
  const auto stream = current_stream(t.device().index());
  touch(t, stream);
  synchronize_stream(stream, "item()");
  HostOperations guard;
  return at::_local_scalar_dense(host_view(t));
}

// --- convolutions, which torch asks every device but its own for by these names

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  const auto stream = current_stream(input.device().index());
  touch(input, stream);
  touch(weight, stream);
  launch_op(stream, "aten::convolution");
  HostOperations guard;
  const auto host_bias = bias && bias->defined() ? std::optional<at::Tensor>(host_view(*bias)) : std::nullopt;
  return to_device(at::convolution(host_view(input), host_view(weight), host_bias, stride, padding, dilation, transposed,
                                   output_padding, groups),
                   input.device().index());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  const auto stream = current_stream(input.device().index());
  for (const auto& t : {gradient, input, weight}) touch(t, stream);
  launch_op(stream, "aten::convolution_backward");
  HostOperations guard;
  const int64_t channels = gradient.size(1);
  auto [to_input, to_weight, to_bias] =
      at::convolution_backward(host_view(gradient), host_view(input), host_view(weight), at::IntArrayRef(channels),
                               stride, padding, dilation, transposed, output_padding, groups, wanted);
  const auto there = [&](const at::Tensor& t) { return t.defined() ? to_device(t, input.device().index()) : t; };
  return {there(to_input), there(to_weight), there(to_bias)};
}

// --- everything else

// Operators that answer with a number, or whose result's shape depends on values.
const std::set<std::string> kSynchronizing{"aten::nonzero",  "aten::masked_select",      "aten::_unique2",
                                           "aten::equal",    "aten::is_nonzero",         "aten::unique_dim",
                                           "aten::unique_consecutive", "aten::repeat_interleave"};
// Operators that take indices, or step counts, from the host.
const std::set<std::string> kTakesHostTensors{"aten::index", "aten::_index_put_impl_", "aten::index_put_",
                                              "aten::_foreach_copy_"};

template <typename Act>
void for_each_tensor(const c10::IValue& value, Act act) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) act(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) act(t);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      if (t && t->defined()) act(*t);
  }
}

// As CUDA: all on one device; a tensor of the host's only if it is a single number.
std::optional<at::Device> common_device(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  std::optional<at::Device> device;
  bool has_host = false;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& t) {
      if (!is_sim(t)) {
        has_host = has_host || (t.device().is_cpu() && t.dim() > 0);
        return;
      }
      TORCH_CHECK(!device || *device == t.device(),
                  "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                  t.device(), "! (", name, ")");
      device = t.device();
    });
    if (argument.isDevice() && argument.toDevice().type() == kSim && !device)
      device = at::Device(kSim, index_of(argument.toDevice()));
  }
  const bool may_mix = kTakesHostTensors.count(name) != 0 || name.find("_fused_") != std::string::npos;
  TORCH_CHECK(!device || !has_host || may_mix,
              "Expected all tensors to be on the same device, but found at least two devices, ", *device,
              " and cpu! (", name, ")");
  return device;
}

// Random operators draw from the device's generator, not from the host's.
class DrawFrom {
 public:
  explicit DrawFrom(at::Generator generator)
      : device_(at::check_generator<at::CPUGeneratorImpl>(host_)), own_(std::move(generator)) {
    auto* own = static_cast<at::CPUGeneratorImpl*>(own_.unsafeGetGeneratorImpl());
    saved_ = device_->engine();
    saved_float_ = device_->next_float_normal_sample();
    saved_double_ = device_->next_double_normal_sample();
    put(own->engine(), own->next_float_normal_sample(), own->next_double_normal_sample());
  }
  ~DrawFrom() {
    auto* own = static_cast<at::CPUGeneratorImpl*>(own_.unsafeGetGeneratorImpl());
    own->set_engine(device_->engine());
    own->set_next_float_normal_sample(device_->next_float_normal_sample());
    own->set_next_double_normal_sample(device_->next_double_normal_sample());
    put(saved_, saved_float_, saved_double_);
  }

 private:
  void put(at::mt19937 engine, std::optional<float> next_float, std::optional<double> next_double) {
    device_->set_engine(engine);
    device_->set_next_float_normal_sample(next_float);
    device_->set_next_double_normal_sample(next_double);
  }
  at::Generator host_ = at::detail::getDefaultCPUGenerator();
  at::CPUGeneratorImpl* device_;
  at::Generator own_;
  at::mt19937 saved_;
  std::optional<float> saved_float_;
  std::optional<double> saved_double_;
};

// The arguments as the CPU kernel gets them, and the way back for what it returns.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, at::Device device) : schema_(op.schema()), device_(device) {}

  c10::IValue argument(const c10::IValue& value, size_t position) {
    const auto* alias = schema_.arguments()[position].alias_info();
    is_written_ = alias != nullptr && alias->isWrite();
    if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(view_of(value.toTensor())) : value;
    if (value.isTensorList()) {
      std::vector<at::Tensor> views;
      for (const at::Tensor& t : value.toTensorVector()) views.push_back(view_of(t));
      return views;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> views;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
        views.push_back(t && t->defined() ? std::optional<at::Tensor>(view_of(*t)) : t);
      return views;
    }
    if (value.isDevice()) return c10::IValue(at::Device(at::kCPU));
    if (value.isGenerator()) {
      generator = value.toGenerator();
      return c10::IValue();
    }
    return value;
  }

  // An `out=` tensor of another size was resized on the host: the device's follows.
  void write_back() {
    for (auto& [original, view] : written_) {
      if (view.data_ptr() == host_view(original).data_ptr() && view.sizes() == original.sizes()) continue;
      original.resize_(view.sizes());
      host_view(original).copy_(view);
    }
  }

  c10::IValue result(const c10::IValue& value) {
    if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(on_device(value.toTensor())) : value;
    if (value.isTensorList()) {
      std::vector<at::Tensor> made;
      for (const at::Tensor& t : value.toTensorVector()) made.push_back(on_device(t));
      return made;
    }
    return value;
  }

  std::optional<at::Generator> generator;

 private:
  at::Tensor view_of(const at::Tensor& t) {
    if (!is_sim(t)) return t;
    // what the kernel is to resize must be the host's own
    const bool is_empty_output = is_written_ && t.numel() == 0;
    auto view = is_empty_output ? at::empty({0}, t.options().device(at::kCPU)) : host_view(t);
    originals_.emplace(view.unsafeGetTensorImpl(), t);
    if (t.storage().data()) storages_.emplace(t.storage().data(), t);
    if (is_written_) written_.emplace_back(t, view);
    return view;
  }

  at::Tensor on_device(const at::Tensor& t) {
    if (auto found = originals_.find(t.unsafeGetTensorImpl()); found != originals_.end()) return found->second;
    if (is_sim(t)) return t;
    if (auto found = storages_.find(t.storage().data()); t.storage().data() && found != storages_.end()) {
      auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second.storage()), kSimKeys, t.dtype());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
      return made;
    }
    return to_device(t, device_.index());
  }

  const c10::FunctionSchema& schema_;
  at::Device device_;
  bool is_written_ = false;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> originals_;
  std::unordered_map<const void*, at::Tensor> storages_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;
};

void copy_one_by_one(c10::ArrayRef<c10::IValue> arguments) {
  const auto targets = arguments[0].toTensorVector(), sources = arguments[1].toTensorVector();
  for (size_t i = 0; i < targets.size(); i++) targets[i].copy_(sources[i], arguments[2].toBool());
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  const size_t num_arguments = op.schema().arguments().size();
  const auto arguments = torch::jit::last(*stack, num_arguments);
  const auto device = common_device(name, arguments);
  TORCH_CHECK(device.has_value(), "sim: ", name, " was given nothing on the device");
  if (name == "aten::_foreach_copy_") {
    copy_one_by_one(arguments);
    torch::jit::drop(*stack, num_arguments);
    return;
  }
  const auto stream = current_stream(device->index());
  for (const auto& argument : arguments)
    for_each_tensor(argument, [&](const at::Tensor& t) {
      if (is_sim(t)) touch(t, stream);
    });
  launch_op(stream, name);
  if (kSynchronizing.count(name) != 0) synchronize_stream(stream, name.c_str());

  HostOperations guard;
  HostCall call(op, *device);
  torch::jit::Stack host_stack;
  for (size_t i = 0; i < num_arguments; i++) host_stack.push_back(call.argument(arguments[i], i));
  {
    std::optional<DrawFrom> draw;
    if (op.hasTag(at::Tag::nondeterministic_seeded))
      draw.emplace(call.generator ? *call.generator : default_generator(device->index()));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &host_stack);
  }
  call.write_back();
  torch::jit::drop(*stack, num_arguments);
  for (const auto& value : host_stack) stack->push_back(call.result(value));
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(aten, CPU, m) { m.impl("_has_compatible_shallow_copy_type", has_compatible_type); }

}  // namespace sim
