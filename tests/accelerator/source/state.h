// The state of the emulated accelerator: streams with vector clocks, the allocator's blocks, who touched which byte.
//
// There is no asynchronous execution. Kernels run at once, on the host thread that launches them. What a real device
// may reorder is kept track of instead: every stream, and the host, is an actor with a vector clock, and everything
// that touches memory is checked against what touched the same bytes before. So a missing event is found whatever
// the timing. Only what arrives from elsewhere (collectives, copies to the host) is late: it lands when the first
// operation that is ordered after it runs, and its target reads as NaN until then.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace emulated {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kHost = 0; // the actor that all host threads are: they hand over to each other, they do not race
constexpr uint8_t kPoison = 0xFF; // NaN in nearly all floating-point formats

using Clock = std::vector<uint32_t>; // by actor; missing entries are 0
void join(Clock& into, const Clock& other);
bool reaches(const Clock& clock, const Clock& other); // whether it is after all of the other one

// What touched memory: for reports.
struct Site {
  std::string what;
  std::string actor;
  std::shared_ptr<torch::CapturedTraceback> stack;
};
using SitePtr = std::shared_ptr<Site>;

struct Range {
  uintptr_t begin, end;
};

// Something that has been launched and lands later. `land` blocks the host until it can, then writes.
struct Late {
  uint32_t epoch;
  std::vector<Range> targets;
  std::function<void(const std::vector<Range>& gone)> land; // targets within `gone` were freed meanwhile
  std::vector<Range> gone;
};

struct StreamState {
  int actor;
  c10::Stream stream;
  Clock clock;
  std::vector<std::shared_ptr<Late>> late; // in the order of the stream
  bool capturing = false;
};

struct Access {
  int actor;
  uint32_t epoch;
  SitePtr site;
};

struct Race {
  std::string kind;
  SitePtr first, second;
  uint64_t bytes;
};

// An event that was recorded, or none yet.
struct EventState {
  Clock clock;
  int actor = -1;
  bool capturing = false; // recorded during a capture
  int queries = 0;
  std::chrono::steady_clock::time_point recorded;
};

// Counts of a period, for tests; with the stacks of what was counted.
struct Counted {
  std::vector<SitePtr> host_syncs, events_made, streams_made, capture_errors;
};

// Held by everything that the accelerator is asked for. No thread waits for the mutex while it holds the GIL, which
// whoever has the mutex may need. The outermost entry takes the caller's Python stack before, and drops what is in
// `State::dropped` after.
class Entry {
 public:
  Entry();
  static bool inside(); // whether the calling thread holds one

 private:
  std::vector<at::Tensor> dropped_; // destroyed last, when the mutex is free
  std::unique_lock<std::recursive_mutex> lock_;
  struct Leave {
    std::vector<at::Tensor>& dropped;
    ~Leave();
  } leave_{dropped_};
};

// Tensors of a collective whose work was dropped: they live until the host has seen the end of it.
struct Shelved {
  Clock end;
  std::vector<at::Tensor> tensors;
};

class State {
 public:
  static State& get();

  std::recursive_mutex mutex;

  // Streams
  int device_count = 4;
  StreamState& current(c10::DeviceIndex device = -1); // of the calling thread
  c10::DeviceIndex current_device() const;
  void set_current_device(c10::DeviceIndex device);
  c10::Stream exchange_stream(const c10::Stream& stream);
  StreamState& of(const c10::Stream& stream);
  c10::Stream make_stream(c10::DeviceIndex device);

  // Order. `launch` begins an operation on a stream: it is after all that the host has seen, and all that is ordered
  // before it lands first. Returns its epoch.
  uint32_t launch(StreamState& stream, const char* what = "", bool lands = true);
  void wait(StreamState& stream, const Clock& clock);
  void host_wait(const Clock& clock, const SitePtr& site); // a host synchronization
  bool reached(const Clock& clock) const; // whether the host knows that all of it is done
  void land_before(const Clock& clock);
  void add_late(StreamState& stream, const std::shared_ptr<Late>& late);
  void host_step(); // the host is about to touch host memory

  // Memory
  void touch(const Range& range, bool write, StreamState* stream, const SitePtr& site);
  void forget(const Range& range);
  void freed(const Range& range); // by the host: what is still to land there never does
  bool ordered(const Access& access, const Clock& clock) const;
  // The accesses to `range` that are not ordered before `clock`.
  std::vector<Access> unordered(const Range& range, const Clock& clock);
  void report(const std::string& kind, const SitePtr& first, const SitePtr& second, uint64_t bytes);

  SitePtr site(std::string what, int actor);
  void count(std::vector<SitePtr> Counted::*which, const SitePtr& site);
  void capture_error(const std::string& what);

  std::vector<std::unique_ptr<StreamState>> streams; // by actor - 1
  Clock host_clock{1};
  std::vector<Race> races;
  std::vector<Shelved> shelf;
  std::vector<at::Tensor> dropped;
  Counted counted;
  bool counting = false;
  bool checking = true;
  bool late_delivery = true;
  bool stacks = true;
  StreamState* capture_origin = nullptr;
  // What the last capture has launched, by addresses: the memory of a graph's tensors is whoever's has it at a replay.
  std::vector<std::function<void()>> graph;

 private:
  State();
  struct Cell {
    uintptr_t end;
    Access write{-1, 0, nullptr};
    std::vector<Access> reads;
  };
  std::map<uintptr_t, Cell> cells_;
  size_t late_count_ = 0;
  void split(uintptr_t at);
};

// Statistics of the allocator.
struct Memory {
  int64_t allocated = 0, peak_allocated = 0, reserved = 0, peak_reserved = 0, allocations = 0;
};
Memory memory(c10::DeviceIndex device);
void reset_peak(c10::DeviceIndex device);
bool is_pinned(const void* pointer);
bool has_pinned();
void start_capture();
void end_capture();
void replay();

// Byte ranges that a tensor covers: its dense runs, or their common range if they are many.
std::vector<Range> ranges(const at::Tensor& tensor);

at::Generator host_generator(const std::optional<at::Generator>& generator); // what draws for a device's generator
c10::Allocator* device_allocator();
void observe_host(); // from now on, record what CPU kernels do to pinned memory

} // namespace emulated
