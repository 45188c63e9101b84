// Attention by cuDNN's fused kernels, for causal bf16 sequences without documents and for parts of
// them. Tensors are read and written where they are. The backward pass is the deterministic one:
// cuDNN keeps a [rows, kv_rows] matrix of gradients for each head in its workspace, so that
// sequences, and heads of a long one, are taken a few at a time.
//
// Only this file includes cuDNN's frontend, which is slow to compile.
#include <cudnn_frontend.h>

#include <algorithm>
#include <compare>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>

#include "device/cuda/cuda.h"
#include "device/out_of_memory.h"
#include "ops/attention/cuda/attention.h"
#include "ops/gemm/cublas_lt.h"

namespace moebius::cuda {
namespace {

namespace fe = cudnn_frontend;
using Pointers = std::unordered_map<int64_t, void*>;

// Names of tensors in graphs.
enum Id : int64_t { kQ = 1, kK, kV, kO, kLse, kDo, kDq, kDk, kDv };

void check(fe::error_t status, const char* who, const char* what) {
  if (status.is_good()) return;
  throw_library_error(ErrorKind::internal, fmt::format("{}: cuDNN: {}: {}", who, what, status.get_message()));
}
void check(cudnnStatus_t status, const char* call) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw_library_error(ErrorKind::internal, fmt::format("attention: {}: {}", call, cudnnGetErrorString(status)));
}

// Returns whether cuDNN has no kernel for a graph, rather than failed.
bool is_refusal(fe::error_t status) {
  switch (status.get_code()) {
    case fe::error_code_t::GRAPH_NOT_SUPPORTED:
    case fe::error_code_t::UNSUPPORTED_GRAPH_FORMAT:
    case fe::error_code_t::HEURISTIC_QUERY_FAILED:
    case fe::error_code_t::GRAPH_EXECUTION_PLAN_CREATION_FAILED:
      return true;
    default:
      return false;
  }
}

constexpr int64_t kRefused = INT64_MAX;  // the workspace of a graph that was refused

// The key of a graph: its sizes, and the numbers of heads and keys of the tensors of which it processes a part.
struct Key {
  bool backward, causal;  // not causal: every query attends to every key
  int64_t batch, rows, kv_rows, heads, kv_heads, width, v_width, window, all_heads, all_kv_heads, all_kv_rows;
  float scale;
  auto operator<=>(const Key&) const = default;
};

struct Graph {
  fe::graph::Graph graph;
  int64_t workspace_bytes = 0;
};

// Describes a tensor that is [batch, rows, all heads, width] in memory, in cuDNN's order of dimensions.
fe::graph::Tensor_attributes heads_of(const Key& key, const char* name, Id id, int64_t width) {
  const int64_t stride = key.all_heads * width;
  return fe::graph::Tensor_attributes()
      .set_name(name)
      .set_uid(id)
      .set_dim({key.batch, key.heads, key.rows, width})
      .set_stride({key.rows * stride, width, stride, 1});
}

// Does the same for keys or values.
fe::graph::Tensor_attributes kv_heads_of(const Key& key, const char* name, Id id, int64_t width) {
  const int64_t stride = key.all_kv_heads * width;
  return fe::graph::Tensor_attributes()
      .set_name(name)
      .set_uid(id)
      .set_dim({key.batch, key.kv_heads, key.kv_rows, width})
      .set_stride({key.all_kv_rows * stride, width, stride, 1});
}

void set_output(const std::shared_ptr<fe::graph::Tensor_attributes>& to, const fe::graph::Tensor_attributes& like) {
  to->set_output(true).set_uid(like.get_uid()).set_dim(like.get_dim()).set_stride(like.get_stride());
}

template <class Options>
Options options_of(const Key& key, const char* name) {
  Options options;
  options.set_name(name);
  options.set_attn_scale(key.scale);
  if (!key.causal) return options;
  // The last query attends to the last key.
  options.set_diagonal_alignment(key.rows == key.kv_rows ? fe::DiagonalAlignment_t::TOP_LEFT
                                                         : fe::DiagonalAlignment_t::BOTTOM_RIGHT);
  options.set_diagonal_band_right_bound(0);
  if (key.window > 0) options.set_diagonal_band_left_bound(narrow<int>(key.window));
  return options;
}

void describe_fwd(fe::graph::Graph& graph, const Key& key) {
  const auto q = graph.tensor(heads_of(key, "q", kQ, key.width)),
             k = graph.tensor(kv_heads_of(key, "k", kK, key.width)),
             v = graph.tensor(kv_heads_of(key, "v", kV, key.v_width));
  auto options = options_of<fe::graph::SDPA_attributes>(key, "attention_fwd");
  options.set_generate_stats(true);
  const auto [o, lse] = graph.sdpa(q, k, v, options);
  set_output(o, heads_of(key, "o", kO, key.v_width));
  lse->set_output(true)
      .set_uid(kLse)
      .set_data_type(fe::DataType_t::FLOAT)
      .set_dim({key.batch, key.heads, key.rows, 1})
      .set_stride({key.rows * key.all_heads, 1, key.all_heads, 1});
}

void describe_bwd(fe::graph::Graph& graph, const Key& key) {
  const auto q = graph.tensor(heads_of(key, "q", kQ, key.width)),
             k = graph.tensor(kv_heads_of(key, "k", kK, key.width)),
             v = graph.tensor(kv_heads_of(key, "v", kV, key.v_width)),
             o = graph.tensor(heads_of(key, "o", kO, key.v_width)),
             dout = graph.tensor(heads_of(key, "do", kDo, key.v_width));
  const auto lse = graph.tensor(fe::graph::Tensor_attributes()
                                    .set_name("lse")
                                    .set_uid(kLse)
                                    .set_data_type(fe::DataType_t::FLOAT)
                                    .set_dim({key.batch, key.heads, key.rows, 1})
                                    .set_stride({key.heads * key.rows, key.rows, 1, 1}));
  auto options = options_of<fe::graph::SDPA_backward_attributes>(key, "attention_bwd");
  options.set_deterministic_algorithm(true);
  const auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, o, dout, lse, options);
  set_output(dq, heads_of(key, "dq", kDq, key.width));
  set_output(dk, kv_heads_of(key, "dk", kDk, key.width));
  set_output(dv, kv_heads_of(key, "dv", kDv, key.v_width));
}

// The state of this op on a device: cuDNN's handle, and a graph for each shape. Building one takes
// about 0.1 s.
class Cudnn {
 public:
  Cudnn() {
    open_cublas_lt();  // the library that gemm uses, not the one that cuDNN would find
    check(cudnnCreate(&handle_), "cudnnCreate");
  }
  ~Cudnn() {
    graphs_.clear();
    cudnnDestroy(handle_);
  }
  Cudnn(const Cudnn&) = delete;

  // Returns false if the graph needs a larger workspace, or this cuDNN has no kernel for it on this GPU.
  bool run(Stream& s, const Key& key, Pointers& pointers, void* workspace, int64_t workspace_bytes) {
    const char* who = key.backward ? "attention_bwd" : "attention_fwd";
    const Graph& g = find(key, who);
    if (g.workspace_bytes > workspace_bytes) return false;
    check(cudnnSetStream(handle_, cuda_stream(s)), "cudnnSetStream");
    check(g.graph.execute(handle_, pointers, workspace), who, "execute");
    return true;
  }

 private:
  const Graph& find(const Key& key, const char* who) {
    std::unique_ptr<Graph>& slot = graphs_[key];
    if (slot) return *slot;
    auto g = std::make_unique<Graph>();
    g->graph.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (key.backward)
      describe_bwd(g->graph, key);
    else
      describe_fwd(g->graph, key);
    const fe::error_t built = g->graph.build(handle_, {fe::HeurMode_t::A});
    if (is_refusal(built)) {
      g->workspace_bytes = kRefused;
    } else {
      check(built, who, "build");
      check(g->graph.get_workspace_size(g->workspace_bytes), who, "workspace size");
    }
    slot = std::move(g);
    return *slot;
  }

  cudnnHandle_t handle_ = nullptr;
  std::map<Key, std::unique_ptr<Graph>> graphs_;
};

// Short sequences are not worth a graph.
constexpr int64_t kMinRows = 64;
// cuDNN takes heads of these widths.
constexpr int kMinWidth = 32, kMaxWidth = 256;

// The keys that cuDNN is given, and how they are masked.
struct Keys {
  int64_t rows;
  bool causal;
};

// Returns the keys of a sequence, or of a part in which every query attends to all keys, or to all but those after it.
// Returns nothing if cuDNN cannot mask the keys in this way.
std::optional<Keys> keys_of(const AttentionSizes& z, bool is_part) {
  if (!is_part) return z.rows == z.kv_rows ? std::optional(Keys{z.kv_rows, true}) : std::nullopt;
  if (z.window > 0 || z.shift < 0) return std::nullopt;
  if (z.shift >= z.kv_rows - 1) return Keys{z.kv_rows, false};
  // Keys after the last query are left out.
  if (z.shift + z.rows <= z.kv_rows) return Keys{z.shift + z.rows, true};
  return std::nullopt;
}

template <class Op>
std::optional<Keys> keys_of(const Op& a) {
  if (!is_measured_cudnn(cudnn_version()) || a.q_THd.dtype != DType::bf16 || !a.doc_start_T.empty())
    return std::nullopt;
  AttentionSizes z = attention_sizes(a);
  if (z.rows < kMinRows || z.kv_rows < kMinRows) return std::nullopt;
  if (z.window >= z.kv_rows) z.window = 0;  // a window that covers the sequence has no effect
  const bool is_latent = z.width == 192 && z.v_width == 128;
  const bool is_even = z.width == z.v_width && z.width % 8 == 0 && z.width >= kMinWidth && z.width <= kMaxWidth;
  if (!is_latent && !is_even) return std::nullopt;
  return keys_of(z, a.is_part);
}

int64_t round_up(int64_t n, int64_t to) { return div_ceil(n, to) * to; }

// Returns the workspace of the backward pass per sequence and head, as cuDNN 9.19 needs it: gradients of scores in
// bf16, in tiles of 64 x 128; dk and dv of each query head if heads share them; <do, o>.
int64_t head_bytes(const AttentionSizes& z) {
  const int64_t rows = round_up(z.rows, 128), kv_rows = round_up(z.kv_rows, 128);
  return rows * kv_rows * 2 + kv_rows * (z.width + z.v_width) * 2 + rows * 4;
}

// The sequences, or kv heads of one sequence, that one call of the backward pass processes.
struct Part {
  int64_t batch, kv_heads;
};

constexpr int64_t kMaxWorkspaceBytes = int64_t{1152} << 20;  // one sequence of 4096 with 32 heads

int64_t largest_divisor(int64_t n, int64_t at_most) {
  int64_t divisor = std::max<int64_t>(1, std::min(n, at_most));
  while (n % divisor != 0) --divisor;
  return divisor;
}

Part part_of(const AttentionSizes& z, int64_t batch) {
  const int64_t group_bytes = head_bytes(z) * (z.heads / z.kv_heads), sequence_bytes = group_bytes * z.kv_heads;
  if (sequence_bytes <= kMaxWorkspaceBytes)
    return {largest_divisor(batch, kMaxWorkspaceBytes / sequence_bytes), z.kv_heads};
  return {1, largest_divisor(z.kv_heads, kMaxWorkspaceBytes / group_bytes)};
}

constexpr int64_t kSlackBytes = int64_t{1} << 20;

int64_t bwd_workspace_bytes(const AttentionSizes& z, int64_t batch) {
  const Part part = part_of(z, batch);
  return part.batch * part.kv_heads * (z.heads / z.kv_heads) * head_bytes(z) + kSlackBytes;
}

int64_t lse_bytes(const AttentionBwd& a) { return round_up(a.lse_TH.num_bytes(), 256); }

Key key_of(const AttentionSizes& z, bool backward, Part part, const Keys& keys) {
  return {.backward = backward,
          .causal = keys.causal,
          .batch = part.batch,
          .rows = z.rows,
          .kv_rows = keys.rows,
          .heads = part.kv_heads * (z.heads / z.kv_heads),
          .kv_heads = part.kv_heads,
          .width = z.width,
          .v_width = z.v_width,
          .window = z.window < z.kv_rows ? z.window : 0,
          .all_heads = z.heads,
          .all_kv_heads = z.kv_heads,
          .all_kv_rows = z.kv_rows,
          .scale = z.scale};
}

// Element [row, head] of t [rows, heads, d].
void* at(const Tensor& t, int64_t row, int64_t head) {
  return static_cast<char*>(t.data) + (row * t.dim(1) + head) * t.dim(2) * size_of(t.dtype);
}

bool can(const AttentionFwd& a) { return keys_of(a).has_value(); }

// Returns whether cuDNN's backward pass applies. Keys to which no query attends need zero gradients, which only our own
// kernels write.
bool can(const AttentionBwd& a) {
  const AttentionSizes z = attention_sizes(a);
  const std::optional<Keys> keys = keys_of(a);
  return keys && keys->rows == z.kv_rows && head_bytes(z) * (z.heads / z.kv_heads) <= kMaxWorkspaceBytes;
}

}  // namespace

int64_t cudnn_scratch_bytes(const AttentionFwd&) { return kSlackBytes; }

int64_t cudnn_scratch_bytes(const AttentionBwd& a) {
  return lse_bytes(a) + bwd_workspace_bytes(attention_sizes(a), a.batch);
}

bool cudnn_attention_fwd(Stream& s, const AttentionFwd& a) {
  const AttentionSizes z = attention_sizes(a);
  Pointers pointers{
      {kQ, a.q_THd.data}, {kK, a.k_UGd.data}, {kV, a.v_UGd.data}, {kO, a.o_THd.data}, {kLse, a.lse_TH.data}};
  return op_state<Cudnn>(s).run(s, key_of(z, false, {a.batch, z.kv_heads}, *keys_of(a)), pointers, a.scratch.data,
                                a.scratch.num_bytes());
}

bool cudnn_attention_bwd(Stream& s, const AttentionBwd& a) {
  const AttentionSizes z = attention_sizes(a);
  // Before 9.26 cuDNN reads lse as [batch, heads, rows] only.
  auto* const lse = static_cast<float*>(a.scratch.data);
  heads_first(s, {.to = lse, .from = a.lse_TH.ptr<float>(), .batch = a.batch, .rows = z.rows, .heads = z.heads});
  void* const workspace = static_cast<char*>(a.scratch.data) + lse_bytes(a);
  const Part part = part_of(z, a.batch);
  const Key key = key_of(z, true, part, *keys_of(a));
  const int64_t group = z.heads / z.kv_heads;
  Cudnn& cudnn = op_state<Cudnn>(s);
  for (int64_t b = 0; b < a.batch; b += part.batch) {
    for (int64_t g = 0; g < z.kv_heads; g += part.kv_heads) {
      const int64_t row = b * z.rows, key_row = b * z.kv_rows, h = g * group;
      Pointers pointers{
          {kQ, at(a.q_THd, row, h)},   {kK, at(a.k_TGd, key_row, g)},   {kV, at(a.v_TGd, key_row, g)},
          {kO, at(a.o_THd, row, h)},   {kDo, at(a.do_THd, row, h)},     {kLse, lse + (b * z.heads + h) * z.rows},
          {kDq, at(a.dq_THd, row, h)}, {kDk, at(a.dk_TGd, key_row, g)}, {kDv, at(a.dv_TGd, key_row, g)}};
      // All parts have the same shape, so either the first is refused or none.
      if (!cudnn.run(s, key, pointers, workspace, a.scratch.num_bytes() - lse_bytes(a))) return false;
    }
  }
  return true;
}

}  // namespace moebius::cuda

namespace moebius {

bool cudnn_can(const AttentionFwd& a) { return cuda::can(a); }
bool cudnn_can(const AttentionBwd& a) { return cuda::can(a); }
int64_t cudnn_version() { return static_cast<int64_t>(cudnnGetVersion()); }

}  // namespace moebius
