#include "hub/tensor_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "hub/fused_experts.h"
#include "io/convert_elements.h"

namespace moebius {
namespace {

using Dims = std::vector<int64_t>;

std::string text_of(const Dims& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

TensorSource plain_source(const SafetensorsEntry& entry, const WantedTensor& wanted) {
  MOEBIUS_CHECK(input, entry.shape == wanted.shape,
                "model weights: expected {} for {}; got {} in \"{}\"; check that config.json belongs to these weights",
                text_of(wanted.shape), wanted.name, text_of(entry.shape), entry.name);
  int64_t numel = 1;
  for (const int64_t dim : wanted.shape) numel *= dim;
  const int64_t rows = wanted.shape.size() < 2 ? 1 : wanted.shape[0], cols = rows == 0 ? 0 : numel / rows;
  return {.hf_name = entry.name, .dtype = entry.dtype, .rows = rows, .cols = cols, .row_stride = cols};
}

// Adds the scales to a source of 8-bit floats.
TensorSource scaled(TensorSource source, const HfFolder& folder) {
  source.packing = read_weight_packing(folder.config(), folder.dir() + "/config.json");
  MOEBIUS_CHECK(
      input, source.packing.kind == WeightPacking::Kind::fp8,
      "model folder {}: expected a quantization_config of quant_method \"fp8\" in config.json, since \"{}\" is "
      "f8_e4m3; got none: without its block size the scales cannot be read",
      folder.dir(), source.hf_name);
  source.scale_name = source.hf_name + "_scale_inv";
  const SafetensorsEntry* scale = folder.find(source.scale_name);
  MOEBIUS_CHECK(input, scale, "model folder {}: expected the scales \"{}\" of an f8_e4m3 tensor; got none; fetch them",
                folder.dir(), source.scale_name);
  const Dims want{(source.rows + source.packing.block_rows - 1) / source.packing.block_rows,
                  (source.cols + source.packing.block_cols - 1) / source.packing.block_cols};
  const bool is_float = scale->dtype == DType::f32 || scale->dtype == DType::bf16 || scale->dtype == DType::f16;
  MOEBIUS_CHECK(
      input, is_float && scale->shape == want,
      "model folder {}: expected f32, bf16 or f16 {} for \"{}\", one scale for each block of {} x {}; got {} {}; "
      "correct weight_block_size in config.json, or fetch the folder again",
      folder.dir(), text_of(want), source.scale_name, source.packing.block_rows, source.packing.block_cols,
      name_of(scale->dtype), text_of(scale->shape));
  source.dtype = DType::f32;
  return source;
}

// A damaged scale would make a matrix of zeros or of NaN.
void check_scales(const TensorSource& source, const std::vector<float>& scale, const std::vector<uint8_t>& packed) {
  const int64_t width = source.row_stride, block_rows = source.packing.block_rows,
                block_cols = source.packing.block_cols;
  const int64_t scales_of_row = (width + block_cols - 1) / block_cols;
  for (const float each : scale)
    MOEBIUS_CHECK(input, std::isfinite(each) && each >= 0,
                  "model weights: expected scales of 0 or more in \"{}\"; got {}; fetch them again", source.scale_name,
                  each);
  if (std::find(scale.begin(), scale.end(), 0.0f) == scale.end()) return;
  for (int64_t i = 0; i < std::ssize(packed); ++i) {
    const float of_i = scale[i / width / block_rows * scales_of_row + i % width / block_cols];
    MOEBIUS_CHECK(input, of_i != 0 || (packed[i] & 0x7f) == 0,
                  "model weights: expected scales above 0 in \"{}\" for "
                  "blocks that are not all 0; got 0; fetch them again",
                  source.scale_name);
  }
}

// Rows that begin at a block, or are inside one block; of all columns.
struct Band {
  std::vector<uint8_t> packed;
  std::vector<float> scale;
  int64_t first_row = 0, first_col = 0;  // where the source begins in the band
  int64_t scales_of_row = 0;
};

// Scales belong to blocks of the whole tensor. So rows are read from the beginning of a block, unless all of them are
// in one block, and the columns are cut out of them.
Band read_band(const HfFolder& folder, const TensorSource& source) {
  const int64_t width = source.row_stride, block = source.packing.block_rows;
  const int64_t first_row = source.offset / width, last_row = first_row + source.rows - 1;
  const bool in_one_block = first_row / block == last_row / block;
  const int64_t begin = in_one_block ? first_row : first_row / block * block, rows = last_row + 1 - begin;
  Band band{.first_row = first_row - begin,
            .first_col = source.offset % width,
            .scales_of_row = (width + source.packing.block_cols - 1) / source.packing.block_cols};
  band.packed.resize(rows * width);
  folder.read(source.hf_name, begin * width, (begin + rows) * width, reinterpret_cast<char*>(band.packed.data()));
  band.scale = read_scales(folder, source.scale_name, first_row / block * band.scales_of_row,
                           (rows + block - 1) / block * band.scales_of_row);
  check_scales(source, band.scale, band.packed);
  return band;
}

void read_scaled(const HfFolder& folder, const TensorSource& source, float* dst) {
  const Band band = read_band(folder, source);
  const int64_t width = source.row_stride;
  std::vector<float> values(band.packed.size());
  unpack_fp8(values.data(), band.packed.data(), band.scale.data(), std::ssize(values) / width, width, source.packing);
  for (int64_t r = 0; r < source.rows; ++r)
    std::copy_n(values.data() + (band.first_row + r) * width + band.first_col, source.cols, dst + r * source.cols);
}

// The orientations of a fused tensor that its shape allows.
struct Orientation {
  bool out_in = false, in_out = false;
  bool is_clear() const { return out_in != in_out; }
};

// The shape of one of a layer's two fused tensors. Gate and up are concatenated along
// their out dimension.
struct FusedShape {
  std::string name;
  Dims out_in, in_out;
};

FusedShape fused_shape(ExpertName expert, ExpertProjection projection, int64_t experts, int64_t H, int64_t I) {
  expert.projection = projection;
  const bool is_down = projection == ExpertProjection::down;
  const int64_t out = is_down ? H : 2 * I, in = is_down ? I : H;
  return {fused_name(expert), {experts, out, in}, {experts, in, out}};
}

Orientation orientation_of(const SafetensorsEntry* entry, const FusedShape& shape) {
  if (entry == nullptr) return {};
  return {.out_in = entry->shape == shape.out_in, .in_out = entry->shape == shape.in_out};
}

// Returns whether out comes before in. Where the shape fits both (2I = H, or I = H), the layer's
// other tensor decides.
bool is_out_in(const HfFolder& folder, const SafetensorsEntry& entry, const FusedShape& shape,
               const FusedShape& other_shape) {
  const SafetensorsEntry* other_entry = folder.find(other_shape.name);
  const Orientation own = orientation_of(&entry, shape), other = orientation_of(other_entry, other_shape);
  MOEBIUS_CHECK(input, own.out_in || own.in_out,
                "model weights: expected {} or {} for \"{}\"; got {}; check that config.json belongs to these weights",
                text_of(shape.out_in), text_of(shape.in_out), entry.name, text_of(entry.shape));
  MOEBIUS_CHECK(input, own.is_clear() || other.is_clear(),
                "model weights: expected a shape that shows the orientation of \"{}\"; got {}, where [E, out, in] and "
                "[E, in, out] are the same, and no \"{}\" of {} or {} that would show it; "
                "fetch that, or save one tensor per expert",
                entry.name, text_of(entry.shape), other_shape.name, text_of(other_shape.out_in),
                text_of(other_shape.in_out));
  MOEBIUS_CHECK(input, !own.is_clear() || !other.is_clear() || own.out_in == other.out_in,
                "model weights: expected \"{}\" and \"{}\" to have the same orientation; got {} and {}, "
                "one [E, out, in] and one [E, in, out]; save one tensor per expert",
                entry.name, other_shape.name, text_of(entry.shape), text_of(other_entry->shape));
  return own.is_clear() ? own.out_in : other.out_in;
}

TensorSource fused_source(const HfFolder& folder, const SafetensorsEntry& entry, const ExpertName& expert,
                          const WantedTensor& wanted) {
  MOEBIUS_ASSERT(wanted.shape.size() == 2 && expert.expert < wanted.num_experts);
  const int64_t out = wanted.shape[0], in = wanted.shape[1];
  const bool is_down = expert.projection == ExpertProjection::down;
  const int64_t H = is_down ? out : in, I = is_down ? in : out;
  const FusedShape gate_up = fused_shape(expert, ExpertProjection::up, wanted.num_experts, H, I);
  const FusedShape down = fused_shape(expert, ExpertProjection::down, wanted.num_experts, H, I);
  const bool out_in = is_down ? is_out_in(folder, entry, down, gate_up) : is_out_in(folder, entry, gate_up, down);
  const int64_t fused_out = is_down ? out : 2 * out, first = expert.projection == ExpertProjection::up ? out : 0;
  const int64_t plane = expert.expert * fused_out * in;
  return {.hf_name = entry.name,
          .dtype = entry.dtype,
          .rows = out,
          .cols = in,
          .offset = plane + (out_in ? first * in : first),
          .row_stride = out_in ? in : 1,
          .col_stride = out_in ? 1 : fused_out};
}

TensorSource source_of(const FusedPlace& place, std::string hf_name, DType dtype) {
  return {.hf_name = std::move(hf_name),
          .dtype = dtype,
          .rows = place.rows,
          .cols = place.cols,
          .offset = place.offset,
          .row_stride = place.row_stride,
          .col_stride = place.col_stride};
}

// Returns the source of an expert's matrix in 4-bit blocks.
TensorSource mxfp4_source(const HfFolder& folder, const ExpertName& expert, const WantedTensor& wanted) {
  const FusedPlace place = packed_place(expert, wanted.shape, wanted.num_experts);
  const SafetensorsEntry& blocks = folder.at(place.name + "_blocks");
  const SafetensorsEntry* scales = folder.find(place.name + "_scales");
  MOEBIUS_CHECK(input, scales != nullptr,
                "model folder {}: expected the scales \"{}_scales\" of \"{}\"; got none; fetch them", folder.dir(),
                place.name, blocks.name);
  MOEBIUS_CHECK(input,
                read_weight_packing(folder.config(), folder.dir() + "/config.json").kind == WeightPacking::Kind::mxfp4,
                "model folder {}: expected a quantization_config of quant_method \"mxfp4\" in config.json, since there "
                "is \"{}\"; got another or none; fetch config.json again",
                folder.dir(), blocks.name);
  const int64_t E = place.shape[0], rows = place.shape[1], in = place.shape[2];
  MOEBIUS_CHECK(input, in % kMxfp4Block == 0,
                "model weights: expected rows of whole blocks of {} numbers in \"{}\"; got rows of {} by config.json; "
                "check that it belongs to these weights",
                kMxfp4Block, blocks.name, in);
  const Dims want{E, rows, in / kMxfp4Block, kMxfp4Block / 2}, want_scales{E, rows, in / kMxfp4Block};
  for (const auto& [entry, shape] : {std::pair{&blocks, &want}, std::pair{scales, &want_scales}}) {
    MOEBIUS_CHECK(
        input, entry->dtype == DType::u8 && entry->shape == *shape,
        "model weights: expected u8 {} for \"{}\"; got {} {}; check that config.json belongs to these weights",
        text_of(*shape), entry->name, name_of(entry->dtype), text_of(entry->shape));
  }
  TensorSource source = source_of(place, blocks.name, DType::bf16);
  source.scale_name = scales->name;
  source.packing.kind = WeightPacking::Kind::mxfp4;
  return source;
}

TensorSource gpt_oss_expert_source(const HfFolder& folder, const ExpertName& expert, const WantedTensor& wanted) {
  const FusedPlace place = *fused_place(HfFamily::gpt_oss, wanted.name, wanted.shape, wanted.num_experts);
  const std::string blocks = place.name + "_blocks";
  const SafetensorsEntry* entry = folder.find(place.name);
  const bool packed = !expert.is_bias && folder.find(blocks) != nullptr;
  MOEBIUS_CHECK(input, entry || packed,
                "model folder {}: expected a tensor \"{}\"{}; got none; gpt_oss has no tensors of single experts",
                folder.dir(), place.name, expert.is_bias ? "" : fmt::format(" or \"{}\"", blocks));
  MOEBIUS_CHECK(input, !entry || !packed, "model folder {}: expected \"{}\" or \"{}\"; got both; keep one of them",
                folder.dir(), place.name, blocks);
  if (packed) return mxfp4_source(folder, expert, wanted);
  MOEBIUS_CHECK(
      input, entry->shape == place.shape && entry->dtype != DType::u8 && entry->dtype != DType::f8_e4m3,
      "model weights: expected f32, bf16, f16 or f64 {} for \"{}\"; got {} {}; check that config.json belongs "
      "to these weights",
      text_of(place.shape), place.name, name_of(entry->dtype), text_of(entry->shape));
  return source_of(place, entry->name, entry->dtype);
}

// The blocks and scales that the rows of a source are in, from number `first` on.
struct Mxfp4Band {
  std::vector<uint8_t> blocks, scales;
  int64_t first = 0;
};

Mxfp4Band read_mxfp4_band(const HfFolder& folder, const TensorSource& s) {
  const int64_t first = s.offset / kMxfp4Block, end = s.offset + (s.rows - 1) * s.row_stride + s.cols;
  const int64_t num_blocks = (end + kMxfp4Block - 1) / kMxfp4Block - first, bytes = kMxfp4Block / 2;
  Mxfp4Band band{.first = first * kMxfp4Block};
  band.blocks.resize(num_blocks * bytes);
  band.scales.resize(num_blocks);
  folder.read(s.hf_name, first * bytes, (first + num_blocks) * bytes, reinterpret_cast<char*>(band.blocks.data()));
  folder.read(s.scale_name, first, first + num_blocks, reinterpret_cast<char*>(band.scales.data()));
  return band;
}

[[noreturn]] void refuse_mxfp4_scale(const TensorSource& s) {
  MOEBIUS_FAIL(input,
               "model weights: expected scales from 0 to 254 in \"{}\"; "
               "got 255, which is not a number; fetch them again",
               s.scale_name);
}

void read_mxfp4(const HfFolder& folder, const TensorSource& s, bf16* dst) {
  const Mxfp4Band band = read_mxfp4_band(folder, s);
  for (int64_t r = 0; r < s.rows; ++r) {
    const int64_t begin = s.offset + r * s.row_stride - band.first;
    if (!unpack_mxfp4(dst + r * s.cols, band.blocks.data(), band.scales.data(), begin, s.cols)) refuse_mxfp4_scale(s);
  }
}

// REQUIRES: rows of whole blocks.
void read_mxfp4_blocks(const HfFolder& folder, const TensorSource& s, uint8_t* data, uint8_t* scales) {
  const Mxfp4Band band = read_mxfp4_band(folder, s);
  const int64_t blocks = s.cols / kMxfp4Block;
  MOEBIUS_ASSERT(s.cols % kMxfp4Block == 0 && s.offset % kMxfp4Block == 0 && s.row_stride % kMxfp4Block == 0);
  for (int64_t r = 0; r < s.rows; ++r) {
    const int64_t begin = (s.offset + r * s.row_stride - band.first) / kMxfp4Block;
    std::copy_n(band.blocks.data() + begin * kMxfp4Block / 2, s.cols / 2, data + r * s.cols / 2);
    std::copy_n(band.scales.data() + begin, blocks, scales + r * blocks);
  }
  if (std::find(scales, scales + s.rows * blocks, uint8_t{255}) != scales + s.rows * blocks) refuse_mxfp4_scale(s);
}

}  // namespace

std::vector<float> read_scales(const HfFolder& folder, const std::string& name, int64_t first, int64_t count) {
  const DType dtype = folder.at(name).dtype;
  const int64_t size = size_of(dtype);
  std::vector<char> stored(count * size);
  folder.read(name, first * size, (first + count) * size, stored.data());
  std::vector<float> scales(count);
  convert_elements(scales.data(), DType::f32, stored.data(), dtype, count, name);
  return scales;
}

TensorSource locate_tensor(const HfFolder& folder, HfFamily family, const WantedTensor& wanted) {
  const std::string hub = hf_name(family, wanted.name);
  const auto expert = parse_expert_name(wanted.name);
  if (expert && family == HfFamily::gpt_oss) return gpt_oss_expert_source(folder, *expert, wanted);
  std::vector<std::string> found;
  // In memory, the v5 spelling of a family is the canonical one.
  if (folder.find(hub) != nullptr) found.push_back(hub);
  if (hub != wanted.name && folder.find(wanted.name) != nullptr) found.push_back(wanted.name);
  if (expert && folder.find(fused_name(*expert)) != nullptr) found.push_back(fused_name(*expert));
  MOEBIUS_CHECK(input, !found.empty(),
                "model folder {}: expected a tensor \"{}\"{}; got none; check config and weights", folder.dir(), hub,
                expert ? fmt::format(" or \"{}\"", fused_name(*expert)) : "");
  MOEBIUS_CHECK(input, found.size() == 1, "model folder {}: expected {} once; got it as {}; keep one of them",
                folder.dir(), wanted.name, name_list(found));
  const SafetensorsEntry& entry = folder.at(found[0]);
  const bool fused = expert && found[0] == fused_name(*expert);
  TensorSource source = fused ? fused_source(folder, entry, *expert, wanted) : plain_source(entry, wanted);
  if (entry.dtype != DType::f8_e4m3) return source;
  MOEBIUS_CHECK(input, !fused,
                "model weights: expected f32, bf16, f16 or f64 for \"{}\"; got f8_e4m3: experts in one tensor have no "
                "scales here; save one tensor per expert",
                entry.name);
  return scaled(std::move(source), folder);
}

TensorSource part_of(const TensorSource& source, int64_t row_begin, int64_t row_end, int64_t col_begin,
                     int64_t col_end) {
  MOEBIUS_ASSERT(0 <= row_begin && row_begin <= row_end && row_end <= source.rows);
  MOEBIUS_ASSERT(0 <= col_begin && col_begin <= col_end && col_end <= source.cols);
  TensorSource part = source;
  part.rows = row_end - row_begin;
  part.cols = col_end - col_begin;
  part.offset += row_begin * source.row_stride + col_begin * source.col_stride;
  return part;
}

void read_tensor(const HfFolder& folder, const TensorSource& source, void* dst) {
  const int64_t size = size_of(source.dtype);
  if (source.rows == 0 || source.cols == 0) return;
  if (source.packing.kind == WeightPacking::Kind::mxfp4) return read_mxfp4(folder, source, static_cast<bf16*>(dst));
  if (!source.scale_name.empty()) return read_scaled(folder, source, static_cast<float*>(dst));
  if (source.col_stride == 1) {
    const bool together = source.row_stride == source.cols || source.rows == 1;
    const int64_t bytes = (together ? source.rows : 1) * source.cols * size;
    for (int64_t r = 0; r < (together ? 1 : source.rows); ++r) {
      const int64_t begin = (source.offset + r * source.row_stride) * size;
      folder.read(source.hf_name, begin, begin + bytes, static_cast<char*>(dst) + r * bytes);
    }
    return;
  }
  const int64_t span = (source.cols - 1) * source.col_stride + (source.rows - 1) * source.row_stride + 1;
  std::vector<char> band(span * size);
  folder.read(source.hf_name, source.offset * size, (source.offset + span) * size, band.data());
  const FusedPlace place{
      .rows = source.rows, .cols = source.cols, .row_stride = source.row_stride, .col_stride = source.col_stride};
  take_from_fused(dst, band.data(), place, size);
}

ScaleLayout blocks_of(const TensorSource& source) {
  if (source.packing.kind == WeightPacking::Kind::mxfp4) return ScaleLayout::mx_blocks;
  const bool is_fp8 = !source.scale_name.empty() && source.packing.kind == WeightPacking::Kind::fp8;
  const BlockSize block = block_size(ScaleLayout::square_blocks);
  return is_fp8 && source.packing.block_rows == block.rows && source.packing.block_cols == block.cols
             ? ScaleLayout::square_blocks
             : ScaleLayout::none;
}

void read_blocks(const HfFolder& folder, const TensorSource& source, void* data, void* scales) {
  const ScaleLayout layout = blocks_of(source);
  MOEBIUS_ASSERT(layout != ScaleLayout::none);
  if (source.rows == 0 || source.cols == 0) return;
  if (layout == ScaleLayout::mx_blocks)
    return read_mxfp4_blocks(folder, source, static_cast<uint8_t*>(data), static_cast<uint8_t*>(scales));
  const Band band = read_band(folder, source);
  const BlockSize block = block_size(layout);
  MOEBIUS_ASSERT(band.first_row == 0 && band.first_col % block.cols == 0);
  for (int64_t r = 0; r < source.rows; ++r)
    std::copy_n(band.packed.data() + r * source.row_stride + band.first_col, source.cols,
                static_cast<uint8_t*>(data) + r * source.cols);
  const int64_t across = div_ceil(source.cols, block.cols);
  for (int64_t r = 0; r < div_ceil(source.rows, block.rows); ++r)
    std::copy_n(band.scale.data() + r * band.scales_of_row + band.first_col / block.cols, across,
                static_cast<float*>(scales) + r * across);
}

}  // namespace moebius
