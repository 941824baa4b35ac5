// A c10d back end with NCCL's semantics: a stream of its own per communicator, wait() orders the current stream and not
// the host. gloo moves the bytes; sums are made here, in the order of ranks.
#include "collectives.h"
#include "operations.h"

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <cstring>

namespace emulated {

namespace {

using c10d::ReduceOp;

const char* name_of(c10d::OpType kind) {
  static thread_local std::string name;
  name = "collective " + c10d::opTypeToString(kind);
  return name.c_str();
}

at::Tensor host_bytes(int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
}

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

// Bytes of a dense device tensor, copied to ordinary host memory.
at::Tensor staged(const at::Tensor& tensor) {
  auto copy = host_bytes(bytes_of(tensor));
  if (copy.numel() != 0)
    std::memcpy(copy.mutable_data_ptr(), tensor.const_data_ptr(), copy.numel());
  return copy;
}

void check(const at::Tensor& tensor, bool reduces) {
  TORCH_CHECK(tensor.device().type() == kDevice, "Tensors must be on the emulated accelerator, found ", tensor.device());
  TORCH_CHECK(!tensor.is_sparse(), "Tensors must be dense");
  TORCH_CHECK(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
  const auto type = tensor.scalar_type();
  switch (type) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kInt:
    case at::kLong:
    case at::kChar:
    case at::kByte:
    case at::kBool:
      return;
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
      TORCH_CHECK(!reduces, "float8 is not supported for reductions");
      return;
    default:
      TORCH_CHECK(false, "Unconvertible NCCL type ", type);
  }
}

void check(const ReduceOp& op) {
  switch (op.op_) {
    case ReduceOp::SUM:
    case ReduceOp::AVG:
    case ReduceOp::PREMUL_SUM:
    case ReduceOp::PRODUCT:
    case ReduceOp::MIN:
    case ReduceOp::MAX:
      return;
    default:
      TORCH_CHECK(false, "Cannot use this ReduceOp with NCCL");
  }
}

void scale(at::Tensor& tensor, const ReduceOp& op) {
  const auto* factor = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(factor != nullptr, "PREMUL_SUM without a factor");
  if (factor->tensor_factor.defined())
    tensor.mul_(factor->tensor_factor.cpu());
  else
    tensor.mul_(factor->double_factor);
}

// The reduction of `size` equally large parts that lie one after another.
at::Tensor reduced(const at::Tensor& parts, at::ScalarType dtype, int size, const ReduceOp& op) {
  auto all = parts.view(dtype).view({size, -1});
  const bool averages = op.op_ == ReduceOp::AVG;
  if (op.op_ == ReduceOp::PREMUL_SUM)
    scale(all, op);
  else if (averages && at::isFloatingType(dtype))
    all.mul_(1.0 / size); // before the sum, as NCCL does: no sum overflows
  auto sum = all[0].clone();
  const bool logical = dtype == at::kBool;
  for (int rank = 1; rank < size; ++rank) {
    switch (op.op_) {
      case ReduceOp::SUM:
      case ReduceOp::AVG:
      case ReduceOp::PREMUL_SUM:
        logical ? sum.logical_or_(all[rank]) : sum.add_(all[rank]);
        break;
      case ReduceOp::PRODUCT:
        logical ? sum.logical_and_(all[rank]) : sum.mul_(all[rank]);
        break;
      case ReduceOp::MIN:
        sum.copy_(at::minimum(sum, all[rank]));
        break;
      case ReduceOp::MAX:
        sum.copy_(at::maximum(sum, all[rank]));
        break;
      default:
        check(op);
    }
  }
  if (averages && !at::isFloatingType(dtype))
    sum.div_(size, "trunc");
  return sum;
}

std::vector<at::Tensor> flat(const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<at::Tensor> all;
  for (const auto& list : lists)
    all.insert(all.end(), list.begin(), list.end());
  return all;
}

} // namespace

// Work -----------------------------------------------------------------------------------------------------------

bool CollectiveWork::isCompleted() {
  Entry entry;
  auto& state = State::get();
  if (state.capture_origin != nullptr)
    state.capture_error("query of a work");
  return std::all_of(moved->begin(), moved->end(), [](auto& part) { return part->isCompleted(); });
}

bool CollectiveWork::isSuccess() const {
  return true;
}

void CollectiveWork::synchronize() {
  Entry entry;
  auto& state = State::get();
  auto& stream = state.current(device);
  if (state.capture_origin != nullptr && state.streams.at(actor - 1)->capturing)
    stream.capturing = true;
  state.wait(stream, end);
  state.dropped.insert(state.dropped.end(), held.begin(), held.end());
  held.clear();
}

CollectiveWork::~CollectiveWork() {
  if (held.empty())
    return;
  Entry entry;
  State::get().shelf.push_back({end, std::move(held)});
}

bool CollectiveWork::wait(std::chrono::milliseconds) {
  synchronize();
  if (blocks_host) {
    Entry entry;
    auto& state = State::get();
    state.host_wait(end, state.site("barrier", kHost));
  }
  return true;
}

std::vector<at::Tensor> CollectiveWork::result() {
  return outputs;
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  return future;
}

// Backend --------------------------------------------------------------------------------------------------------

Collectives::Collectives(
    const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size, std::string name, std::chrono::milliseconds wait)
    : Backend(rank, size),
      gloo_(gloo),
      name_(std::move(name)),
      options_(c10::make_intrusive<c10d::Backend::Options>(name_, wait)) {}

// gloo would wait for what its peers never join.
Collectives::~Collectives() {
  Entry entry;
  for (const auto& [device, stream] : streams_)
    if (!State::get().of(stream).late.empty() || *aborted_) {
      new c10::intrusive_ptr<c10d::Backend>(gloo_);
      return;
    }
}

void Collectives::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  gloo_->setTimeout(timeout);
}

StreamState& Collectives::stream_of(c10::DeviceIndex device) {
  auto& state = State::get();
  auto found = streams_.find(device);
  if (found == streams_.end())
    found = streams_.emplace(device, state.make_stream(device)).first;
  return state.of(found->second);
}

// NCCL makes a communicator when it is first used, and all of its ranks have to come. The host waits for them.
void Collectives::communicator(const std::string& key, const std::function<void()>& meet) {
  TORCH_CHECK(!*aborted_, "the communicator was aborted");
  if (communicators_.insert(key).second)
    meet();
}

void Collectives::whole_communicator() {
  communicator("all", [this] { gloo_->barrier()->wait(); });
}

void Collectives::pair_communicator(int peer) {
  if (communicators_.count("all") != 0 && coalescing_)
    return;
  const auto low = std::min(rank_, peer), high = std::max(rank_, peer);
  communicator(std::to_string(low) + ":" + std::to_string(high), [&] {
    std::vector<at::Tensor> sent{host_bytes(1)}, received{host_bytes(1)};
    auto send = gloo_->send(sent, peer, kMeetingTag);
    gloo_->recv(received, peer, kMeetingTag)->wait();
    send->wait();
  });
}

c10::intrusive_ptr<c10d::Work> Collectives::launch(
    c10d::OpType kind, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs, bool async, const Move& move) {
  TORCH_CHECK(!*aborted_, "the communicator was aborted");
  auto& state = State::get();
  const auto device = (outputs.empty() ? inputs : outputs).at(0).device().index();
  auto& current = state.current(device);
  auto& own = async ? stream_of(device) : current;
  if (async) {
    if (state.capture_origin != nullptr && current.capturing)
      own.capturing = true;
    join(current.clock, state.host_clock);
    state.wait(own, current.clock);
  }
  // Operations of one batch run at the same time: none waits for an earlier one, which may need a later one of a peer.
  const bool first = !coalescing_ || batch_.empty();
  if (!first)
    state.land_before(current.clock);
  const auto epoch = state.launch(own, name_of(kind), first);
  const auto site = state.site(name_of(kind), own.actor);
  for (const auto& input : inputs)
    for (const auto& range : ranges(input))
      state.touch(range, false, &own, site);
  for (const auto& output : outputs)
    for (const auto& range : ranges(output))
      state.touch(range, true, &own, site);

  auto works = std::make_shared<std::vector<c10::intrusive_ptr<c10d::Work>>>();
  auto arrive = move(*works);
  auto late = std::make_shared<Late>();
  late->epoch = epoch;
  for (const auto& output : outputs)
    for (const auto& range : ranges(output)) {
      late->targets.push_back(range);
      if (state.late_delivery)
        std::memset(reinterpret_cast<void*>(range.begin), kPoison, range.end - range.begin);
    }
  late->land = [works, arrive, aborted = aborted_](const std::vector<Range>& gone) {
    if (*aborted)
      return; // the outputs stay as they are
    for (auto& work : *works)
      work->wait();
    arrive(gone);
  };
  state.add_late(own, late);
  if (state.capture_origin != nullptr)
    state.graph.push_back([move] {
      Works moved;
      const auto arrived = move(moved);
      for (auto& part : moved)
        part->wait();
      arrived({});
    });
  if (!state.late_delivery)
    state.land_before(own.clock);

  auto work = c10::make_intrusive<CollectiveWork>(rank_, kind);
  work->end = own.clock;
  work->actor = own.actor;
  work->device = device;
  work->moved = works;
  work->outputs = outputs;
  work->async = async;
  if (async) { // memory of what runs on the current stream is freed in its order
    work->held = inputs;
    work->held.insert(work->held.end(), outputs.begin(), outputs.end());
  }
  if (coalescing_) {
    batch_.push_back(work);
    return work;
  }
  finish(*work, own);
  return async ? work : nullptr; // what runs on the current stream needs no work to wait for
}

void Collectives::finish(CollectiveWork& work, StreamState& own) {
  const c10::StreamGuard guard(own.stream); // events of the future are recorded on the collective's stream
  work.future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()),
      std::vector<c10::Device>{c10::Device(kDevice, work.device)});
  work.future->markCompleted(c10::IValue(work.outputs));
}

void Collectives::startCoalescing() {
  Entry entry;
  coalescing_ = true;
  batch_.clear();
}

// Operations as one work; that of a batch that is open already, if there is one.
c10::intrusive_ptr<c10d::Work> Collectives::together(const std::function<void()>& operations) {
  Entry entry;
  if (coalescing_) {
    operations();
    return batch_.empty() ? nullptr : batch_.back();
  }
  startCoalescing();
  try {
    operations();
  } catch (...) {
    endCoalescing();
    throw;
  }
  return endCoalescing();
}

c10::intrusive_ptr<c10d::Work> Collectives::endCoalescing() {
  Entry entry;
  coalescing_ = false;
  if (batch_.empty())
    return nullptr;
  auto& state = State::get();
  auto whole = c10::make_intrusive<CollectiveWork>(rank_, c10d::OpType::COALESCED);
  whole->moved = std::make_shared<std::vector<c10::intrusive_ptr<c10d::Work>>>();
  whole->actor = batch_.back()->actor;
  whole->device = batch_.back()->device;
  for (auto& part : batch_) {
    whole->async |= part->async;
    join(whole->end, part->end);
    whole->moved->insert(whole->moved->end(), part->moved->begin(), part->moved->end());
    whole->outputs.insert(whole->outputs.end(), part->outputs.begin(), part->outputs.end());
    whole->held.insert(whole->held.end(), part->held.begin(), part->held.end());
    part->held.clear();
  }
  batch_.clear();
  finish(*whole, *state.streams.at(whole->actor - 1));
  return whole->async ? whole : nullptr;
}

// Writes `from` (host bytes) to a device tensor, unless its memory was freed meanwhile.
static void deliver(void* target, const void* from, int64_t bytes, const std::vector<Range>& gone) {
  const auto begin = reinterpret_cast<uintptr_t>(target), end = begin + bytes;
  for (const auto& range : gone)
    if (range.begin < end && begin < range.end)
      return;
  if (bytes != 0)
    std::memcpy(target, from, bytes);
}

c10::intrusive_ptr<c10d::Work> Collectives::gather_into(
    c10d::OpType kind, const std::vector<at::Tensor>& outputs, const at::Tensor& input, bool async) {
  check(input, false);
  int64_t total = 0;
  for (const auto& output : outputs) {
    check(output, false);
    TORCH_CHECK(output.scalar_type() == input.scalar_type(), "output tensor must have the same type as input tensor");
    total += output.numel();
  }
  TORCH_CHECK(total == input.numel() * size_, "output tensor size must be equal to world_size times input tensor size");
  std::vector<std::pair<void*, int64_t>> places;
  for (const auto& output : outputs)
    places.emplace_back(output.mutable_data_ptr(), bytes_of(output));
  return launch(kind, {input}, outputs, async, [=, this, input = on_host(input)](Works& works) -> Arrive {
    auto own = staged(input);
    auto all = host_bytes(own.numel() * size_);
    if (own.numel() != 0)
      works.push_back(gloo_->_allgather_base(all, own));
    return [all, places](const std::vector<Range>& gone) {
      const auto* from = static_cast<const uint8_t*>(all.const_data_ptr());
      for (const auto& [target, bytes] : places) {
        deliver(target, from, bytes, gone);
        from += bytes;
      }
    };
  });
}

c10::intrusive_ptr<c10d::Work> Collectives::reduce_all(
    c10d::OpType kind, const at::Tensor& given, const ReduceOp& op, bool async, int only) {
  TORCH_CHECK(!given.is_complex() || c10d::isComplexViewAsRealAllowed(op), "reduction is not supported for complex");
  const auto tensor = given.is_complex() ? at::view_as_real(given) : given;
  check(tensor, true);
  check(op);
  std::vector<at::Tensor> outputs;
  if (only < 0 || only == rank_)
    outputs.push_back(tensor);
  return launch(kind, {tensor}, outputs, async, [=, this, tensor = on_host(tensor), wanted = !outputs.empty()](Works& works) -> Arrive {
    auto own = staged(tensor);
    auto all = host_bytes(own.numel() * size_);
    if (own.numel() != 0)
      works.push_back(gloo_->_allgather_base(all, own));
    auto* target = tensor.mutable_data_ptr();
    const auto dtype = tensor.scalar_type();
    const auto size = size_;
    return [=](const std::vector<Range>& gone) {
      if (!wanted || all.numel() == 0)
        return;
      at::AutoDispatchBelowADInplaceOrView below;
      const auto sum = reduced(all, dtype, size, op);
      deliver(target, sum.const_data_ptr(), bytes_of(sum), gone);
    };
  });
}

c10::intrusive_ptr<c10d::Work> Collectives::reduce_scatter_from(
    c10d::OpType kind, const at::Tensor& output, const std::vector<at::Tensor>& inputs, const ReduceOp& op, bool async) {
  check(output, true);
  check(op);
  int64_t total = 0;
  for (const auto& input : inputs) {
    check(input, true);
    TORCH_CHECK(output.scalar_type() == input.scalar_type(), "input tensor must be the same type as the output tensor.");
    total += input.numel();
  }
  TORCH_CHECK(total == output.numel() * size_, "input tensor must be the same size as output size times world size");
  std::vector<at::Tensor> from;
  for (const auto& input : inputs)
    from.push_back(on_host(input));
  return launch(kind, inputs, {output}, async, [=, this, output = on_host(output)](Works& works) -> Arrive {
    std::vector<at::Tensor> sent;
    for (const auto& input : from)
      sent.push_back(staged(input));
    auto own = sent.size() == 1 ? sent[0] : at::cat(sent);
    auto all = host_bytes(own.numel());
    std::vector<int64_t> even;
    if (own.numel() != 0)
      works.push_back(gloo_->alltoall_base(all, own, even, even));
    auto* target = output.mutable_data_ptr();
    const auto dtype = output.scalar_type();
    const auto size = size_;
    return [=](const std::vector<Range>& gone) {
      if (all.numel() == 0)
        return;
      at::AutoDispatchBelowADInplaceOrView below;
      const auto sum = reduced(all, dtype, size, op);
      deliver(target, sum.const_data_ptr(), bytes_of(sum), gone);
    };
  });
}

c10::intrusive_ptr<c10d::Work> Collectives::broadcast(
    std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) {
  Entry entry;
  whole_communicator();
  const auto tensor = tensors.at(0).is_complex() ? at::view_as_real(tensors[0]) : tensors[0];
  check(tensor, false);
  const bool sends = options.rootRank == rank_;
  std::vector<at::Tensor> inputs, outputs;
  (sends ? inputs : outputs).push_back(tensor);
  return launch(c10d::OpType::BROADCAST, inputs, outputs, options.asyncOp, [=, this](Works& works) -> Arrive {
    std::vector<at::Tensor> moved{sends ? staged(tensor) : host_bytes(bytes_of(tensor))};
    if (moved[0].numel() != 0)
      works.push_back(gloo_->broadcast(moved, options));
    auto* target = tensor.mutable_data_ptr();
    return [=, bytes = moved[0]](const std::vector<Range>& gone) {
      if (!sends)
        deliver(target, bytes.const_data_ptr(), bytes.numel(), gone);
    };
  });
}

c10::intrusive_ptr<c10d::Work> Collectives::allreduce(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  Entry entry;
  whole_communicator();
  TORCH_CHECK(tensors.size() == 1, "Expecting one tensor only but got multiple");
  return reduce_all(c10d::OpType::ALLREDUCE, tensors[0], options.reduceOp, options.asyncOp, -1);
}

c10::intrusive_ptr<c10d::Work> Collectives::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return together([&] {
    for (auto& tensor : tensors) {
      std::vector<at::Tensor> one{tensor};
      allreduce(one, options);
    }
  });
}

c10::intrusive_ptr<c10d::Work> Collectives::reduce(
    std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) {
  Entry entry;
  whole_communicator();
  return reduce_all(
      c10d::OpType::REDUCE, tensors.at(0), options.reduceOp, options.asyncOp, static_cast<int>(options.rootRank));
}

c10::intrusive_ptr<c10d::Work> Collectives::allgather(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) {
  Entry entry;
  whole_communicator();
  return gather_into(c10d::OpType::ALLGATHER, outputs.at(0), inputs.at(0), options.asyncOp);
}

c10::intrusive_ptr<c10d::Work> Collectives::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  Entry entry;
  whole_communicator();
  return gather_into(c10d::OpType::_ALLGATHER_BASE, {output}, input, options.asyncOp);
}

c10::intrusive_ptr<c10d::Work> Collectives::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) {
  return together([&] {
    for (size_t index = 0; index < inputs.size(); ++index)
      _allgather_base(outputs[index], inputs[index], options);
  });
}

c10::intrusive_ptr<c10d::Work> Collectives::gather(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs, const c10d::GatherOptions& options) {
  Entry entry;
  whole_communicator();
  if (options.rootRank == rank_)
    return gather_into(c10d::OpType::GATHER, outputs.at(0), inputs.at(0), options.asyncOp);
  return launch(c10d::OpType::GATHER, inputs, {}, options.asyncOp, [=, this](Works& works) -> Arrive {
    auto own = staged(inputs[0]);
    auto all = host_bytes(own.numel() * size_);
    if (own.numel() != 0)
      works.push_back(gloo_->_allgather_base(all, own));
    return [all](const std::vector<Range>&) {};
  });
}

c10::intrusive_ptr<c10d::Work> Collectives::scatter(
    std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs, const c10d::ScatterOptions& options) {
  Entry entry;
  whole_communicator();
  check(outputs.at(0), false);
  const bool sends = options.rootRank == rank_;
  return launch(
      c10d::OpType::SCATTER, sends ? inputs.at(0) : std::vector<at::Tensor>{}, outputs, options.asyncOp,
      [=, this](Works& works) -> Arrive {
        const auto bytes = bytes_of(outputs[0]);
        std::vector<at::Tensor> received{host_bytes(bytes)};
        std::vector<std::vector<at::Tensor>> sent;
        if (sends) {
          sent.emplace_back();
          for (const auto& input : inputs[0])
            sent[0].push_back(staged(input));
        }
        if (bytes != 0)
          works.push_back(gloo_->scatter(received, sent, options));
        auto* target = outputs[0].mutable_data_ptr();
        return [=, from = received[0]](const std::vector<Range>& gone) {
          deliver(target, from.const_data_ptr(), from.numel(), gone);
        };
      });
}

c10::intrusive_ptr<c10d::Work> Collectives::reduce_scatter(
    std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ReduceScatterOptions& options) {
  Entry entry;
  whole_communicator();
  return reduce_scatter_from(
      c10d::OpType::REDUCE_SCATTER, outputs.at(0), inputs.at(0), options.reduceOp, options.asyncOp);
}

c10::intrusive_ptr<c10d::Work> Collectives::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  Entry entry;
  whole_communicator();
  return reduce_scatter_from(
      c10d::OpType::_REDUCE_SCATTER_BASE, output, {input}, options.reduceOp, options.asyncOp);
}

c10::intrusive_ptr<c10d::Work> Collectives::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::ReduceScatterOptions& options) {
  return together([&] {
    for (size_t index = 0; index < inputs.size(); ++index)
      _reduce_scatter_base(outputs[index], inputs[index], options);
  });
}

c10::intrusive_ptr<c10d::Work> Collectives::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  Entry entry;
  whole_communicator();
  check(output, false);
  check(input, false);
  return launch(c10d::OpType::ALLTOALL_BASE, {input}, {output}, options.asyncOp, [=, this](Works& works) -> Arrive {
    const auto row = [](const at::Tensor& tensor) {
      return tensor.numel() == 0 ? 0 : bytes_of(tensor) / tensor.size(0);
    };
    auto out_bytes = output_sizes, in_bytes = input_sizes;
    for (auto& bytes : out_bytes)
      bytes *= row(output);
    for (auto& bytes : in_bytes)
      bytes *= row(input);
    auto own = staged(input), all = host_bytes(bytes_of(output));
    works.push_back(gloo_->alltoall_base(all, own, out_bytes, in_bytes));
    auto* target = output.mutable_data_ptr();
    return [=](const std::vector<Range>& gone) { deliver(target, all.const_data_ptr(), all.numel(), gone); };
  });
}

c10::intrusive_ptr<c10d::Work> Collectives::alltoall(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllToAllOptions& options) {
  Entry entry;
  whole_communicator();
  return launch(c10d::OpType::ALLTOALL, inputs, outputs, options.asyncOp, [=, this](Works& works) -> Arrive {
    std::vector<at::Tensor> sent;
    std::vector<int64_t> in_bytes, out_bytes;
    std::vector<std::pair<void*, int64_t>> places;
    for (const auto& input : inputs) {
      check(input, false);
      sent.push_back(staged(input));
      in_bytes.push_back(sent.back().numel());
    }
    int64_t total = 0;
    for (const auto& output : outputs) {
      check(output, false);
      out_bytes.push_back(bytes_of(output));
      places.emplace_back(output.mutable_data_ptr(), out_bytes.back());
      total += out_bytes.back();
    }
    auto own = at::cat(sent), all = host_bytes(total);
    works.push_back(gloo_->alltoall_base(all, own, out_bytes, in_bytes));
    return [=](const std::vector<Range>& gone) {
      const auto* from = static_cast<const uint8_t*>(all.const_data_ptr());
      for (const auto& [target, bytes] : places) {
        deliver(target, from, bytes, gone);
        from += bytes;
      }
    };
  });
}

c10::intrusive_ptr<c10d::Work> Collectives::send(std::vector<at::Tensor>& tensors, int peer, int tag) {
  Entry entry;
  coalescing_ ? whole_communicator() : pair_communicator(peer);
  check(tensors.at(0), false);
  return launch(c10d::OpType::SEND, tensors, {}, true, [=, this](Works& works) -> Arrive {
    std::vector<at::Tensor> sent{staged(tensors[0])};
    if (sent[0].numel() != 0)
      works.push_back(gloo_->send(sent, peer, tag));
    return [sent](const std::vector<Range>&) {};
  });
}

c10::intrusive_ptr<c10d::Work> Collectives::recv(std::vector<at::Tensor>& tensors, int peer, int tag) {
  Entry entry;
  coalescing_ ? whole_communicator() : pair_communicator(peer);
  check(tensors.at(0), false);
  return launch(c10d::OpType::RECV, {}, tensors, true, [=, this](Works& works) -> Arrive {
    std::vector<at::Tensor> received{host_bytes(bytes_of(tensors[0]))};
    if (received[0].numel() != 0)
      works.push_back(gloo_->recv(received, peer, tag));
    auto* target = tensors[0].mutable_data_ptr();
    return [=, from = received[0]](const std::vector<Range>& gone) {
      deliver(target, from.const_data_ptr(), from.numel(), gone);
    };
  });
}

c10::intrusive_ptr<c10d::Work> Collectives::barrier(const c10d::BarrierOptions& options) {
  Entry entry;
  whole_communicator();
  auto one = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(
                                c10::Device(kDevice, State::get().current_device())));
  auto work = reduce_all(c10d::OpType::BARRIER, one, ReduceOp(ReduceOp::SUM), true, -1);
  static_cast<CollectiveWork*>(work.get())->blocks_host = true;
  return work;
}

void Collectives::abort() {
  *aborted_ = true;
}

void Collectives::shutdown() {
  *aborted_ = true;
}

} // namespace emulated
