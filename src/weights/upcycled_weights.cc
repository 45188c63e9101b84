#include "weights/upcycled_weights.h"

#include <cmath>
#include <cstring>

#include "core/rng.h"
#include "hub/hf_names.h"
#include "io/convert_elements.h"

namespace moebius {
namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr std::string_view kSharedExpert = "mlp.shared_experts.";

// convert_elements writes only these two dtypes.
DType computed_dtype(DType of_dense) { return of_dense == DType::bf16 ? DType::bf16 : DType::f32; }

const char* dense_suffix(ExpertProjection projection) {
  switch (projection) {
    case ExpertProjection::gate:
      return "mlp.gate_proj.weight";
    case ExpertProjection::up:
      return "mlp.up_proj.weight";
    case ExpertProjection::down:
      return "mlp.down_proj.weight";
  }
  MOEBIUS_ASSERT(!"unknown projection");
}

void store_elements(const WeightsEntry& entry, const std::vector<float>& values, void* dst) {
  convert_elements(dst, entry.dtype, values.data(), DType::f32, static_cast<int64_t>(values.size()), entry.name);
}

}  // namespace

UpcycledWeights::UpcycledWeights(const WeightsReader& dense, const ModelCatalog& moe, const UpcycleSpec& spec)
    : dense_(dense), spec_(spec), router_std_(static_cast<float>(moe.model().initializer_range)) {
  for (size_t i = 0; i < dense.entries().size(); ++i) dense_index_[dense.entries()[i].name] = i;
  for (const ParamPart& part : moe.parts()) add(part);
  for (Kept& kept : kept_) kept.entry = dense.entries().size();
}

size_t UpcycledWeights::dense_entry(const std::string& name) const {
  const auto it = dense_index_.find(name);
  MOEBIUS_CHECK(input, it != dense_index_.end(), "upcycle: expected \"{}\" in the dense model; got none; check it",
                name);
  return it->second;
}

void UpcycledWeights::add(const ParamPart& part) {
  if (const auto expert = parse_expert_name(part.name)) {
    return add_slice(part, expert->prefix + dense_suffix(expert->projection), expert->expert % spec_.granularity);
  }
  const bool is_router = part.name.ends_with(".mlp.gate.weight");
  const bool is_gate_of_shared = part.name.ends_with(".mlp.shared_expert_gate.weight");
  const size_t shared = part.name.find(kSharedExpert);
  if (shared != std::string::npos && !part.name.ends_with(".down_proj.weight")) {
    return add_slice(part, std::string(part.name).replace(shared, kSharedExpert.size(), "mlp."), 0);
  }
  if (is_router || is_gate_of_shared || shared != std::string::npos) {
    const DType dtype = computed_dtype(dense_.entries()[dense_entry(kEmbedding)].dtype);
    entries_.push_back({part.name, part.shape, dtype});
    sources_.push_back({.kind = is_router ? Source::Kind::router : Source::Kind::zeros});
    return;
  }
  const size_t same = dense_entry(part.name);
  entries_.push_back(dense_.entries()[same]);
  sources_.push_back({.kind = Source::Kind::whole, .dense = same});
}

void UpcycledWeights::add_slice(const ParamPart& part, const std::string& dense_name, int64_t slice) {
  const size_t dense = dense_entry(dense_name);
  const DType dtype = dense_.entries()[dense].dtype;
  entries_.push_back({part.name, part.shape, spec_.granularity == 1 ? dtype : computed_dtype(dtype)});
  sources_.push_back({.kind = Source::Kind::slice, .dense = dense, .slice = slice});
}

const std::vector<char>& UpcycledWeights::dense_bytes(size_t entry) const {
  for (const Kept& kept : kept_) {
    if (kept.entry == entry) return kept.bytes;
  }
  Kept& kept = kept_[next_kept_];
  next_kept_ = 1 - next_kept_;
  kept.bytes.resize(dense_.entries()[entry].bytes());
  dense_.read(entry, kept.bytes.data());
  kept.entry = entry;
  return kept.bytes;
}

void UpcycledWeights::read(size_t entry, void* dst) const {
  const Source& source = sources_[entry];
  switch (source.kind) {
    case Source::Kind::whole:
      return dense_.read(source.dense, dst);
    case Source::Kind::slice:
      return read_slice(entries_[entry], source, dst);
    case Source::Kind::router:
      return read_router(entries_[entry], dst);
    case Source::Kind::zeros:
      std::memset(dst, 0, entries_[entry].bytes());
  }
}

// Reads [rows, cols] of the dense [R, C]. gate and up are cut by rows, and down by columns; the other
// dimension is whole.
void UpcycledWeights::read_slice(const WeightsEntry& entry, const Source& source, void* dst) const {
  const WeightsEntry& dense = dense_.entries()[source.dense];
  const int64_t rows = entry.shape[0], cols = entry.shape[1], element = size_of(dense.dtype);
  const int64_t first_row = rows < dense.shape[0] ? source.slice * rows : 0;
  const int64_t first_col = cols < dense.shape[1] ? source.slice * cols : 0;
  const std::vector<char>& bytes = dense_bytes(source.dense);
  std::vector<char> cut(rows * cols * element);
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(cut.data() + r * cols * element,
                bytes.data() + ((first_row + r) * dense.shape[1] + first_col) * element, cols * element);
  }
  if (spec_.granularity == 1) {
    std::memcpy(dst, cut.data(), cut.size());
    return;
  }
  std::vector<float> values(rows * cols);
  convert_elements(values.data(), DType::f32, cut.data(), dense.dtype, rows * cols, dense.name);
  const float scale = std::cbrt(static_cast<float>(spec_.granularity));
  for (float& x : values) x *= scale;
  store_elements(entry, values, dst);
}

void UpcycledWeights::read_router(const WeightsEntry& entry, void* dst) const {
  const int64_t E = entry.shape[0], D = entry.shape[1];
  const Rng rng(spec_.seed, RngSite::init, 0, key_of(entry.name.c_str()));
  std::vector<float> values(E * D);
  for (int64_t e = 0; e < E; ++e) {
    for (int64_t d = 0; d < D; ++d) values[e * D + d] = router_std_ * rng.normal(e / spec_.granularity * D + d);
  }
  store_elements(entry, values, dst);
}

}  // namespace moebius
