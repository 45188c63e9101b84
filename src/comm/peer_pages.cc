#include "comm/peer_pages.h"

#include <algorithm>
#include <cstring>

#include "comm/gpu/gpu_identity.h"
#include "comm/machine.h"
#include "device/out_of_memory.h"

namespace moebius {
namespace {

constexpr int64_t kMinTriedBytes = int64_t{2} << 20;  // CUDA shares whole pages of this size with other processes

// Each rank sends this to all others before it sends handles. Texts are padded with zeros.
struct Introduction {
  ProcessId process;
  char machine[160] = {};
  char gpu[48] = {};
  bool is_on(const Introduction& other) const { return std::strcmp(machine, other.machine) == 0; }
};

struct Answer {
  char why[400] = {};  // the reason why it cannot access the memory of some rank; empty: it can access that of all
};

template <size_t kSize>
void put(char (&to)[kSize], const std::string& text) {
  std::memcpy(to, text.data(), std::min(text.size(), kSize - 1));
}

template <class T>
std::vector<T> gathered(Group& group, const T& mine) {
  ThreadPool pool(1);
  Stream host(DeviceKind::cpu, pool);
  std::vector<T> all(group.size());
  const auto bytes = [](const void* p, int64_t n) {
    return tensor_of(static_cast<uint8_t*>(const_cast<void*>(p)), {n});
  };
  group.all_gather(host, bytes(all.data(), std::ssize(all) * int64_t{sizeof(T)}), bytes(&mine, sizeof(T)));
  return all;
}

// Exchanges handles: sends mine[r] to rank r, and returns the handle from each rank, by rank.
std::vector<PeerHandle> exchanged(Group& group, std::vector<PeerHandle>& mine) {
  ThreadPool pool(1);
  Stream host(DeviceKind::cpu, pool);
  const int64_t n = group.size(), bytes = sizeof(PeerHandle);
  std::vector<PeerHandle> theirs(n);
  const std::vector<int64_t> one(n, 1);
  const auto rows = [&](std::vector<PeerHandle>& x) {
    return tensor_of(reinterpret_cast<uint8_t*>(x.data()), {n, bytes});
  };
  group.all_to_all_v(host, {.out = rows(theirs), .in = rows(mine), .recv_rows = one, .send_rows = one});
  return theirs;
}

// Returns the reason why the memory cannot be accessed, or an empty text.
std::string open(PeerMemory& memory, const PeerHandle& handle) {
  try {
    memory = PeerMemory(handle);
    return "";
  } catch (const Error& e) {
    return e.what();
  }
}

PeerMemory tried_memory(DeviceKind device, int64_t num_bytes) {
  try {
    return PeerMemory(device, std::max(num_bytes, kMinTriedBytes));
  } catch (const OutOfMemory&) {
    return PeerMemory(device, kMinTriedBytes);
  }
}

std::string first_of(const std::vector<Answer>& answers) {
  for (const Answer& each : answers)
    if (each.why[0] != 0) return each.why;
  return "";
}

// Every rank writes its number to all windows. Returns a text with the ranks whose numbers did not arrive here, or an
// empty text.
std::string missing_marks_text(Stream& s, Group& group, const PeerPages& pages) {
  const int me = group.rank();
  const int64_t mark = me + 1;
  for (std::byte* window : pages.windows) copy_to_device(s, window + 8 * me, &mark, sizeof mark);
  synchronize(s);
  group.barrier();
  std::vector<int64_t> marks(group.size());
  copy_to_host(s, marks.data(), pages.windows[me], std::ssize(marks) * 8);
  for (int r = 0; r < group.size(); ++r)
    if (marks[r] != r + 1)
      return fmt::format("{} does not see what {} writes to its memory", group.rank_name(me), group.rank_name(r));
  return "";
}

}  // namespace

PeerPages open_peers(Group& group, const PeerMemory& memory, const Tensor& window) {
  const int me = group.rank(), n = group.size();
  const bool on_gpu = window.device == DeviceKind::cuda;
  Introduction mine{.process = this_process()};
  put(mine.machine, machine_name());
  if (on_gpu) put(mine.gpu, gpu_identity_of(memory.data()));
  const std::vector<Introduction> ranks = gathered(group, mine);
  std::vector<PeerHandle> handles(n);
  for (int r = 0; r < n; ++r)
    if (r != me && ranks[r].is_on(mine)) handles[r] = memory.handle_for(ranks[r].process);
  const std::vector<PeerHandle> theirs = exchanged(group, handles);
  auto* const begin = static_cast<std::byte*>(window.data);
  const std::vector<int64_t> offsets = gathered(group, int64_t{begin - static_cast<std::byte*>(memory.data())});

  PeerPages pages{.memories = std::vector<PeerMemory>(n), .windows = std::vector<std::byte*>(n)};
  Answer answer;
  pages.windows[me] = begin;
  for (int r = 0; r < n; ++r) {
    if (r == me) continue;
    std::string why;
    if (!ranks[r].is_on(mine))
      why = fmt::format("{} is on another machine than {}", group.rank_name(r), group.rank_name(me));
    else if (why = open(pages.memories[r], theirs[r]); !why.empty())
      why = fmt::format("{} cannot reach the memory of {}: {}", group.rank_name(me), group.rank_name(r), why);
    else
      pages.windows[r] = static_cast<std::byte*>(pages.memories[r].data()) + offsets[r];
    if (answer.why[0] == 0) put(answer.why, why);
    pages.shares_gpu |= on_gpu && std::strcmp(ranks[r].gpu, mine.gpu) == 0;
  }
  pages.why_no_access = first_of(gathered(group, answer));
  return pages;
}

std::string why_no_peer_access(Stream& s, Group& group, Group& world, int64_t num_bytes) {
  PeerMemory memory;
  Answer answer;
  try {
    memory = tried_memory(s.device(), num_bytes);
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::usage) throw;
    put(answer.why, fmt::format("{} cannot make memory for other ranks: {}", group.rank_name(group.rank()), e.what()));
  }
  const std::string unmade = first_of(gathered(group, answer));
  put(answer.why, unmade);
  if (unmade.empty()) {
    const Tensor window{.data = memory.data(), .shape = {kMinTriedBytes}, .dtype = DType::u8, .device = s.device()};
    const PeerPages pages = open_peers(group, memory, window);
    put(answer.why, pages.why_no_access.empty() ? missing_marks_text(s, group, pages) : pages.why_no_access);
  }
  return first_of(gathered(world, answer));  // no rank frees memory that another has open before this
}

}  // namespace moebius
