// A c10d back end with NCCL's semantics over gloo.
#pragma once

#include "state.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <set>

namespace emulated {

class CollectiveWork : public c10d::Work {
 public:
  using c10d::Work::Work;
  ~CollectiveWork() override;
  bool isCompleted() override;
  bool isSuccess() const override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  Clock end; // of the stream, behind the collective
  int actor = -1;
  c10::DeviceIndex device = 0;
  bool blocks_host = false;
  bool async = false;
  std::shared_ptr<std::vector<c10::intrusive_ptr<c10d::Work>>> moved;
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> held; // until a stream waits, or the host has seen the end, as NCCL's back end has it
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
using Arrive = std::function<void(const std::vector<Range>& gone)>;
using Move = std::function<Arrive(Works&)>;

class Collectives : public c10d::Backend {
 public:
  Collectives(
      const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size, std::string name,
      std::chrono::milliseconds wait);
  ~Collectives() override;

  const std::string getBackendName() const override {
    return name_;
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return 0;
  }
  void abort() override;
  void shutdown() override;

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>&, const c10d::BroadcastOptions&) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>&, const c10d::AllreduceCoalescedOptions&) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>&, const c10d::ReduceOptions&) override;
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>&, std::vector<at::Tensor>&, const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>&, std::vector<at::Tensor>&, const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<std::vector<at::Tensor>>&, std::vector<at::Tensor>&, const c10d::GatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>&, std::vector<std::vector<at::Tensor>>&, const c10d::ScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>&, std::vector<std::vector<at::Tensor>>&, const c10d::ReduceScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>&, std::vector<at::Tensor>&, const c10d::ReduceScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&, const c10d::AllToAllOptions&) override;
  c10::intrusive_ptr<c10d::Work> alltoall(
      std::vector<at::Tensor>&, std::vector<at::Tensor>&, const c10d::AllToAllOptions&) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>&, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>&, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override;

 private:
  static constexpr int kMeetingTag = 0x4d45;

  StreamState& stream_of(c10::DeviceIndex device);
  void communicator(const std::string& key, const std::function<void()>& meet);
  void whole_communicator();
  void pair_communicator(int peer);
  c10::intrusive_ptr<c10d::Work> launch(
      c10d::OpType kind, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs, bool async, const Move& move);
  c10::intrusive_ptr<c10d::Work> together(const std::function<void()>& operations);
  void finish(CollectiveWork& work, StreamState& own);
  c10::intrusive_ptr<c10d::Work> gather_into(
      c10d::OpType kind, const std::vector<at::Tensor>& outputs, const at::Tensor& input, bool async);
  c10::intrusive_ptr<c10d::Work> reduce_all(
      c10d::OpType kind, const at::Tensor& given, const c10d::ReduceOp& op, bool async, int only);
  c10::intrusive_ptr<c10d::Work> reduce_scatter_from(
      c10d::OpType kind, const at::Tensor& output, const std::vector<at::Tensor>& inputs, const c10d::ReduceOp& op,
      bool async);

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::string name_;
  c10::intrusive_ptr<Options> options_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
  std::set<std::string> communicators_;
  std::vector<c10::intrusive_ptr<CollectiveWork>> batch_;
  bool coalescing_ = false;
  std::shared_ptr<bool> aborted_ = std::make_shared<bool>(false); // read by what lands after this is gone, too
};

} // namespace emulated
