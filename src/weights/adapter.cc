#include "weights/adapter.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/reader.h"
#include "hub/hf_folder.h"
#include "hub/peft.h"
#include "io/convert_elements.h"
#include "io/files.h"
#include "model/lora/adapter_params.h"
#include "model/lora/shared_a.h"
#include "parallel/optim/optimizer.h"
#include "weights/copy.h"
#include "weights/load.h"

namespace moebius {
namespace {

namespace fs = std::filesystem;

bool is_adapter_part(const std::string& name) {
  return !is_optimizer_state(name) && (name.ends_with(kLoraA) || name.ends_with(kLoraB));
}

Shape matrix_shape(const std::vector<int64_t>& dims, const std::string& who) {
  MOEBIUS_CHECK(input, dims.size() == 2, "{}: expected a matrix; got {} dimensions", who, dims.size());
  return {dims[0], dims[1]};
}

class PeftAdapters final : public AdapterReader {
 public:
  PeftAdapters(const std::string& dir, const ModelSpec& model)
      : dir_(dir), folder_(dir, expert_adapters_of(model, /*rank=*/0)) {
    for (const PeftFolder::Entry& e : folder_.entries())
      entries_.push_back({e.name, matrix_shape(e.shape, dir + ": " + e.stored.name), e.stored.dtype});
  }
  const std::string& path() const override { return dir_; }
  const LoraSpec& lora() const override { return folder_.lora(); }
  const std::vector<WeightsEntry>& entries() const override { return entries_; }
  bool has_fused_experts() const override { return folder_.has_fused_experts(); }
  void read(size_t entry, void* dst) const override { folder_.read(folder_.entries()[entry], dst); }
  int64_t rank_of(size_t entry) const override { return folder_.entries()[entry].rank; }
  std::optional<WeightsFingerprint> base() const override {
    const std::string text = folder_.base_fingerprint();
    if (text.empty()) return std::nullopt;
    return parse_fingerprint(text, fmt::format("{}/{}: {}", dir_, kPeftWeights, kPeftBaseKey));
  }
  std::string base_name() const override { return folder_.base_name(); }

 private:
  std::string dir_;
  PeftFolder folder_;
  std::vector<WeightsEntry> entries_;
};

class CheckpointAdapters final : public AdapterReader {
 public:
  // folder: a checkpoint of a run with [lora].
  explicit CheckpointAdapters(const std::string& folder) : folder_(folder), reader_(folder) {
    const RunSpec run = *read_run_spec(folder);
    lora_ = run.lora;
    base_name_ = run.init_from;
    for (const auto& [name, tensor] : reader_.tensors()) {
      if (is_adapter_part(name))
        entries_.push_back({name, matrix_shape(tensor.shape, folder + ": " + name), tensor.dtype});
    }
  }
  const std::string& path() const override { return folder_; }
  const LoraSpec& lora() const override { return lora_; }
  const std::vector<WeightsEntry>& entries() const override { return entries_; }
  void read(size_t entry, void* dst) const override {
    const WeightsEntry& e = entries_[entry];
    reader_.read(e.name, {.data = dst, .shape = e.shape, .dtype = e.dtype});
  }
  std::optional<WeightsFingerprint> base() const override {
    const std::string text = reader_.meta().value(kBaseKey, "");
    if (text.empty()) return std::nullopt;
    return parse_fingerprint(text, fmt::format("checkpoint {}: {}", folder_, kBaseKey));
  }
  std::string base_name() const override { return base_name_; }

 private:
  std::string folder_, base_name_;
  CheckpointReader reader_;
  LoraSpec lora_;
  std::vector<WeightsEntry> entries_;
};

// Returns the newest checkpoint of a run with [lora], or the checkpoint at `path`.
std::string folder_of_run(const std::string& path) {
  const WeightsFolder from = find_weights(path);
  const std::optional<RunSpec> run =
      from.kind == WeightsFolder::Kind::checkpoint ? read_run_spec(from.path) : std::nullopt;
  MOEBIUS_CHECK(input, run && run->lora.is_on(),
                "adapter {}: expected a folder of PEFT ({}), or a run with [lora]; got {} without adapters; check the "
                "path",
                path, kPeftConfig, from.kind == WeightsFolder::Kind::checkpoint ? "a checkpoint" : "a model's folder");
  return from.path;
}

// "3 missing (a, b, c)"; empty when there is none.
std::string problem(const char* what, const std::vector<std::string>& names) {
  return names.empty() ? "" : fmt::format("; {} {} ({})", names.size(), what, name_list(names));
}

// Returns the matrix whose B goes with this A or B: of an A of gate_up_proj it is gate_proj, and up_proj is like it.
std::string matrix_of_part(const std::string& part) {
  constexpr std::string_view kGateUp = ".gate_up_proj";
  std::string matrix = adapted_matrix(part);
  if (matrix.ends_with(kGateUp)) matrix.replace(matrix.size() - kGateUp.size(), kGateUp.size(), ".gate_proj");
  return matrix;
}

// Returns the A of a matrix among names: its own, or the one of gate_up_proj; empty if there is neither.
std::string a_of(const std::set<std::string>& names, const std::string& matrix) {
  for (const std::string& name : {matrix + kLoraA, matrix_of_shared_a(matrix) + kLoraA})
    if (names.contains(name)) return name;
  return "";
}

// Checks that each A and B has the shape that follows from the rank and the matrix.
void check_adapters(const AdapterReader& adapters, const ModelCatalog& base) {
  std::map<std::string, Shape> matrices;
  for (const ParamPart& part : base.parts()) matrices.emplace(part.name, part.shape);
  std::set<std::string> names;
  for (const WeightsEntry& e : adapters.entries()) names.insert(e.name);
  std::vector<std::string> unknown, misshapen, alone;
  for (size_t i = 0; i < adapters.entries().size(); ++i) {
    const WeightsEntry& e = adapters.entries()[i];
    const int64_t r = adapters.rank_of(i);
    const std::string matrix = matrix_of_part(e.name);
    const auto w = matrices.find(matrix + ".weight");
    const bool is_a = e.name.ends_with(kLoraA);
    if (w == matrices.end() || w->second.rank() != 2) {
      unknown.push_back(e.name);
    } else if (e.shape != (is_a ? Shape{r, w->second[1]} : Shape{w->second[0], r})) {
      misshapen.push_back(fmt::format("{} {}", e.name, to_string(e.shape)));
    }
    if (is_a ? !names.contains(matrix + kLoraB) : a_of(names, matrix).empty()) alone.push_back(e.name);
  }
  MOEBIUS_CHECK(input, !names.empty() && unknown.empty() && misshapen.empty() && alone.empty(),
                "adapter {}: expected A [{}, in] and B [out, {}] of matrices of the model; got {} tensors{}{}{}; check "
                "that the adapter belongs to this model",
                adapters.path(), adapters.lora().rank, adapters.lora().rank, names.size(),
                problem("that fit no matrix", unknown), problem("of another shape", misshapen),
                problem("without their partner", alone));
}

// Adds scale * b a to w, a slice of [out, in]; b is [out, r] and a is [r, in]. The bits of an element do not depend on
// the slice.
void add_product(float* w, const TensorSlice& slice, const std::vector<float>& a, const std::vector<float>& b,
                 int64_t rank, float scale) {
  const int64_t in = std::ssize(a) / rank;
  const Shard& shard = slice.shard;
  const int64_t first_row = shard.dim == 0 ? shard.begin : 0, first_col = shard.dim == 1 ? shard.begin : 0,
                width = shard.dim == 1 ? shard.count : in;
  std::vector<float> row(static_cast<size_t>(width));
  for (int64_t at = slice.begin; at < slice.end;) {
    const int64_t o = first_row + at / width, col = first_col + at % width,
                  count = std::min(width - at % width, slice.end - at);
    std::fill_n(row.begin(), count, 0.0f);
    for (int64_t j = 0; j < rank; ++j) {
      const float factor = b[o * rank + j];
      const float* a_row = &a[j * in + col];
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) row[i] += factor * a_row[i];
    }
    float* w_row = w + (at - slice.begin);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) w_row[i] += scale * row[i];
    at += count;
  }
}

class MergedWeights final : public WeightsReader {
 public:
  MergedWeights(std::unique_ptr<WeightsReader> base, std::unique_ptr<AdapterReader> adapters)
      : base_(std::move(base)), adapters_(std::move(adapters)), entries_(base_->entries()) {
    std::map<std::string, size_t> at;
    std::set<std::string> names;
    for (size_t i = 0; i < adapters_->entries().size(); ++i) {
      at[adapters_->entries()[i].name] = i;
      names.insert(adapters_->entries()[i].name);
    }
    a_.assign(entries_.size(), kNone);
    b_.assign(entries_.size(), kNone);
    for (size_t i = 0; i < entries_.size(); ++i) {
      const std::string& name = entries_[i].name;
      if (!name.ends_with(".weight")) continue;
      const std::string matrix = name.substr(0, name.size() - std::string_view(".weight").size());
      const auto b = at.find(matrix + kLoraB);
      if (b == at.end()) continue;
      a_[i] = at.at(a_of(names, matrix));
      b_[i] = b->second;
      entries_[i].dtype = DType::f32;
    }
  }
  const std::vector<WeightsEntry>& entries() const override { return entries_; }
  void read(size_t entry, void* dst) const override {
    if (a_[entry] == kNone) return base_->read(entry, dst);
    read_slice(entry, whole_slice(dims_of(entries_[entry].shape)), dst);
  }
  void read_slice(size_t entry, const TensorSlice& slice, void* dst) const override {
    read_merged(entry, slice, dst, &WeightsReader::read_slice);
  }
  void read_sample(size_t entry, const TensorSlice& slice, void* dst) const override {
    read_merged(entry, slice, dst, &WeightsReader::read_sample);
  }
  ScaleLayout blocks_on_disk(size_t entry) const override {
    return a_[entry] == kNone ? base_->blocks_on_disk(entry) : ScaleLayout::none;
  }
  void read_blocks(size_t entry, const Shard& shard, int64_t begin, int64_t end, void* data,
                   void* scales) const override {
    base_->read_blocks(entry, shard, begin, end, data, scales);
  }

 private:
  using Read = void (WeightsReader::*)(size_t, const TensorSlice&, void*) const;

  void read_merged(size_t entry, const TensorSlice& slice, void* dst, Read read) const {
    if (a_[entry] == kNone) return ((*base_).*read)(entry, slice, dst);
    const WeightsEntry& from = base_->entries()[entry];
    std::vector<char> bytes(static_cast<size_t>(slice.numel() * size_of(from.dtype)));
    ((*base_).*read)(entry, slice, bytes.data());
    convert_elements(dst, DType::f32, bytes.data(), from.dtype, slice.numel(), from.name);
    add_product(static_cast<float*>(dst), slice, adapters_->read_f32(a_[entry]), adapters_->read_f32(b_[entry]),
                adapters_->rank_of(a_[entry]), adapters_->lora().scale());
  }

  static constexpr size_t kNone = SIZE_MAX;
  std::unique_ptr<WeightsReader> base_;
  std::unique_ptr<AdapterReader> adapters_;
  std::vector<WeightsEntry> entries_;
  std::vector<size_t> a_, b_;  // of each entry: its adapter's tensors
};

// Fills the block of one part, and the masters of what this rank owns of it.
void load_part(Stream& s, const Param& p, const ParamPart& part, const std::vector<float>& whole) {
  std::vector<float> block(part.local_shape().numel());
  const TensorSlice slice{dims_of(part.shape), part.shard, 0, std::ssize(block)};
  for (const CommonRun& run : common_runs(whole_slice(dims_of(part.shape)), slice))
    std::copy_n(whole.begin() + run.in_a, run.count, block.begin() + run.in_b);
  const ElementRange owned = owned_of(p, part);
  const auto convert_owned = [&](const Tensor& to_n) {
    if (owned.count > 0)
      convert_elements(s, owned_part_of(to_n, p, part), block.data() + owned.begin, DType::f32, part.name);
  };
  if (p.shards_weights())
    convert_owned(p.owned_weights());
  else
    convert_elements(s, part_of(p.w, part).view({std::ssize(block)}), block.data(), DType::f32, part.name);
  if (p.has_master) convert_owned(p.master());
  if (p.has_remainder && owned.count > 0)
    write_masters(s, p, part.offset + owned.begin - p.owned.begin,
                  std::span(block).subspan(static_cast<size_t>(owned.begin), static_cast<size_t>(owned.count)));
}

}  // namespace

std::vector<std::string> AdapterReader::matrices() const {
  std::set<std::string> all;
  for (const WeightsEntry& e : entries())
    if (e.name.ends_with(kLoraA)) all.insert(adapted_matrix(e.name));
  return {all.begin(), all.end()};
}

int64_t AdapterReader::rank_of(size_t) const { return lora().rank; }

std::vector<float> AdapterReader::read_f32(size_t entry) const {
  const WeightsEntry& e = entries()[entry];
  std::vector<char> bytes(static_cast<size_t>(e.bytes()));
  read(entry, bytes.data());
  std::vector<float> values(static_cast<size_t>(e.shape.numel()));
  convert_elements(values.data(), DType::f32, bytes.data(), e.dtype, e.shape.numel(), path() + ": " + e.name);
  return values;
}

ExpertAdapters expert_adapters_of(const ModelSpec& model, int64_t rank) {
  return {.family = hf_family(model.family),
          .num_experts = model.num_experts,
          .hidden = model.hidden_size,
          .intermediate = model.moe_intermediate_size,
          .rank = rank};
}

std::unique_ptr<AdapterReader> open_adapter(const std::string& path, const ModelSpec& model) {
  MOEBIUS_CHECK(input, fs::is_directory(path), "adapter {}: expected a folder; got {}; check the path", path,
                fs::exists(path) ? "a file" : "nothing there");
  std::unique_ptr<AdapterReader> adapters;
  if (fs::exists(path + "/" + kPeftConfig) || fs::exists(path + "/" + kPeftWeights))
    adapters = std::make_unique<PeftAdapters>(path, model);
  else
    adapters = std::make_unique<CheckpointAdapters>(folder_of_run(path));
  check_adapters(*adapters, ModelCatalog(model, /*holds_mtp=*/false));
  return adapters;
}

namespace {

// Returns whether a tensor is the B of a matrix without an adapter: 0, beside an A that its partner's B reads.
// export_adapter() writes it where gate or up alone has an adapter, and all experts are one parameter.
bool is_zero_partner(const AdapterReader& adapters, const std::set<std::string>& names,
                     const std::set<std::string>& read, size_t entry) {
  const std::string& name = adapters.entries()[entry].name;
  if (!name.ends_with(kLoraB) || !read.contains(a_of(names, matrix_of_part(name)))) return false;
  const std::vector<float> b = adapters.read_f32(entry);
  return std::all_of(b.begin(), b.end(), [](float x) { return x == 0; });
}

}  // namespace

std::optional<WeightsFingerprint> load_adapter(Stream& s, Model& model, const LoraSpec& lora, const std::string& path) {
  const std::unique_ptr<AdapterReader> adapters = open_adapter(path, model.spec());
  MOEBIUS_CHECK(input, adapters->lora().rank == lora.rank && adapters->lora().scale() == lora.scale(),
                "adapter {}: expected lora.rank = {} and lora.alpha = {}; it has {} and {}; set these in the recipe",
                path, lora.rank, lora.alpha, adapters->lora().rank, adapters->lora().alpha);
  std::map<std::string, size_t> at;
  std::set<std::string> names, read;
  for (size_t i = 0; i < adapters->entries().size(); ++i) {
    const std::string& name = adapters->entries()[i].name;
    MOEBIUS_CHECK(
        input, adapters->rank_of(i) == lora.rank,
        "adapter {}: expected rank {} for {}; got {}, since PEFT trained gate and up of experts with one A of "
        "twice the rank, which lora.targets has not; import --adapter merges it into its model, and a new "
        "adapter can begin there",
        path, lora.rank, name, adapters->rank_of(i));
    at[name] = i;
    names.insert(name);
  }
  std::map<std::string, size_t> entry_of;  // of each part of the model's adapters
  std::vector<std::string> missing, unexpected;
  const ModelCatalog catalog = model.whole_catalog();
  for (const ParamPart& part : catalog.parts()) {
    if (!is_adapter_part(part.name)) continue;
    // A shared A begins both of gate_proj and up_proj where each has its own in the model.
    const std::string name = part.name.ends_with(kLoraA) ? a_of(names, adapted_matrix(part.name))
                             : names.contains(part.name) ? part.name
                                                         : "";
    if (name.empty()) {
      missing.push_back(part.name);
    } else {
      entry_of[part.name] = at[name];
      read.insert(name);
    }
  }
  std::set_difference(names.begin(), names.end(), read.begin(), read.end(), std::back_inserter(unexpected));
  std::erase_if(unexpected,
                [&](const std::string& name) { return is_zero_partner(*adapters, names, read, at.at(name)); });
  MOEBIUS_CHECK(input, missing.empty() && unexpected.empty(),
                "adapter {}: expected the adapters of lora.targets{}{}; make lora.targets those of the adapter", path,
                problem("missing", missing), problem("unexpected", unexpected));
  for (const Param& p : model.params().all()) {
    if (p.spec.kind != ParamKind::adapter) continue;
    for (const ParamPart& part : p.spec.parts) load_part(s, p, part, adapters->read_f32(entry_of.at(part.name)));
  }
  return adapters->base();
}

namespace {

// Returns the folder that a checkpoint names; empty for one that holds a whole model.
std::string named_base(const std::string& checkpoint) {
  const std::optional<RunSpec> run = read_run_spec(checkpoint);
  if (!run || !run->lora.is_on()) return "";
  MOEBIUS_CHECK(
      input, !run->init_from.empty(),
      "checkpoint {}: it holds only adapters, and its run has no model.init_from, so the model that they belong "
      "to is not there",
      checkpoint);
  MOEBIUS_CHECK(input, fs::is_directory(run->init_from),
                "checkpoint {}: it holds adapters of the model in {} (model.init_from), which is not there; bring it "
                "back, or run the command in the folder that this path is relative to",
                checkpoint, run->init_from);
  return run->init_from;
}

}  // namespace

std::string base_of_adapters(const std::string& checkpoint) {
  const std::string base = named_base(checkpoint);
  std::set<fs::path> seen{fs::canonical(checkpoint)};
  for (std::string at = base; !at.empty();) {  // a base may be such a checkpoint, too
    const WeightsFolder from = find_weights(at);
    if (from.kind != WeightsFolder::Kind::checkpoint) break;
    MOEBIUS_CHECK(input, seen.insert(fs::canonical(from.path)).second,
                  "checkpoint {}: it holds adapters of a model that is made of the same adapters ({}, by "
                  "model.init_from); bring back the weights that training began with",
                  checkpoint, from.path);
    at = named_base(from.path);
  }
  return base;
}

namespace {

void check_base(const AdapterReader& adapters, const std::string& folder, const WeightsReader& weights,
                const ModelSpec& model) {
  const std::optional<WeightsFingerprint> expected = adapters.base();
  if (!expected) return;
  const WeightsFingerprint found = fingerprint_of(weights, model);
  const std::string name = adapters.base_name();
  MOEBIUS_CHECK(
      input, found.values == expected->values,
      "adapter {}: expected the weights that it was trained on{}, with the fingerprint {}; got those in {}, with "
      "{}; bring back its own base, or add it to these all the same with --adapter {} --any-base",
      adapters.path(), name.empty() ? "" : fmt::format(" ({})", name), to_text(*expected), folder, to_text(found),
      adapters.path());
}

}  // namespace

std::unique_ptr<WeightsReader> open_merged(const WeightsFolder& base, const AddedAdapter& adapter,
                                           const ModelCatalog& catalog) {
  std::unique_ptr<AdapterReader> adapters = open_adapter(adapter.path, catalog.model());
  std::unique_ptr<WeightsReader> weights = open_weights(base, catalog);
  if (!adapter.any_base) check_base(*adapters, base.path, *weights, catalog.model());
  return std::make_unique<MergedWeights>(std::move(weights), std::move(adapters));
}

}  // namespace moebius
