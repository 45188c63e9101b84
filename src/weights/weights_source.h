// Where weights come from: the two kinds of folder behind one reader. weights.h fills a model from one, export.h writes
// another folder from one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/tensor_slice.h"
#include "model/model.h"

namespace moebius {

struct WeightsFolder {
  enum class Kind { hugging_face, checkpoint };
  Kind kind = Kind::hugging_face;
  std::string path;  // the folder itself: a newest checkpoint is resolved
};

// Error{input} naming what was looked for.
WeightsFolder find_weights(const std::string& path);

// Whether there are tensors of multi-token prediction: of layers behind the model's. Config files often promise a
// module that was not saved.
bool has_mtp(const WeightsFolder& from, const ModelSpec& model);
// The model with the modules that there are, all or none.
ModelSpec with_mtp_of(const WeightsFolder& from, ModelSpec model);
// What to tell whoever was promised them.
std::string missing_mtp_notice(const WeightsFolder& from, const ModelSpec& model);
// Whether a canonical name is one of those tensors.
bool is_of_mtp(const std::string& name, const ModelSpec& model);

struct WeightsEntry {
  std::string name;  // canonical
  Shape shape;
  DType dtype = DType::f32;  // on disk
  int64_t bytes() const { return shape.numel() * size_of(dtype); }
};

// The tensors of one model on disk, each read on its own. Open, it has accounted for all of them.
class WeightsReader {
 public:
  virtual ~WeightsReader() = default;
  // In the order of the model's parameters. State that only training keeps may be missing.
  virtual const std::vector<WeightsEntry>& entries() const = 0;
  virtual void read(size_t entry, void* dst) const = 0;  // its bytes, in the dtype on disk
  // The elements of a slice of it. As it stands here it reads all of the tensor on the way.
  virtual void read_slice(size_t entry, const TensorSlice& slice, void* dst) const;
};

// Strict: Error{input} lists what is missing, unexpected or of another shape (the first 20 and the counts). Tensors of
// multi-token prediction are passed over where the model holds none of its modules (EngineSpec::shape), and so are the
// hub's copies of embedding and head in them, which must be copies.
std::unique_ptr<WeightsReader> open_weights(const WeightsFolder& from, const Model& model);
std::unique_ptr<WeightsReader> open_hugging_face(const std::string& folder, const Model& model);
std::unique_ptr<WeightsReader> open_checkpoint(const std::string& folder, const Model& model);  // bytes against hashes

// to = from, n elements in host memory, rounded to nearest even where it narrows
// to: f32 or bf16, on the stream's device.
// from: f32, bf16, f16 or f64, anything else is Error{input} naming `who`.
void convert_elements(Stream& s, const Tensor& to, const void* from, DType from_dtype, const std::string& who);
// The same on the host: n elements of to_dtype (f32 or bf16).
void convert_elements(void* to, DType to_dtype, const void* from, DType from_dtype, int64_t n, const std::string& who);

// What training keeps for itself and a model does without: it starts even where nothing was saved.
bool is_training_state(const std::string& name);

}  // namespace moebius
