// The device as torch sees it: guard, streams, events, the caching allocator, pinned memory, generators, hooks.
#include "state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <deque>

namespace emulated {

namespace {

constexpr size_t kRounding = 512;
constexpr size_t kSmall = 1 << 20; // blocks up to this size have a pool of their own

// Allocator ------------------------------------------------------------------------------------------------------

struct Block {
  uintptr_t address;
  size_t size;
  int actor; // of the stream that it was allocated on, whose pool it returns to
  c10::DeviceIndex device;
  bool captured;
  std::vector<int> used_by; // record_stream
  Clock done; // of those streams, when the block was freed
  Range range() const {
    return {address, address + size};
  }
};

struct Pool {
  std::multimap<size_t, Block*> free;
  std::vector<Block*> unsettled; // free, but accesses were not ordered before the freeing when that happened
  std::vector<Block*> waiting; // freed with streams recorded
};

void poison(uintptr_t address, size_t size) {
  std::memset(reinterpret_cast<void*>(address), kPoison, size);
}

class DeviceAllocatorImpl : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Entry entry;
    auto& state = State::get();
    auto& stream = state.current();
    const auto device = stream.stream.device();
    if (bytes == 0)
      return {nullptr, device};
    if (state.capture_origin != nullptr && !stream.capturing)
      state.capture_error("allocation outside of the pool of the capture");
    const auto size = (bytes + kRounding - 1) / kRounding * kRounding;
    auto& pool = pools_[{stream.actor, size > kSmall, stream.capturing}];
    join(stream.clock, state.host_clock);
    settle(pool, stream);
    Block* block = nullptr;
    auto found = pool.free.lower_bound(size);
    if (found != pool.free.end() && found->first <= 2 * size) {
      block = found->second;
      pool.free.erase(found);
    } else {
      void* memory = nullptr;
      TORCH_CHECK(posix_memalign(&memory, kRounding, size) == 0, "out of memory: ", size, " bytes");
      poison(reinterpret_cast<uintptr_t>(memory), size);
      block = new Block{reinterpret_cast<uintptr_t>(memory), size, stream.actor, device.index(), stream.capturing, {}};
      auto& counts = stats_[device.index()];
      counts.reserved += static_cast<int64_t>(size);
      counts.peak_reserved = std::max(counts.peak_reserved, counts.reserved);
    }
    blocks_[block->address] = block;
    auto& counts = stats_[device.index()];
    counts.allocations += 1;
    counts.allocated += static_cast<int64_t>(block->size);
    counts.peak_allocated = std::max(counts.peak_allocated, counts.allocated);
    return {reinterpret_cast<void*>(block->address), reinterpret_cast<void*>(block->address), &release, device};
  }

  static void release(void* pointer) {
    Entry entry;
    self().free(reinterpret_cast<uintptr_t>(pointer));
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {
    Entry entry;
    auto& state = State::get();
    for (auto& [key, pool] : pools_) {
      for (auto* block : pool.waiting)
        ready(pool, block);
      pool.waiting.clear();
      pool.unsettled.clear();
      for (auto& [size, block] : pool.free) {
        stats_[block->device].reserved -= static_cast<int64_t>(size);
        state.forget(block->range());
        std::free(reinterpret_cast<void*>(block->address));
        delete block;
      }
      pool.free.clear();
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Entry entry;
    auto found = blocks_.find(reinterpret_cast<uintptr_t>(pointer.get()));
    if (found != blocks_.end())
      found->second->used_by.push_back(State::get().of(stream).actor);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Entry entry;
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto& counts = stats_[device];
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    for (auto* array : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*array)[all].current = counts.allocated;
      (*array)[all].peak = counts.peak_allocated;
    }
    stats.reserved_bytes[all].current = counts.reserved;
    stats.reserved_bytes[all].peak = counts.peak_reserved;
    stats.allocation[all].allocated = counts.allocations;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Entry entry;
    stats_[device].allocations = 0;
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    Entry entry;
    auto& counts = stats_[device];
    counts.peak_allocated = counts.allocated;
    counts.peak_reserved = counts.reserved;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {size_t{1} << 34, size_t{1} << 35};
  }

  Memory statistics(c10::DeviceIndex device) {
    return stats_[device];
  }

  bool holds(uintptr_t address) {
    auto after = blocks_.upper_bound(address);
    return after != blocks_.begin() && std::prev(after)->second->range().end > address;
  }

  static DeviceAllocatorImpl& self();

 private:
  void free(uintptr_t address) {
    auto& state = State::get();
    auto* block = blocks_.at(address);
    blocks_.erase(address);
    stats_[block->device].allocated -= static_cast<int64_t>(block->size);
    state.freed(block->range());
    poison(block->address, block->size);
    auto& pool = pools_[{block->actor, block->size > kSmall, block->captured}];
    block->done.clear();
    if (!block->used_by.empty()) {
      for (auto actor : block->used_by)
        join(block->done, state.streams.at(actor - 1)->clock);
      block->used_by.clear();
      pool.waiting.push_back(block);
      return;
    }
    auto& owner = *state.streams.at(block->actor - 1);
    Clock clock = owner.clock;
    join(clock, state.host_clock);
    if (!state.unordered(block->range(), clock).empty())
      pool.unsettled.push_back(block);
    pool.free.emplace(block->size, block);
  }

  // What the streams recorded on a block did has been seen to be done: the real allocator asks its events. What others
  // did has not.
  void ready(Pool& pool, Block* block) {
    auto& state = State::get();
    if (state.unordered(block->range(), block->done).empty())
      state.forget(block->range());
    else
      pool.unsettled.push_back(block);
    pool.free.emplace(block->size, block);
  }

  // Whoever allocates next may be given any free block, or several that were split from one and are merged again, so
  // their accesses must be over by then.
  void settle(Pool& pool, StreamState& stream) {
    auto& state = State::get();
    for (auto* block : pool.waiting)
      ready(pool, block);
    pool.waiting.clear();
    for (auto* block : pool.unsettled) {
      auto clock = stream.clock;
      join(clock, block->done);
      auto found = state.unordered(block->range(), clock);
      if (!found.empty())
        state.report("reuse of freed memory", found[0].site, state.site("allocation", stream.actor), block->size);
      state.forget(block->range());
    }
    pool.unsettled.clear();
  }

  std::map<std::tuple<int, bool, bool>, Pool> pools_;
  std::map<uintptr_t, Block*> blocks_;
  std::map<c10::DeviceIndex, Memory> stats_;
};

DeviceAllocatorImpl& DeviceAllocatorImpl::self() {
  static auto* allocator = new DeviceAllocatorImpl();
  return *allocator;
}

// Pinned memory: freed blocks are used again only after the copies from and to them, as torch's allocator sees to.
class PinnedAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Entry entry;
    auto& state = State::get();
    if (state.capture_origin != nullptr)
      state.capture_error("allocation of pinned memory");
    if (bytes == 0)
      return {nullptr, c10::DeviceType::CPU};
    const auto size = (bytes + 63) / 64 * 64;
    void* memory = nullptr;
    auto found = free_.find(size);
    if (found != free_.end() && !found->second.empty()) {
      memory = found->second.front();
      found->second.pop_front();
    } else {
      TORCH_CHECK(posix_memalign(&memory, 64, size) == 0, "out of pinned memory: ", size, " bytes");
    }
    const auto address = reinterpret_cast<uintptr_t>(memory);
    poison(address, size);
    const std::lock_guard<std::mutex> lock(held_mutex_);
    held_[address] = size;
    return {memory, memory, &release, c10::DeviceType::CPU};
  }

  static void release(void* pointer) {
    Entry entry;
    auto& own = self();
    auto& state = State::get();
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    const auto size = own.held_.at(address);
    {
      const std::lock_guard<std::mutex> lock(own.held_mutex_);
      own.held_.erase(address);
    }
    state.freed({address, address + size});
    state.forget({address, address + size});
    poison(address, size);
    own.free_[size].push_back(pointer);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  bool holds(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    const std::lock_guard<std::mutex> lock(held_mutex_);
    auto after = held_.upper_bound(address);
    return after != held_.begin() && std::prev(after)->first + std::prev(after)->second > address;
  }

  bool empty() const {
    const std::lock_guard<std::mutex> lock(held_mutex_);
    return held_.empty();
  }

  static PinnedAllocator& self() {
    static auto* allocator = new PinnedAllocator();
    return *allocator;
  }

 private:
  // Not the state's: that one is held while the host waits for gloo, whose threads ask whether memory is pinned.
  mutable std::mutex held_mutex_;
  std::map<uintptr_t, size_t> held_;
  std::map<size_t, std::deque<void*>> free_;
};

// Guard: streams and events --------------------------------------------------------------------------------------

struct GuardImpl final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kDevice, State::get().current_device()};
  }
  void setDevice(c10::Device device) const override {
    if (device.has_index())
      State::get().set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    setDevice(device);
  }
  c10::Stream getStream(c10::Device device) const override {
    Entry entry;
    return State::get().current(device.index()).stream;
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getNewStream(c10::Device device, int priority = 0) const override {
    Entry entry;
    auto& state = State::get();
    auto made = state.make_stream(device.has_index() ? device.index() : state.current_device());
    state.count(&Counted::streams_made, state.site("a new stream", kHost));
    return made;
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    Entry entry;
    return State::get().exchange_stream(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    Entry entry;
    auto& state = State::get();
    if (state.capture_origin != nullptr)
      state.capture_error("query of a stream");
    return state.reached(state.of(stream).clock);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Entry entry;
    auto& state = State::get();
    state.host_wait(state.of(stream).clock, state.site("synchronization of a stream", kHost));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Entry entry;
    auto& state = State::get();
    Clock all;
    for (auto& stream : state.streams)
      if (stream->stream.device_index() == device)
        join(all, stream->clock);
    state.host_wait(all, state.site("synchronization of the device", kHost));
  }
  bool isStreamCapturing(const c10::Stream& stream) const { // an override since torch 2.13
    return State::get().of(stream).capturing;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Entry entry;
    auto& state = State::get();
    if (*event == nullptr) {
      *event = new EventState();
      state.count(&Counted::events_made, state.site("a new event", kHost));
    }
    auto& own = *static_cast<EventState*>(*event);
    auto& of = state.of(stream);
    join(of.clock, state.host_clock);
    own = EventState{of.clock, of.actor, of.capturing, 0, std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    Entry entry;
    if (event == nullptr)
      return;
    auto& state = State::get();
    auto& own = *static_cast<EventState*>(event);
    auto& of = state.of(stream);
    if (state.capture_origin != nullptr) {
      if (own.capturing)
        of.capturing = true;
      else if (of.capturing)
        state.capture_error("a captured stream waits for an event that was recorded outside of the capture");
    }
    state.wait(of, own.clock);
  }
  bool queryEvent(void* event) const override {
    Entry entry;
    auto& state = State::get();
    if (state.capture_origin != nullptr)
      state.capture_error("query of an event");
    if (event == nullptr)
      return true;
    // "Not yet" unless the host knows better; whoever asks again and again is told so in the end.
    auto& own = *static_cast<EventState*>(event);
    if (state.reached(own.clock))
      return true;
    if (++own.queries % 2 == 1)
      return false;
    join(state.host_clock, own.clock);
    state.land_before(state.host_clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    Entry entry;
    if (event == nullptr)
      return;
    auto& state = State::get();
    state.host_wait(static_cast<EventState*>(event)->clock, state.site("synchronization of an event", kHost));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    // Of the host, which is how long this device takes: kernels are through as they are launched.
    const auto between = static_cast<EventState*>(second)->recorded - static_cast<EventState*>(first)->recorded;
    return std::chrono::duration<double, std::milli>(between).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    DeviceAllocatorImpl::self().recordStream(pointer, stream);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(State::get().device_count);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

// Generators: one of the CPU's inside, with another device on the outside ----------------------------------------

struct EmulatedGenerator : public c10::GeneratorImpl {
  explicit EmulatedGenerator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kDevice, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    inner.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return inner.get_offset();
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new EmulatedGenerator(device_.index());
    copy->inner = inner.clone();
    return copy;
  }
  at::Generator inner;
};

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>();
    for (int index = 0; index < State::get().device_count; ++index)
      made->push_back(at::make_generator<EmulatedGenerator>(static_cast<c10::DeviceIndex>(index)));
    return made;
  }();
  return generators->at(device < 0 ? State::get().current_device() : device);
}

// Hooks ----------------------------------------------------------------------------------------------------------

struct Hooks : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(State::get().device_count);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    State::get().set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return State::get().current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &PinnedAllocator::self();
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    return {kDevice, State::get().current_device()};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<EmulatedGenerator>(device < 0 ? State::get().current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    Entry entry;
    const auto before = storage.nbytes();
    c10::DataPtr made = DeviceAllocatorImpl::self().allocate(bytes);
    if (bytes != 0 && before != 0 && storage.data() != nullptr) {
      auto& state = State::get();
      auto& stream = state.current();
      state.launch(stream, "resize of a storage");
      const auto site = state.site("resize of a storage", stream.actor);
      const auto kept = std::min(before, bytes);
      const auto from = reinterpret_cast<uintptr_t>(storage.data()), to = reinterpret_cast<uintptr_t>(made.get());
      state.touch({from, from + kept}, false, &stream, site);
      state.touch({to, to + kept}, true, &stream, site);
      std::memcpy(made.get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(made));
    storage.set_nbytes(bytes);
  }
};

const bool registered = [] {
  c10::SetAllocator(kDevice, &DeviceAllocatorImpl::self());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace

Memory memory(c10::DeviceIndex device) {
  Entry entry;
  return DeviceAllocatorImpl::self().statistics(device);
}

void reset_peak(c10::DeviceIndex device) {
  DeviceAllocatorImpl::self().resetPeakStats(device);
}

bool is_pinned(const void* pointer) {
  return PinnedAllocator::self().holds(pointer);
}

bool has_pinned() {
  return !PinnedAllocator::self().empty();
}

c10::Allocator* device_allocator() {
  return &DeviceAllocatorImpl::self();
}

at::Generator host_generator(const std::optional<at::Generator>& generator) {
  const auto& own = generator.has_value() && generator->defined() ? *generator : default_generator(-1);
  if (own.device().type() != kDevice)
    return own;
  return static_cast<EmulatedGenerator*>(own.unsafeGetGeneratorImpl())->inner;
}

void start_capture() {
  Entry entry;
  auto& state = State::get();
  TORCH_CHECK(state.capture_origin == nullptr, "a capture is under way");
  state.counted.capture_errors.clear();
  state.graph.clear();
  state.capture_origin = &state.current();
  state.capture_origin->capturing = true;
}

void end_capture() {
  Entry entry;
  auto& state = State::get();
  auto& origin = *state.capture_origin;
  for (auto& stream : state.streams) {
    if (!stream->capturing)
      continue;
    const auto actor = static_cast<size_t>(stream->actor);
    const auto own = actor < stream->clock.size() ? stream->clock[actor] : 0;
    if (stream.get() != &origin && (actor < origin.clock.size() ? origin.clock[actor] : 0) < own)
      state.capture_error("stream " + std::to_string(stream->stream.id()) + " was not joined to the captured one");
    stream->capturing = false;
  }
  state.capture_origin = nullptr;
}

void replay() {
  Entry entry;
  auto& state = State::get();
  auto& stream = state.current();
  state.host_wait(stream.clock, state.site("replay", kHost)); // all that it reads has landed
  for (const auto& launched : state.graph)
    launched();
}

} // namespace emulated
