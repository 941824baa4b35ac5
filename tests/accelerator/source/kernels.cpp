// Kernels of the device's own: memory, copies, what torch has only for devices that it knows; the host's use of pinned memory.
#include "operations.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace emulated {

namespace {

// Memory ---------------------------------------------------------------------------------------------------------

at::Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::Layout::Strided, "the emulated accelerator has dense tensors only");
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::Tensor(at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), device_allocator(), kKeys, c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::Tensor(at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(), kKeys,
      c10::dtype_or_default(dtype)));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set_(
      self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  return at::cpu::set_(self, std::move(source));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::cpu::set_(self, source);
}

at::Tensor& set_nothing(at::Tensor& self) {
  const auto device = self.device();
  const c10::DeviceGuard guard(device);
  return self.set_(at::empty({0}, self.options()));
}

void record_stream(at::Tensor& self, at::Stream stream) {
  c10::impl::VirtualGuardImpl(kDevice).recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

at::Tensor zero_tensor(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) { // torch's has no memory, so cannot alias any
  return at::zeros_symint(size, at::TensorOptions().dtype(dtype).device(device.value_or(c10::Device(kDevice))));
}

at::Scalar local_scalar(const at::Tensor& self) {
  Entry entry;
  auto& state = State::get();
  auto& stream = state.current(self.device().index());
  state.launch(stream, "_local_scalar_dense");
  touch_all(self, false, &stream, state.site("_local_scalar_dense", stream.actor));
  state.host_wait(stream.clock, state.site("reading of a value (item)", kHost));
  return on_host(self).item();
}

// Copies between device and host, and on the device. Late are those into pinned memory that nobody waits for.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Entry entry;
  auto& state = State::get();
  auto& stream = state.current(on_device(source) ? source.device().index() : target.device().index());
  const bool between = on_device(source) && on_device(target) && source.device() != target.device();
  if (between) // as on CUDA: on the source's stream, which is ordered with the target's before and after
    state.wait(stream, state.current(target.device().index()).clock);
  state.launch(stream, "copy_");
  const auto site = state.site("copy_", stream.actor);
  const bool to_host = !on_device(target), from_host = !on_device(source);
  const auto& host = to_host ? target : source;
  const bool pinned = (to_host || from_host) && is_pinned(host.storage().data());
  TORCH_CHECK(
      target.sizes() == source.sizes() || from_host || !to_host, "copy_ of ", source.sizes(), " to ", target.sizes());
  at::Tensor from = from_host ? source : on_host(source), to = to_host ? target : on_host(target);
  if (!from_host || pinned)
    touch_all(source, false, &stream, site);
  if (!to_host || pinned)
    touch_all(target, true, &stream, site);
  at::AutoDispatchBelowADInplaceOrView below;
  if (state.capture_origin != nullptr)
    state.graph.push_back([from, to] {
      at::AutoDispatchBelowADInplaceOrView below;
      to.copy_(from);
    });
  const bool blocks = (to_host && !(non_blocking && pinned)) || (from_host && !non_blocking);
  if (blocks) {
    state.host_wait(stream.clock, state.site(to_host ? "copy to the host" : "copy from the host", kHost));
  } else if (to_host && state.late_delivery) {
    const auto staged = from.clone();
    auto late = std::make_shared<Late>();
    late->epoch = stream.clock[stream.actor];
    late->targets = ranges(target);
    late->land = [staged, to](const std::vector<Range>& gone) {
      if (gone.empty()) {
        at::AutoDispatchBelowADInplaceOrView below;
        to.copy_(staged);
      }
    };
    for (const auto& range : late->targets)
      std::memset(reinterpret_cast<void*>(range.begin), kPoison, range.end - range.begin);
    state.add_late(stream, late);
    return target;
  }
  to.copy_(from);
  if (between)
    state.wait(state.current(target.device().index()), stream.clock);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes())
    target.resize_(source.sizes());
  return copy_from(source, target, false);
}

// Attention, convolution, recurrent cells: torch has these only for devices that it knows ------------------------------

} // namespace

int64_t attention_choice(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool causal, std::optional<double> scale, bool gqa) {
  const auto chosen = at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout, causal, scale, gqa);
  return chosen == static_cast<int64_t>(sdp::SDPBackend::flash_attention)
      ? static_cast<int64_t>(sdp::SDPBackend::overrideable)
      : chosen;
}

namespace {

std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>
attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool causal, bool, std::optional<double> scale) {
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, mask, scale);
  const auto seed = at::empty({}, query.options().dtype(at::kLong)); // compiled code expects one, and an offset
  return {out, sums, at::Tensor(), at::Tensor(), query.sym_size(2), key.sym_size(2), seed, at::empty_like(seed),
          at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, std::array<bool, 4>, const at::Tensor& out, const at::Tensor& sums, const at::Tensor&,
    const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale) {
  auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, query, key, value, out, sums, dropout, causal, if_defined(bias), scale);
  return {q, k, v, at::Tensor()};
}

void convolution(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  redirect("aten::convolution", stack);
}

void convolution_backward(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto count = handle.schema().arguments().size();
  const auto first = stack->end() - static_cast<int64_t>(count);
  const std::vector<int64_t> bias_sizes{first->toTensor().size(1)};
  stack->insert(first + 3, c10::IValue(bias_sizes));
  redirect("aten::convolution_backward", stack);
}

// For devices that it does not know, torch takes a cell's CUDA kernel. These are the CPU's formulas, with autograd's own
// backward.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  auto gates = input + hidden;
  if (input_bias.has_value() && input_bias->defined())
    gates = gates + *input_bias + *hidden_bias;
  const auto parts = gates.chunk(4, 1);
  auto next = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  auto out = parts[3].sigmoid() * next.tanh();
  return {out, next, gates};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& state,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  const bool biased = input_bias.has_value() && input_bias->defined();
  const auto inputs = (biased ? input + *input_bias : input).chunk(3, 1);
  const auto hiddens = (biased ? hidden + *hidden_bias : hidden).chunk(3, 1);
  const auto reset = (hiddens[0] + inputs[0]).sigmoid(), update = (hiddens[1] + inputs[1]).sigmoid();
  const auto fresh = (inputs[2] + hiddens[2] * reset).tanh();
  return {(state - fresh) * update + fresh, fresh};
}

// Autocast: what torch's macros do for each operation by a template, for a tenth of the time to compile -----------------

template <typename Cast>
void cast_all(torch::jit::Stack* stack, size_t count, const Cast& cast) {
  for (auto value = stack->end() - static_cast<int64_t>(count); value != stack->end(); ++value) {
    if (value->isTensor() && value->toTensor().defined()) {
      *value = cast(value->toTensor());
    } else if (value->isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& tensor : value->toTensorList())
        all.push_back(cast(tensor));
      *value = all;
    }
  }
}

void call_cast_to(at::ScalarType type, const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  cast_all(stack, handle.schema().arguments().size(), [type](const at::Tensor& tensor) {
    return at::autocast::cached_cast(type, tensor, kDevice);
  });
  handle.callBoxed(stack);
}

void in_lower_precision(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
  call_cast_to(at::autocast::get_autocast_dtype(kDevice), handle, stack);
}

void in_fp32(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
  call_cast_to(at::kFloat, handle, stack);
}

void in_widest(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
  auto type = at::autocast::get_autocast_dtype(kDevice);
  cast_all(stack, handle.schema().arguments().size(), [&type](const at::Tensor& tensor) {
    type = at::autocast::prioritize(type, tensor, kDevice);
    return tensor;
  });
  call_cast_to(type, handle, stack);
}

void to_fp32(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) { // by its dtype
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto& arguments = handle.schema().arguments();
  const auto first = stack->end() - static_cast<int64_t>(arguments.size());
  if (first->isTensor() && at::autocast::is_autocast_eligible(first->toTensor(), kDevice) &&
      first->toTensor().is_floating_point())
    for (size_t index = 0; index < arguments.size(); ++index)
      if (arguments[index].name() == "dtype" && first[index].isNone())
        first[index] = at::kFloat;
  handle.callBoxed(stack);
}

template <c10::BoxedKernel::BoxedKernelFunction_withDispatchKeys* kernel>
void autocast(torch::Library& library, std::initializer_list<const char*> names) {
  for (std::string name : names) {
    if (const auto comma = name.find(", "); comma != std::string::npos)
      name.replace(comma, 2, ".");
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<kernel>());
  }
}

// Host memory that the device may touch, too -------------------------------------------------------------------------

struct HostOperation {
  bool touches = false; // has a kernel of the CPU's that reads or writes elements
  std::vector<bool> writes;
};

const HostOperation& host_operation(const c10::OperatorName& name) {
  static auto* known = new std::unordered_map<c10::OperatorName, HostOperation>();
  static const std::unordered_set<std::string> metadata{
      "aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like",
      "aten::randn_like", "aten::resize_", "aten::set_", "aten::is_pinned", "aten::_pin_memory", "aten::is_same_size",
      "aten::is_set_to", "aten::new_empty", "aten::new_zeros", "aten::new_empty_strided", "aten::detach",
      "aten::alias", "aten::view", "aten::as_strided"};
  auto found = known->find(name);
  if (found != known->end())
    return found->second;
  HostOperation made;
  const auto handle = c10::Dispatcher::singleton().findSchema(name);
  if (handle.has_value() && metadata.count(name.name) == 0) {
    bool is_view = false;
    const auto& schema = handle->schema();
    for (const auto& result : schema.returns())
      is_view |= result.alias_info() != nullptr && !result.alias_info()->isWrite();
    made.touches = !is_view && handle->hasKernelForDispatchKey(c10::DispatchKey::CPU);
    made.touches |= name.name == "aten::copy_";
    for (const auto& argument : schema.arguments())
      made.writes.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
  }
  return known->emplace(name, std::move(made)).first->second;
}

template <typename Visit>
void each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList())
      visit(tensor);
  }
}

std::unique_ptr<at::ObserverContext> observe(const at::RecordFunction& call) {
  if (!has_pinned() || Entry::inside()) // what the accelerator does itself is recorded where it does it
    return nullptr;
  bool pinned = false, device = false;
  const auto inputs = call.inputs();
  for (const auto& input : inputs)
    each_tensor(input, [&](const at::Tensor& tensor) {
      if (!tensor.defined())
        return;
      device |= on_device(tensor);
      if (tensor.device().is_cpu() && tensor.has_storage() && tensor.layout() == c10::kStrided)
        pinned |= is_pinned(tensor.storage().data());
    });
  const auto name = call.operator_name();
  if (!pinned || device || !name.has_value())
    return nullptr;
  Entry entry;
  const auto& operation = host_operation(*name);
  auto& state = State::get();
  if (operation.touches && inputs.size() == operation.writes.size()) {
    state.host_step();
    const auto site = state.site(name->name + " (CPU)", kHost);
    for (size_t index = 0; index < inputs.size(); ++index)
      each_tensor(inputs[index], [&](const at::Tensor& tensor) {
        if (tensor.defined() && tensor.has_storage() && is_pinned(tensor.storage().data()))
          touch_all(tensor, operation.writes[index], nullptr, site);
      });
  }
  return nullptr;
}

} // namespace

void observe_host() {
  at::addGlobalCallback(
      at::RecordFunctionCallback(&observe).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

void State::add_late(StreamState& stream, const std::shared_ptr<Late>& late) {
  stream.late.push_back(late);
  ++late_count_;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
  m.impl("_efficientzerotensor", zero_tensor);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define NAMED(...) #__VA_ARGS__,
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  autocast<&in_lower_precision>(m, {AT_FORALL_LOWER_PRECISION_FP(NAMED)});
  autocast<&in_fp32>(m, {AT_FORALL_FP32(NAMED) "norm.Scalar", "norm.ScalarOpt_dim"});
  autocast<&to_fp32>(m, {AT_FORALL_FP32_SET_OPT_DTYPE(NAMED)});
  autocast<&in_widest>(m, {AT_FORALL_PROMOTE(NAMED)});
}
#undef NAMED

// A copy resolves what is lazily conjugated or negated by itself; torch's fallback would resolve it by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace emulated

namespace at::native { // the macro names what it registers in here
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &emulated::attention_choice)
}
