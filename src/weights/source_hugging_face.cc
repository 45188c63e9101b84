#include <cstring>
#include <vector>

#include "hub/tensor_source.h"
#include "weights/source.h"

namespace moebius {
namespace {

constexpr const char *kHead = "lm_head.weight", *kEmbedding = "model.embed_tokens.weight";

struct Placed {
  const ParamPart* part;
  TensorSource source;
};

// Locates every part of the model on disk. All problems are collected, so that one does not hide the next.
class Placement {
 public:
  Placement(HfFolder& folder, const ModelCatalog& catalog)
      : folder_(folder), catalog_(catalog), model_(catalog.model()), family_(hf_family(model_type())) {
    read_weight_packing(folder.config(), folder.dir() + "/config.json");  // refuses packings that are not supported
    for (const ParamPart& part : catalog.parts()) place(part);
    account_leftovers();
  }
  const std::vector<Placed>& placed() const { return placed_; }
  const std::vector<std::string>& problems() const { return problems_; }

 private:
  std::string model_type() const {
    const auto it = folder_.config().find("model_type");
    return it != folder_.config().end() && it->is_string() ? it->get<std::string>() : "";
  }

  void place(const ParamPart& part) {
    if (is_training_state(part.name)) return;
    try {
      const WantedTensor wanted{part.name, dims_of(part.shape), model_.num_experts};
      placed_.push_back({&part, locate_tensor(folder_, family_, wanted)});
      folder_.consume(placed_.back().source.hf_name);
      if (!placed_.back().source.scale_name.empty()) folder_.consume(placed_.back().source.scale_name);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::input) throw;
      if (problems_.empty() || problems_.back() != error.what()) problems_.push_back(error.what());
      // A tensor of another shape is known, not unexpected.
      const auto expert = parse_expert_name(part.name);
      for (const std::string& name :
           {part.name, hf_name(family_, part.name), expert ? fused_name(*expert) : std::string()}) {
        for (const std::string& known : {name, name + "_scale_inv", name + "_blocks", name + "_scales"}) {
          if (folder_.find(known)) folder_.consume(known);
        }
      }
    }
  }

  void account_leftovers() {
    for (const std::string& name : folder_.unconsumed()) {
      if (name.ends_with(".rotary_emb.inv_freq")) continue;  // computed, never read
      if (folder_.at(name).bytes == 0) continue;             // transformers saves the matrices of 0 shared experts
      if (name == kHead && model_.tie_word_embeddings) {
        if (!same_bytes(kHead, kEmbedding))
          problems_.push_back(fmt::format("\"{}\" differs from \"{}\", but config.json ties them", kHead, kEmbedding));
        continue;
      }
      if (is_of_mtp(name, model_)) {
        account_mtp(name);
        continue;
      }
      problems_.push_back(fmt::format("unexpected tensor \"{}\"", name));
    }
  }

  // Tensors of multi-token prediction that are left over: all of them where the model holds none,
  // else the hub's copies.
  void account_mtp(const std::string& name) {
    if (!catalog_.holds_mtp()) return;
    const bool of_embedding = name.ends_with(".embed_tokens.weight"),
               of_head = name.ends_with(".shared_head.head.weight");
    const char* original = of_embedding || model_.tie_word_embeddings ? kEmbedding : kHead;
    if (!of_embedding && !of_head) return problems_.push_back(fmt::format("unexpected tensor \"{}\"", name));
    if (!same_bytes(name, original)) {
      problems_.push_back(
          fmt::format("\"{}\" differs from \"{}\", which multi-token prediction shares", name, original));
    }
  }

  bool same_bytes(const std::string& a, const std::string& b) const {
    const SafetensorsEntry *at_a = folder_.find(a), *at_b = folder_.find(b);
    if (!at_a || !at_b || at_a->dtype != at_b->dtype || at_a->shape != at_b->shape) return false;
    std::vector<char> bytes_a(at_a->bytes), bytes_b(at_b->bytes);
    folder_.read(a, bytes_a.data());
    folder_.read(b, bytes_b.data());
    return bytes_a == bytes_b;
  }

  HfFolder& folder_;
  const ModelCatalog& catalog_;
  const ModelSpec& model_;
  HfFamily family_;
  std::vector<Placed> placed_;
  std::vector<std::string> problems_;
};

std::string list_problems(const std::vector<std::string>& problems) {
  std::string text;
  for (size_t i = 0; i < problems.size() && i < 20; ++i) text += "\n  " + problems[i];
  if (problems.size() > 20) text += fmt::format("\n  and {} more", problems.size() - 20);
  return text;
}

// Returns the source of a slice's block. A parameter is rows x cols in TensorSource, and its blocks are
// ranges of either.
TensorSource block_of(const TensorSource& source, const TensorSlice& slice) {
  const Shard& shard = slice.shard;
  if (shard.dim < 0) return source;
  const bool of_rows = shard.dim == 0 && slice.shape.size() > 1;
  MOEBIUS_ASSERT(shard.dim <= 1);
  if (of_rows) return part_of(source, shard.begin, shard.begin + shard.count, 0, source.cols);
  const int64_t inner = source.cols / slice.shape[shard.dim];
  return part_of(source, 0, source.rows, shard.begin * inner, (shard.begin + shard.count) * inner);
}

class HuggingFaceWeights final : public WeightsReader {
 public:
  HuggingFaceWeights(const std::string& dir, const ModelCatalog& catalog) : folder_(HfFolder::open(dir)) {
    const Placement placement(folder_, catalog);
    MOEBIUS_CHECK(input, placement.problems().empty(),
                  "model folder {}: expected exactly the tensors of the model; got {} problem{}:{}", dir,
                  placement.problems().size(), placement.problems().size() == 1 ? "" : "s",
                  list_problems(placement.problems()));
    for (const Placed& each : placement.placed()) {
      entries_.push_back({each.part->name, each.part->shape, each.source.dtype});
      sources_.push_back(each.source);
    }
  }
  const std::vector<WeightsEntry>& entries() const override { return entries_; }
  void read(size_t entry, void* dst) const override { read_tensor(folder_, sources_[entry], dst); }
  // Reads a part of one row of the block, or whole rows from the first to the last of the slice.
  void read_slice(size_t entry, const TensorSlice& slice, void* dst) const override {
    const TensorSource block = block_of(sources_[entry], slice);
    if (slice.numel() == 0) return;
    const int64_t first = slice.begin / block.cols, last = div_ceil(slice.end, block.cols), of_row = first * block.cols;
    if (last == first + 1)
      return read_tensor(folder_, part_of(block, first, last, slice.begin - of_row, slice.end - of_row), dst);
    const TensorSource rows = part_of(block, first, last, 0, block.cols);
    const int64_t size = size_of(rows.dtype), skipped = slice.begin - of_row;
    if (rows.rows * rows.cols == slice.numel()) return read_tensor(folder_, rows, dst);
    std::vector<char> bytes(rows.rows * rows.cols * size);
    read_tensor(folder_, rows, bytes.data());
    std::memcpy(dst, bytes.data() + skipped * size, slice.numel() * size);
  }
  ScaleLayout blocks_on_disk(size_t entry) const override { return blocks_of(sources_[entry]); }
  void read_blocks(size_t entry, const Shard& shard, int64_t begin, int64_t end, void* data,
                   void* scales) const override {
    const TensorSource block = block_of(sources_[entry], {dims_of(entries_[entry].shape), shard, begin, end});
    moebius::read_blocks(folder_, part_of(block, begin, end, 0, block.cols), data, scales);
  }
  ReleasedScales released_scales(size_t entry) const override {
    const TensorSource& source = sources_[entry];
    if (source.scale_name.empty() || source.packing.kind != WeightPacking::Kind::fp8) return {};
    ReleasedScales released{.block_rows = source.packing.block_rows, .block_cols = source.packing.block_cols};
    const SafetensorsEntry& scales = folder_.at(source.scale_name);
    released.scales = read_scales(folder_, source.scale_name, 0, scales.bytes / size_of(scales.dtype));
    return released;
  }

 private:
  HfFolder folder_;
  std::vector<WeightsEntry> entries_;
  std::vector<TensorSource> sources_;
};

}  // namespace

std::unique_ptr<WeightsReader> open_hugging_face(const std::string& folder, const ModelCatalog& catalog) {
  return std::make_unique<HuggingFaceWeights>(folder, catalog);
}

}  // namespace moebius
