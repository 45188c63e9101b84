// The fingerprint of a model's weights shows whether two folders hold the same ones, without reading all of them. It
// does not depend on the path, on the files that the tensors are in, on the names and the layout of experts there, or
// on the ranks that compute it.
//
// A tensor contributes its name, its shape and some of its elements: all of a small tensor, else short pieces of rows
// at even distances. So another model, a training step, or a merged adapter changes the fingerprint, but a change of
// few elements may not. Sampling reads much less than one per cent of a large model.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "comm/shard.h"
#include "config/model_spec.h"
#include "io/hash.h"
#include "weights/source.h"

namespace moebius {

// In a checkpoint of adapters: the key of its meta data that has the fingerprint of the weights that they belong to.
inline constexpr const char* kBaseKey = "base";

// Each half is a sum of hashes of tensors, so that ranks may hash some of them each.
struct WeightsFingerprint {
  Hash128 values;  // of the elements rounded to bf16: an f32 model and its bf16 export have the same
  Hash128 exact;   // of the elements in the dtype that the reader gives them
  bool operator==(const WeightsFingerprint&) const = default;
};
WeightsFingerprint operator+(const WeightsFingerprint& a, const WeightsFingerprint& b);

// Tensors first, first + step, first + 2 * step, ...
struct TensorShare {
  size_t first = 0, step = 1;
};

// Returns that of a share of the tensors. State of training and modules of multi-token prediction are left out, since
// many folders of the same model lack them. Throws the errors of WeightsReader::read_slice().
WeightsFingerprint fingerprint_of(const WeightsReader& weights, const ModelSpec& model, const TensorShare& share = {});

// Returns the elements of a tensor that its fingerprint depends on, in ascending order.
std::vector<ElementRange> sampled_elements(const std::string& name, const Shape& shape);

// Two words of 32 hexadecimal digits: values, exact.
std::string to_text(const WeightsFingerprint& fingerprint);
// Throws Error{input} naming `who` for another text.
WeightsFingerprint parse_fingerprint(const std::string& text, const std::string& who);

}  // namespace moebius
