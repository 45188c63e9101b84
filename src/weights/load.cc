#include "weights/load.h"

#include <algorithm>
#include <map>

#include "checkpoint/reader.h"
#include "io/convert_elements.h"
#include "io/json_text.h"
#include "model/layers/precision_of.h"
#include "ops/elementwise/elementwise.h"
#include "ops/quantize/quantize.h"
#include "weights/import.h"
#include "weights/source.h"

namespace moebius {

namespace {

nlohmann::json meta_value(const std::string& folder, const char* key) {
  const CheckpointReader reader(folder);
  const nlohmann::json& meta = reader.meta();
  MOEBIUS_CHECK(input, meta.is_object() && meta.contains(key),
                "checkpoint {}: expected \"{}\" in its meta data; got none; it was not written by a training run",
                folder, key);
  return meta.at(key);
}

// Reports an impossible model as Error{input}, since its keys come from a file.
ModelSpec checked_spec(const nlohmann::json& config, const std::string& who) {
  ModelSpec spec = model_spec_from_hf(config, who);
  try {
    spec.check();
  } catch (const Error& error) {
    throw Error(ErrorKind::input, who + ": " + error.what());
  }
  return spec;
}

}  // namespace

ModelSpec read_model_spec(const std::string& path) {
  const WeightsFolder from = find_weights(path);
  if (from.kind == WeightsFolder::Kind::hugging_face) {
    const std::string config = from.path + "/config.json";
    return checked_spec(read_json(config), config);
  }
  return checked_spec(meta_value(from.path, "model"), from.path + ": model");
}

std::optional<RunSpec> read_run_spec(const std::string& path) {
  const WeightsFolder from = find_weights(path);
  if (from.kind == WeightsFolder::Kind::hugging_face) return std::nullopt;
  if (CheckpointReader(from.path).meta().contains(kImportedKey)) return std::nullopt;
  const nlohmann::json recipe = meta_value(from.path, "recipe");
  MOEBIUS_CHECK(input, recipe.is_string(),
                "checkpoint {}: expected its recipe as a text; got {}; it was not written by a training run", from.path,
                recipe.type_name());
  return parse_run_spec(recipe.get<std::string>(), from.path + ": recipe", {});
}

namespace {

constexpr int64_t kMaxElements = int64_t{1} << 26;  // in memory at a time, besides the model

// Rows of a parameter that are read at a time. Of sharded weights a rank has memory only for what it owns, so it reads
// the rows into scratch and keeps its share of them.
class BlockRows {
 public:
  BlockRows(const Stream& s, const Param& p, int64_t first_row, const Shape& shape)
      : p_(p), range_{.begin = first_row * shape[1], .count = shape.numel()} {
    if (p.shards_weights()) {
      scratch_ = Buffer(s.device(), bytes_of(p.w.dtype, range_.count));
      tensor_ = {.data = scratch_.data(), .shape = shape, .dtype = p.w.dtype, .device = s.device()};
    } else {
      tensor_ = p.w.view({p.w.numel()}).rows(range_.begin, range_.end()).view(shape);
    }
  }
  const Tensor& tensor() const { return tensor_; }
  void keep(Stream& s) const {
    if (!p_.shards_weights()) return;
    const ElementRange here = common(p_.owned, range_);
    if (here.count == 0) return;
    copy(s, p_.owned_weights().rows(here.begin - p_.owned.begin, here.end() - p_.owned.begin),
         tensor_.view({range_.count}).rows(here.begin - range_.begin, here.end() - range_.begin));
    synchronize(s);  // scratch is in use until then
  }

 private:
  const Param& p_;
  ElementRange range_;  // elements of the parameter
  Buffer scratch_;
  Tensor tensor_;
};

// The block of one part: the weights that ops read, and the masters of what this rank owns of it.
class PartLoader {
 public:
  PartLoader(Stream& s, const WeightsReader& reader, std::string who) : s_(s), reader_(reader), who_(std::move(who)) {}

  void load(size_t entry, const Param& p, const ParamPart& part) {
    const int64_t numel = part.local_shape().numel();
    for (int64_t begin = 0; begin < numel; begin += kMaxElements)
      load(entry, p, part, {.begin = begin, .count = std::min(kMaxElements, numel - begin)});
  }
  // Loads quantised weights, a whole row of blocks at a time: unchanged if they have these blocks on
  // disk, else quantised.
  void load_blocks(size_t entry, const Param& p, const Param& scales, const ParamPart& part) {
    const ScaleLayout layout = held_layout(p.w.dtype), on_disk = reader_.blocks_on_disk(entry);
    MOEBIUS_CHECK(input, layout == on_disk || layout == ScaleLayout::square_blocks,
                  "{}: expected {} in MXFP4, since lora.base = \"mxfp4\" holds experts as they are read; got other "
                  "numbers; choose another lora.base",
                  who_, part.name);
    const Shape here = part.local_shape();
    const BlockSize block = block_size(layout);
    const int64_t across = div_ceil(here[1], block.cols);
    const int64_t most = std::max(block.rows, kMaxElements / here[1] / block.rows * block.rows);
    for (int64_t begin = 0; begin < here[0]; begin += most) {
      const int64_t end = std::min(begin + most, here[0]);
      BlockRows data(s_, p, part.offset / here[1] + begin, {end - begin, here[1]}),
          block_scales(s_, scales, first_block_row(p, part) + begin / block.rows,
                       {div_ceil(end - begin, block.rows), across});
      const Operand to(data.tensor(), block_scales.tensor(), layout);
      layout == on_disk ? copy_contiguouss(entry, part, begin, to) : quantise_blocks(entry, part, begin, to);
      data.keep(s_);
      block_scales.keep(s_);
    }
  }
  const std::vector<NotFinite>& not_finite() const { return not_finite_; }

 private:
  // Returns the first row of a part's scales. Each matrix of the parameter has whole blocks.
  static int64_t first_block_row(const Param& p, const ParamPart& part) {
    const int rank = p.spec.shape.rank();
    const int64_t block = block_size(held_layout(p.w.dtype)).rows, rows = p.spec.shape[rank - 2],
                  row = part.offset / p.spec.shape[rank - 1];
    return row / rows * div_ceil(rows, block) + row % rows / block;
  }
  void copy_contiguouss(size_t entry, const ParamPart& part, int64_t begin, const Operand& to) {
    std::vector<std::byte> data(to.data.num_bytes()), scales(to.scales.num_bytes());
    reader_.read_blocks(entry, part.shard, begin, begin + to.data.dim(0), data.data(), scales.data());
    if (to.data.dtype == DType::f8_e4m3) {
      const auto is_nan = [](std::byte code) { return (code & std::byte{0x7f}) == std::byte{0x7f}; };
      add_not_finite(&not_finite_, part.name, std::count_if(data.begin(), data.end(), is_nan));
    }
    copy_to_device(s_, to.data.data, data.data(), to.data.num_bytes());
    copy_to_device(s_, to.scales.data, scales.data(), to.scales.num_bytes());
    synchronize(s_);
  }
  void quantise_blocks(size_t entry, const ParamPart& part, int64_t begin, const Operand& to) {
    const WeightsEntry& e = reader_.entries()[entry];
    const int64_t first = begin * to.data.dim(1), numel = to.data.numel();
    bytes_.resize(numel * size_of(e.dtype));
    reader_.read_slice(entry, {dims_of(part.shape), part.shard, first, first + numel}, bytes_.data());
    add_not_finite(&not_finite_, e.name, count_not_finite(bytes_.data(), e.dtype, numel, DType::f32));
    const Buffer memory(to.data.device, numel * size_of(DType::f32));
    const Tensor values{.data = memory.data(), .shape = to.data.shape, .dtype = DType::f32, .device = to.data.device};
    convert(e, values.view({numel}), 0);
    quantize(s_, {.q = to, .x_RC = values});
    synchronize(s_);
  }
  void load(size_t entry, const Param& p, const ParamPart& part, const ElementRange& range) {
    const WeightsEntry& e = reader_.entries()[entry];
    bytes_.resize(range.count * size_of(e.dtype));
    reader_.read_slice(entry, {dims_of(part.shape), part.shard, range.begin, range.end()}, bytes_.data());
    add_not_finite(&not_finite_, e.name, count_not_finite(bytes_.data(), e.dtype, range.count, p.spec.dtype));
    if (!p.is_quantised() && !p.shards_weights()) {
      const Tensor w = part_of(p.w, part);
      convert(e, w.view({w.numel()}).rows(range.begin, range.end()), 0);
    }
    const ElementRange owned = owned_of(p, part), here = common(owned, range);
    if (here.count == 0) return;
    const auto convert_owned = [&](const Tensor& to_n) {
      const Tensor of_part = owned_part_of(to_n, p, part);
      convert(e, of_part.rows(here.begin - owned.begin, here.end() - owned.begin), here.begin - range.begin);
    };
    if (p.shards_weights() && !p.is_quantised()) convert_owned(p.owned_weights());
    if (p.has_master) convert_owned(p.master());
    if (p.has_remainder) {
      values_.resize(static_cast<size_t>(here.count));
      convert_elements(values_.data(), DType::f32, bytes_.data() + (here.begin - range.begin) * size_of(e.dtype),
                       e.dtype, here.count, who_ + ": " + e.name);
      write_masters(s_, p, part.offset + here.begin - p.owned.begin, values_);
    }
  }
  void convert(const WeightsEntry& e, const Tensor& to, int64_t first) {
    convert_elements(s_, to, bytes_.data() + first * size_of(e.dtype), e.dtype, who_ + ": " + e.name);
  }

  Stream& s_;
  const WeightsReader& reader_;
  std::string who_;
  std::vector<char> bytes_;
  std::vector<float> values_;
  std::vector<NotFinite> not_finite_;
};

}  // namespace

std::vector<NotFinite> load_weights(Stream& s, Model& model, const std::string& path, const AddedAdapter& adapter) {
  const WeightsFolder from = find_weights(path);
  const std::unique_ptr<WeightsReader> reader = open_weights(from, model.base_catalog(), adapter);
  std::map<std::string, size_t> entries;
  for (size_t i = 0; i < reader->entries().size(); ++i) entries[reader->entries()[i].name] = i;
  std::map<std::string, const Param*> params;
  for (const Param& p : model.params().all()) params[p.spec.name] = &p;
  PartLoader loader(s, *reader, from.path);
  for (const Param& p : model.params().all()) {
    const bool in_blocks = held_layout(p.spec.dtype) != ScaleLayout::none;
    for (const ParamPart& part : p.spec.parts) {
      const auto it = entries.find(part.name);
      if (it == entries.end()) continue;
      if (in_blocks)
        loader.load_blocks(it->second, p, *params.at(scales_name(p.spec.name)), part);
      else
        loader.load(it->second, p, part);
    }
  }
  return loader.not_finite();
}

void check_weights(const std::string& path, const ModelSpec& model, const AddedAdapter& adapter) {
  open_weights(find_weights(path), ModelCatalog(model, /*holds_mtp=*/false), adapter);
}

}  // namespace moebius
