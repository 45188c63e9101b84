#include <algorithm>
#include <cstddef>
#include <vector>

#include "checkpoint/reader.h"
#include "hub/hf_folder.h"
#include "hub/packed_weights.h"
#include "io/convert_elements.h"
#include "parallel/optim/optimizer.h"
#include "weights/source.h"

namespace moebius {
namespace {

// Returns the scales that a matrix was released with, which an import keeps.
bool is_scales(const std::string& name, const std::map<std::string, Shape>& wanted) {
  const size_t suffix = std::string_view(kScaleSuffix).size();
  return name.ends_with(kScaleSuffix) && wanted.contains(name.substr(0, name.size() - suffix));
}

// Throws for missing and unexpected names and for wrong shapes, before anything is read.
void check_names(const CheckpointReader& reader, const ModelCatalog& catalog, const std::string& folder) {
  std::vector<std::string> missing, unexpected, misshapen;
  std::map<std::string, Shape> wanted;
  for (const ParamPart& part : catalog.parts()) wanted.emplace(part.name, part.shape);
  for (const auto& [name, shape] : wanted) {
    const auto it = reader.tensors().find(name);
    if (it == reader.tensors().end()) {
      if (!is_training_state(name)) missing.push_back(name);
      continue;
    }
    if (it->second.shape != dims_of(shape)) misshapen.push_back(name);
  }
  for (const auto& [name, tensor] : reader.tensors()) {
    const bool passed_over = (!catalog.holds_mtp() && is_of_mtp(name, catalog.model())) || is_scales(name, wanted);
    if (!wanted.contains(name) && !is_optimizer_state(name) && !is_training_state(name) && !passed_over)
      unexpected.push_back(name);
  }
  MOEBIUS_CHECK(input, missing.empty() && unexpected.empty() && misshapen.empty(),
                "checkpoint {}: expected exactly the tensors of the model; got {} missing ({}), {} unexpected ({}) and "
                "{} of another shape ({}); check that model and checkpoint belong together",
                folder, missing.size(), name_list(missing), unexpected.size(), name_list(unexpected), misshapen.size(),
                name_list(misshapen));
}

// Returns the scales of a part of a matrix, which begins at blocks.
ReleasedScales part_of(const ReleasedScales& all, const Shape& matrix, int64_t row, int64_t rows, int64_t col,
                       int64_t cols) {
  const int64_t across = div_ceil(matrix[1], all.block_cols);
  ReleasedScales part{.block_rows = all.block_rows, .block_cols = all.block_cols};
  for (int64_t r = row; r < row + rows; r += all.block_rows)
    for (int64_t c = col; c < col + cols; c += all.block_cols)
      part.scales.push_back(all.scales[r / all.block_rows * across + c / all.block_cols]);
  return part;
}

class CheckpointWeights final : public WeightsReader {
 public:
  CheckpointWeights(const std::string& folder, const ModelCatalog& catalog) : reader_(folder) {
    check_names(reader_, catalog, folder);
    for (const ParamPart& part : catalog.parts()) {
      const auto it = reader_.tensors().find(part.name);
      if (it != reader_.tensors().end()) entries_.push_back({part.name, part.shape, it->second.dtype});
    }
  }
  const std::vector<WeightsEntry>& entries() const override { return entries_; }
  void read(size_t entry, void* dst) const override {
    const WeightsEntry& e = entries_[entry];
    reader_.read(e.name, {.data = dst, .shape = e.shape, .dtype = e.dtype});
  }
  void read_slice(size_t entry, const TensorSlice& slice, void* dst) const override {
    const WeightsEntry& e = entries_[entry];
    reader_.read({.name = e.name, .tensor = {.data = dst, .shape = {slice.numel()}, .dtype = e.dtype}, .slice = slice});
  }
  void read_sample(size_t entry, const TensorSlice& slice, void* dst) const override {
    reader_.read_unchecked(entries_[entry].name, slice, dst);
  }
  // An imported matrix has its values in f32, and the scales that it was released with.
  ScaleLayout blocks_on_disk(size_t entry) const override {
    if (!reader_.tensors().contains(entries_[entry].name + kScaleSuffix)) return ScaleLayout::none;
    const WeightPacking packing = packing_of_model();
    const BlockSize block = block_size(ScaleLayout::square_blocks);
    const bool is_square = packing.block_rows == block.rows && packing.block_cols == block.cols;
    return is_square ? ScaleLayout::square_blocks : ScaleLayout::none;
  }
  void read_blocks(size_t entry, const Shard& shard, int64_t begin, int64_t end, void* data,
                   void* scales) const override {
    const WeightsEntry& e = entries_[entry];
    const int64_t cols = shard.dim == 1 ? shard.count : e.shape[1];
    const TensorSlice slice{dims_of(e.shape), shard, begin * cols, end * cols};
    std::vector<std::byte> bytes(static_cast<size_t>(slice.numel() * size_of(e.dtype)));
    read_slice(entry, slice, bytes.data());
    std::vector<float> values(static_cast<size_t>(slice.numel()));
    convert_elements(values.data(), DType::f32, bytes.data(), e.dtype, slice.numel(), e.name);
    const int64_t row = begin + (shard.dim == 0 ? shard.begin : 0), col = shard.dim == 1 ? shard.begin : 0;
    const BlockFp8 packed = to_block_fp8(values.data(), end - begin, cols,
                                         part_of(released_scales(entry), e.shape, row, end - begin, col, cols));
    std::copy(packed.data.begin(), packed.data.end(), static_cast<uint8_t*>(data));
    std::copy(packed.scales.begin(), packed.scales.end(), static_cast<float*>(scales));
  }
  ReleasedScales released_scales(size_t entry) const override {
    const WeightsEntry& e = entries_[entry];
    const auto found = reader_.tensors().find(e.name + kScaleSuffix);
    if (found == reader_.tensors().end()) return {};
    const WeightPacking packing = packing_of_model();
    const Shape shape = block_scales_shape(e.shape, packing.block_rows, packing.block_cols);
    MOEBIUS_CHECK(input, found->second.dtype == DType::f32 && found->second.shape == dims_of(shape),
                  "checkpoint: expected scales f32 {} of {}; got another shape; import the model again",
                  to_string(shape), e.name);
    ReleasedScales released{.block_rows = packing.block_rows, .block_cols = packing.block_cols};
    released.scales.resize(shape.numel());
    reader_.read(found->first, {.data = released.scales.data(), .shape = shape, .dtype = DType::f32});
    return released;
  }

 private:
  WeightPacking packing_of_model() const { return read_weight_packing(reader_.meta().at("model"), "checkpoint"); }

  CheckpointReader reader_;
  std::vector<WeightsEntry> entries_;
};

}  // namespace

std::unique_ptr<WeightsReader> open_checkpoint(const std::string& folder, const ModelCatalog& catalog) {
  return std::make_unique<CheckpointWeights>(folder, catalog);
}

}  // namespace moebius
