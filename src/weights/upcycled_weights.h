// The tensors of an upcycled model (weights/upcycle.h). Each is made from tensors of the dense
// model when it is read.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "weights/source.h"
#include "weights/upcycle.h"

namespace moebius {

class UpcycledWeights final : public WeightsReader {
 public:
  // moe: the tensors of upcycled_model(). The dense reader and the spec must outlive this reader.
  UpcycledWeights(const WeightsReader& dense, const ModelCatalog& moe, const UpcycleSpec& spec);

  const std::vector<WeightsEntry>& entries() const override { return entries_; }
  // Not for several threads at once: it keeps the dense tensor that was read last, since many
  // experts are made from one.
  void read(size_t entry, void* dst) const override;

 private:
  // The source of an entry: slice `slice` of the dense tensor, all of it, or no dense
  // tensor at all.
  struct Source {
    enum class Kind { whole, slice, router, zeros };
    Kind kind = Kind::whole;
    size_t dense = 0;
    int64_t slice = 0;
  };
  void add(const ParamPart& part);
  void add_slice(const ParamPart& part, const std::string& dense_name, int64_t slice);
  size_t dense_entry(const std::string& name) const;
  const std::vector<char>& dense_bytes(size_t entry) const;
  void read_slice(const WeightsEntry& entry, const Source& source, void* dst) const;
  void read_router(const WeightsEntry& entry, void* dst) const;

  const WeightsReader& dense_;
  const UpcycleSpec& spec_;
  float router_std_;
  std::map<std::string, size_t> dense_index_;
  std::vector<WeightsEntry> entries_;
  std::vector<Source> sources_;

  // Two, since reads of gate and up alternate.
  struct Kept {
    size_t entry = 0;
    std::vector<char> bytes;
  };
  mutable Kept kept_[2];
  mutable int next_kept_ = 0;
};

}  // namespace moebius
