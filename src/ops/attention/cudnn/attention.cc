// Attention by cuDNN's fused kernels, for causal bf16 sequences without documents and for parts of
// them (cudnn_shapes.h). Tensors are read and written where they are. The backward pass is the
// deterministic one, which processes a few sequences at a time, or a few heads of a long one.
//
// Only this file includes cuDNN's frontend, which is slow to compile.
#include <cudnn_frontend.h>

#include <compare>
#include <map>
#include <memory>
#include <unordered_map>

#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "device/gpu_limits.h"
#include "device/out_of_memory.h"
#include "ops/attention/cuda/attention.h"
#include "ops/attention/cudnn_shapes.h"
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

// On a GPU other than Hopper no graph was ever built, so it is not known by which errors cuDNN refuses one there. All
// but a lack of memory count as refusals.
bool is_refusal_elsewhere(const Stream& s, fe::error_t status) {
  return status.is_bad() && !gpu_limits(s).is_hopper() && !is_out_of_memory(status.get_message());
}

// Notes on GPUs other than Hopper that portable kernels compute a call that cuDNN was chosen for.
void note_refusal_elsewhere(const Stream& s, const char* who, const std::string& why) {
  if (gpu_limits(s).is_hopper()) return;
  note_fallback_kernel(s, who, fmt::format("other kernels than cuDNN's, which has none here: {}", why));
}

constexpr int64_t kRefused = INT64_MAX;  // the workspace of a graph that was refused

// The key of a graph: its sizes, and the head and key counts of the whole tensors that it processes in part.
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
    const Graph& g = find(s, key, who);
    if (g.workspace_bytes > workspace_bytes) {
      if (g.workspace_bytes != kRefused)
        note_refusal_elsewhere(s, who, fmt::format("it asks for {} bytes of workspace", g.workspace_bytes));
      return false;
    }
    check(cudnnSetStream(handle_, cuda_stream(s)), "cudnnSetStream");
    check(g.graph.execute(handle_, pointers, workspace), who, "execute");
    return true;
  }

 private:
  const Graph& find(const Stream& s, const Key& key, const char* who) {
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
    fe::error_t built = g->graph.build(handle_, {fe::HeurMode_t::A});
    if (is_refusal(built) || is_refusal_elsewhere(s, built)) {
      note_refusal_elsewhere(s, who, built.get_message());
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

Key key_of(const AttentionSizes& z, bool backward, const CudnnPart& part, const CudnnKeys& keys) {
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

}  // namespace

bool cudnn_attention_fwd(Stream& s, const AttentionFwd& a) {
  const AttentionSizes z = attention_sizes(a);
  Pointers pointers{
      {kQ, a.q_THd.data}, {kK, a.k_UGd.data}, {kV, a.v_UGd.data}, {kO, a.o_THd.data}, {kLse, a.lse_TH.data}};
  return op_state<Cudnn>(s).run(s, key_of(z, false, {a.batch, z.kv_heads}, *cudnn_keys(a)), pointers, a.scratch.data,
                                a.scratch.num_bytes());
}

bool cudnn_attention_bwd(Stream& s, const AttentionBwd& a) {
  const AttentionSizes z = attention_sizes(a);
  // Before 9.26 cuDNN reads lse as [batch, heads, rows] only.
  auto* const lse = static_cast<float*>(a.scratch.data);
  heads_first(s, {.to = lse, .from = a.lse_TH.ptr<float>(), .batch = a.batch, .rows = z.rows, .heads = z.heads});
  void* const workspace = static_cast<char*>(a.scratch.data) + cudnn_lse_bytes(a);
  const CudnnPart part = cudnn_part(z, a.batch);
  const Key key = key_of(z, true, part, *cudnn_keys(a));
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
      if (!cudnn.run(s, key, pointers, workspace, a.scratch.num_bytes() - cudnn_lse_bytes(a))) return false;
    }
  }
  return true;
}

}  // namespace moebius::cuda

namespace moebius {

int64_t cudnn_version() { return static_cast<int64_t>(cudnnGetVersion()); }

}  // namespace moebius
