// The source of weights: one reader for two kinds of folder. load.h fills a model from it, and
// export.h writes another folder from it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/tensor_slice.h"
#include "core/quantized.h"
#include "model/catalog.h"
#include "weights/block_fp8.h"

namespace moebius {

struct WeightsFolder {
  enum class Kind { hugging_face, checkpoint };
  Kind kind = Kind::hugging_face;
  std::string path;  // the folder itself; of a run's folder that of its newest checkpoint
};

// Finds the folder of weights of a path. Throws Error{input} naming the files that were looked for.
WeightsFolder find_weights(const std::string& path);

// Returns whether there are tensors of multi-token prediction, which are those of layers after the
// model's. A config file often promises a module that was not saved.
bool has_mtp(const WeightsFolder& from, const ModelSpec& model);
// Returns the model with the modules that the folder has: all or none.
ModelSpec with_mtp_of(const WeightsFolder& from, ModelSpec model);
// Returns the warning for a model whose config promises modules that the folder lacks.
std::string missing_mtp_notice(const WeightsFolder& from, const ModelSpec& model);
// Returns whether a canonical name is one of those tensors.
bool is_of_mtp(const std::string& name, const ModelSpec& model);

// An adapter that is added to the weights of a model.
struct AddedAdapter {
  std::string path = {};  // as for open_adapter() in weights/adapter.h; empty: none
  bool any_base = false;  // whether the weights may be others than those that the adapter was trained on
};

struct WeightsEntry {
  std::string name;  // canonical
  Shape shape;
  DType dtype = DType::f32;  // dtype on disk
  int64_t bytes() const { return shape.numel() * size_of(dtype); }
};

// The tensors of one model on disk, each read on its own. Opening it checks that no tensor is missing or unexpected.
class WeightsReader {
 public:
  virtual ~WeightsReader() = default;
  // Returns the entries in the order of the model's parameters. State that only training uses may be missing.
  virtual const std::vector<WeightsEntry>& entries() const = 0;
  virtual void read(size_t entry, void* dst) const = 0;  // its bytes, in the dtype on disk
  // Reads the elements of a slice of it. This default reads the whole tensor to do so.
  virtual void read_slice(size_t entry, const TensorSlice& slice, void* dst) const;
  // The same for a few elements, of which the reader may skip checks to read little else.
  virtual void read_sample(size_t entry, const TensorSlice& slice, void* dst) const { read_slice(entry, slice, dst); }
  // Returns how it is quantised on disk: f8_e4m3 with square_blocks or f4_e2m1 with mx_blocks (core/quantized.h), else
  // none. Then read_blocks() reads the rows [begin, end) of a shard of it as they are: data [rows, columns], and the
  // scales of their blocks. REQUIRES: the shard and begin are at blocks.
  virtual ScaleLayout blocks_on_disk(size_t) const { return ScaleLayout::none; }
  virtual void read_blocks(size_t entry, const Shard& shard, int64_t begin, int64_t end, void* data,
                           void* scales) const;
  // Returns the scales of a matrix that was released in 8-bit floats, which a checkpoint keeps when it is imported.
  // read() gives its values in f32.
  virtual ReleasedScales released_scales(size_t) const { return {}; }
};

// Returns the tensors of a model, by its catalog. Strict: Error{input} lists what is missing, unexpected or
// of another shape (the first 20 and the counts). A checkpoint of adapters gives the model that they
// belong to, with the adapters added (weights/adapter.h). Tensors of multi-token prediction are passed over
// where the catalog has none of its modules, and so are the hub's copies of embedding and head in
// them, which must be copies. With an adapter the weights are those of open_merged() in weights/adapter.h. Throws
// Error{usage} for a model that no device supports.
std::unique_ptr<WeightsReader> open_weights(const WeightsFolder& from, const ModelCatalog& catalog,
                                            const AddedAdapter& adapter = {});
std::unique_ptr<WeightsReader> open_hugging_face(const std::string& folder, const ModelCatalog& catalog);
// Checks bytes against their hashes as they are read.
std::unique_ptr<WeightsReader> open_checkpoint(const std::string& folder, const ModelCatalog& catalog);

// The same as convert_elements() of io, to a tensor on the stream's device.
void convert_elements(Stream& s, const Tensor& to, const void* from, DType from_dtype, const std::string& who);

// Returns whether a tensor is state of training that a model does not need: a run
// starts without it.
bool is_training_state(const std::string& name);

}  // namespace moebius
