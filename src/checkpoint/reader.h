// Reads a checkpoint: all of it, or the slices that a rank needs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/tensors.h"
#include "device/device.h"

namespace moebius {

class Control;
struct CheckpointManifest;

// Reads one step folder. Its constructor checks the manifest, the sizes of the files
// and their headers.
class CheckpointReader {
 public:
  // Throws Error{input} when the manifest is missing, damaged or of another version, or a file is
  // missing or damaged. check_files = false leaves the check of the files to read(). It is for
  // all ranks but the one that checks them.
  explicit CheckpointReader(const std::string& folder, bool check_files = true);

  int64_t step() const;
  int64_t num_ranks() const;           // number of ranks of the run that saved it
  const nlohmann::json& meta() const;  // the meta data passed to save()
  const std::map<std::string, CheckpointTensor>& tensors() const;
  int64_t num_files() const;
  int64_t num_bytes() const;  // bytes of the files

  // Fills into.tensor, which must have the dtype and the number of elements of its slice. With
  // into.converts, f32 and bf16 may replace each other; f32 is then rounded to nearest even. With into.code, u8 codes
  // may too, rounded to nearest; scales that the checkpoint does not have are then filled with their codes. Reads
  // only the parts of the files that hold the slice, and checks their hashes.
  // Throws Error{input} when there is no such tensor, when its dtype or shape differs, or when its bytes are
  // not those that were saved; into.tensor is then undefined.
  // A tensor of a GPU is filled on the stream s of its device.
  void read(const NamedTensor& into, Stream* s = nullptr) const;
  void read(const std::string& name, const Tensor& into, Stream* s = nullptr) const;  // all of it, shapes equal
  // Copies a slice to host memory, in the dtype on disk. Reads its bytes alone and checks no hash, so a damaged file is
  // not noticed.
  void read_unchecked(const std::string& name, const TensorSlice& slice, void* dst) const;
  void verify(const std::string& name) const;  // reads all bytes and checks their hashes

  // Reads all of the checkpoint into exactly these tensors: checks every name, shape and dtype
  // before the first byte is read. Throws Error{input} listing what is missing, unexpected or different
  // (the first 20 of each, and how many).
  void read_all(const std::vector<NamedTensor>& into, Stream* s = nullptr) const;
  // The same, called by all ranks together, each with the slices that it needs: a tensor is
  // unexpected when no rank asks for it. An error is thrown on all of them.
  void read_all(Control& ranks, const std::vector<NamedTensor>& into, Stream* s = nullptr) const;

 private:
  const CheckpointTensor& at(const std::string& name) const;
  void check_names(const std::vector<NamedTensor>& into, const std::set<std::string>& asked) const;
  std::vector<float> values_of(const NamedTensor& into) const;
  void copy_slice(const std::string& name, const TensorSlice& slice, std::byte* dst) const;

  std::string folder_;
  std::shared_ptr<const CheckpointManifest> manifest_;
};

}  // namespace moebius
