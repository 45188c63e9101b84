#include "ops/gemm/cpu/dnnl_gemm.h"

#include <sys/mman.h>

#include <cstring>
#include <dnnl.hpp>
#include <list>
#include <new>
#include <unordered_map>

#include "core/error.h"

namespace moebius::cpu {
namespace {

struct Key {
  int64_t m, n, k, lda, ldb, ldc;
  uint64_t flags;
  bool operator==(const Key&) const = default;
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t words[7], hash = 0;
    static_assert(sizeof words == sizeof key);
    std::memcpy(words, &key, sizeof key);
    for (const uint64_t word : words) hash = (hash ^ word) * 0x9E3779B97F4A7C15u ^ (hash >> 29);
    return hash;
  }
};

Key key_of(const TileGemm& g) {
  const uint64_t flags = uint64_t{g.a.dtype == DType::bf16} | uint64_t{g.c.dtype == DType::bf16} << 1 |
                         uint64_t{g.a.transposed} << 2 | uint64_t{g.b.transposed} << 3 | uint64_t{g.accumulate} << 4;
  return {g.m, g.n, g.k, g.a.ld, g.b.ld, g.c.ld, flags};
}

dnnl::memory::desc desc_of(const Matrix& x, int64_t rows, int64_t cols) {
  const auto type = x.dtype == DType::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
  const dnnl::memory::dims strides = x.transposed ? dnnl::memory::dims{1, x.ld} : dnnl::memory::dims{x.ld, 1};
  return {{rows, cols}, type, strides};
}

// oneDNN reads and writes address 0 if it gets no memory for the code that it generates. So the limit of addresses is
// tried first, with a few times the bytes of one primitive.
void check_memory_of_code() {
  constexpr size_t kBytes = size_t{2} << 20;
  void* const probe = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (probe == MAP_FAILED) throw std::bad_alloc();
  ::munmap(probe, kBytes);
}

// A primitive with memory objects, whose pointers are set for each call.
struct Primitive {
  Primitive(const dnnl::engine& engine, const TileGemm& g)
      : a(desc_of(g.a, g.m, g.k), engine, nullptr),
        b(desc_of(g.b, g.k, g.n), engine, nullptr),
        c(desc_of(g.c, g.m, g.n), engine, nullptr) {
    dnnl::post_ops post_ops;
    if (g.accumulate) post_ops.append_sum(1.0f);
    dnnl::primitive_attr attr;
    attr.set_post_ops(post_ops);
    const dnnl::matmul::desc desc(a.get_desc(), b.get_desc(), c.get_desc());
    matmul = dnnl::matmul(dnnl::matmul::primitive_desc(desc, attr, engine));
  }

  void run(const dnnl::stream& stream, const TileGemm& g) {
    a.set_data_handle(g.a.data);
    b.set_data_handle(g.b.data);
    c.set_data_handle(g.c.data);
    matmul.execute(stream, {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}});
  }

  dnnl::memory a, b, c;
  dnnl::matmul matmul;
};

// The primitives of one thread, least recently used last.
class Primitives {
 public:
  void run(const TileGemm& g) { find(g).run(stream_, g); }

 private:
  using Entries = std::list<std::pair<Key, Primitive>>;

  Primitive& find(const TileGemm& g) {
    const Key key = key_of(g);
    if (const auto it = index_.find(key); it != index_.end()) {
      entries_.splice(entries_.begin(), entries_, it->second);
      return it->second->second;
    }
    check_memory_of_code();
    if (entries_.size() >= kMaxPrimitives) {
      index_.erase(entries_.back().first);
      entries_.pop_back();
    }
    entries_.emplace_front(key, Primitive(engine_, g));
    index_[key] = entries_.begin();
    return entries_.front().second;
  }

  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  Entries entries_;
  std::unordered_map<Key, Entries::iterator, KeyHash> index_;
};

}  // namespace

void dnnl_gemm(const TileGemm& g) {
  // Each thread has a cache, which needs no locks; callers can only notice it in the time.
  thread_local Primitives primitives;
  try {
    primitives.run(g);
  } catch (const dnnl::error& e) {
    if (e.status == dnnl_out_of_memory) throw std::bad_alloc();
    MOEBIUS_FAIL(internal, "dnnl_gemm: oneDNN refused {} x {} x {}: {}", g.m, g.n, g.k, e.what());
  }
}

}  // namespace moebius::cpu
