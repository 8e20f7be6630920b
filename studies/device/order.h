// Who may see what: streams, events and the host have vector clocks, and so every use of memory is checked.
//
// Work runs when it is given, so results are reproducible; what a real queue would do late is checked, not hoped for. A use
// of memory that no wait puts behind the use before it is a race, whatever bits it would have given. A copy to the host that
// nobody has waited for is not yet there: its target holds garbage. The source of a copy from pinned memory must be as it was
// when the copy is waited for.

#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace order {

using Queue = std::pair<int, int64_t>;  // a device and a stream of it
using Clock = std::map<Queue, uint64_t>;

inline void join(Clock& clock, const Clock& other) {
  for (const auto& [queue, at] : other) clock[queue] = std::max(clock[queue], at);
}

inline bool knows(const Clock& clock, const Queue& queue, uint64_t at) {
  const auto found = clock.find(queue);
  return found != clock.end() && found->second >= at;
}

struct Uses {
  Queue home;  // the stream that was current when the memory was allocated
  Queue wrote;
  uint64_t wrote_at = 0;
  Clock read;
  std::set<Queue> recorded;  // by record_stream
};

struct Event {
  Clock clock;
  bool asked = false;
  std::chrono::steady_clock::time_point when;
};

// A copy that the host has not waited for.
struct Pending {
  Queue queue;
  uint64_t at;
  char* host;
  std::vector<char> bytes;
  bool out;  // to the host
};

inline std::recursive_mutex lock;
inline std::map<Queue, Clock> clocks;
inline Clock host;
inline std::list<Pending> pending;
inline std::vector<std::string> races;
inline thread_local std::map<int, int64_t> current;  // device -> stream
inline thread_local int inside = 0;                  // a kernel of the processor's, whose copies are part of it

using Held = std::lock_guard<std::recursive_mutex>;

inline Queue current_queue(int device) { return {device, current[device]}; }

inline std::string name(const Queue& queue) {
  return "stream " + std::to_string(queue.second) + " of device " + std::to_string(queue.first);
}

inline void race(const std::string& what, bool raise = true) {
  races.push_back(what);
  TORCH_CHECK(!raise, "race: ", what);
}

inline uint64_t launch(const Queue& queue) {
  Clock& clock = clocks[queue];
  join(clock, host);
  return ++clock[queue];
}

inline void read(Uses& uses, const Queue& queue, uint64_t at) {
  if (uses.wrote_at && uses.wrote != queue && !knows(clocks[queue], uses.wrote, uses.wrote_at))
    race(name(queue) + " reads what " + name(uses.wrote) + " writes, without a wait");
  uses.read[queue] = at;
}

inline void write(Uses& uses, const Queue& queue, uint64_t at) {
  if (uses.wrote_at && uses.wrote != queue && !knows(clocks[queue], uses.wrote, uses.wrote_at))
    race(name(queue) + " writes what " + name(uses.wrote) + " writes, without a wait");
  for (const auto& [reader, when] : uses.read)
    if (reader != queue && !knows(clocks[queue], reader, when))
      race(name(queue) + " writes what " + name(reader) + " reads, without a wait");
  uses.wrote = queue;
  uses.wrote_at = at;
  uses.read.clear();
}

// Freed memory is given out again on its home stream, at once.
inline void freed(const Uses& uses) {
  auto safe = [&](const Queue& queue, uint64_t at) {
    return queue == uses.home || uses.recorded.count(queue) || knows(host, queue, at) || knows(clocks[uses.home], queue, at);
  };
  if (uses.wrote_at && !safe(uses.wrote, uses.wrote_at)) race("freed while " + name(uses.wrote) + " writes it", false);
  for (const auto& [queue, at] : uses.read)
    if (!safe(queue, at)) race("freed while " + name(queue) + " reads it", false);
}

// -- pinned memory of the host's: kept until the copies that use it are done

inline std::map<char*, std::pair<size_t, bool>> pinned;  // where it begins -> bytes, freed

inline std::map<char*, std::pair<size_t, bool>>::iterator pinned_at(const void* address) {
  auto found = pinned.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (found == pinned.begin()) return pinned.end();
  --found;
  return static_cast<const char*>(address) < found->first + found->second.first ? found : pinned.end();
}

inline void unmap_unused(char* begin) {
  const auto found = pinned.find(begin);
  if (found == pinned.end() || !found->second.second) return;
  for (const auto& one : pending)
    if (one.host >= begin && one.host < begin + found->second.first) return;
  munmap(begin, found->second.first);
  pinned.erase(found);
}

inline void host_knows(const Clock& clock) {
  join(host, clock);
  std::vector<char*> touched;
  for (auto one = pending.begin(); one != pending.end();) {
    if (!knows(host, one->queue, one->at)) {
      ++one;
      continue;
    }
    const auto block = pinned_at(one->host);
    const bool gone = block != pinned.end() && block->second.second;
    if (one->out) {
      if (!gone) std::memcpy(one->host, one->bytes.data(), one->bytes.size());
    } else if (!gone && std::memcmp(one->host, one->bytes.data(), one->bytes.size())) {
      race("the host writes pinned memory that " + name(one->queue) + " copies from, without a wait", false);
    }
    if (block != pinned.end()) touched.push_back(block->first);
    one = pending.erase(one);
  }
  for (char* begin : touched) unmap_unused(begin);
}

}  // namespace order
