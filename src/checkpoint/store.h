// Checkpoints: tensors with global names in safetensors shards, and a manifest. The manifest is written last; a folder
// without it is not a checkpoint.
//
// RUN/checkpoints/step-00000100/{manifest.json, shard-00000.safetensors, ...}. A step folder
// appears whole, by one rename after everything in it is on the device. A crash can leave folders
// named "step-*.tmp-*", which are never taken for a checkpoint. They are removed when a run opens
// the folder, or with the next save. The folders old-1, old-2, ... hold checkpoints that were
// there when a run started over.
//
// Every rank of a run writes the slices that it holds. The manifest says where each slice of the
// global tensors is stored. So a checkpoint loads on any layout, and each rank reads the slices
// that it needs. Hashes cover every byte, so damage is an error at load and never a wrong number.
#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/list.h"
#include "checkpoint/parts.h"
#include "checkpoint/tensors.h"
#include "device/device.h"

namespace moebius {

class CheckpointLock;
class Control;

// The checkpoints of one run. All ranks make each call together, and it throws on all of
// them when it fails on one. One run at a time may have a folder open, in this process or
// another; all ranks see the folder.
class CheckpointStore {
 public:
  static constexpr int64_t kShardBytes = int64_t{4} << 30;
  static constexpr int64_t kPieceBytes = int64_t{16} << 20;  // bytes that are written, and copied from a GPU, at once

  // Creates the folder, and removes what a crash left in it. Throws Error{usage} when another run has it
  // open, or when a rank sees another folder than rank 0. keep: newest checkpoints kept, 0 for all.
  CheckpointStore(std::string dir, int64_t keep, bool async_save, int64_t shard_bytes = kShardBytes);
  // The same on every rank; `ranks` outlives the store.
  CheckpointStore(Control& ranks, std::string dir, int64_t keep, bool async_save, int64_t shard_bytes = kShardBytes);
  ~CheckpointStore();  // waits for this rank to finish writing; errors are lost, so call wait() first

  // For a run on a GPU: allocates the host buffer through which saves copy pieces, so that no save
  // fails for lack of memory.
  void hold_piece();
  // Writes step-`step`, and replaces an existing one. Then it removes the checkpoints that `keep` leaves out, and those
  // of later steps, which belong to an abandoned history. Each rank writes its slices, without replicas. Rank 0 waits
  // for all of them, then publishes the checkpoint.
  //
  // async: waits for a save in flight, copies the tensors, then writes on threads of
  // its own. The error of an asynchronous save is thrown by the next save(), which then
  // does nothing else, or by wait().
  //
  // Throws Error{io} if writing fails: earlier checkpoints are untouched, and no partial file
  // remains. Tensors of a GPU are copied to the host on the stream s of their device: all of them
  // first when async, else a piece at a time.
  void save(int64_t step, const std::vector<NamedTensor>& tensors, const nlohmann::json& meta, Stream* s = nullptr);
  void wait();
  void check();  // throws the error of an asynchronous save that has failed; does not wait for one that runs

  // Moves every checkpoint, newest first, to a new folder DIR/old-N, with copies of those of
  // `files` that exist. They no longer count as checkpoints of this run, and are never removed.
  // Returns the folder, on every rank; empty when there was no checkpoint. A run that starts over
  // calls this, so that its history does not mix with the old one wherever it stops. Throws Error{io}.
  std::string set_aside(const std::vector<std::string>& files = {});

  std::vector<CheckpointInfo> list();  // list_checkpoints(dir) as rank 0 sees it

  int64_t pinned_bytes() const { return piece_.num_bytes(); }    // of the host buffer for pieces
  int64_t snapshot_bytes() const { return snapshot_capacity_; }  // host memory held for copies; 0 unless async
  // Returns the host memory that an asynchronous save of these tensors will hold, in bytes.
  static int64_t snapshot_bytes_of(const std::vector<NamedTensor>& tensors);

 private:
  struct OneRankWorld;  // a world of one rank
  CheckpointStore(std::unique_ptr<OneRankWorld> alone, std::string dir, int64_t keep, bool async_save,
                  int64_t shard_bytes);
  void open();
  void check_shared(const std::string& signature);
  using Share = std::shared_future<std::shared_ptr<const CheckpointManifest>>;
  using Publication = std::shared_future<void>;
  std::string make_folder(int64_t step, const std::string& what);
  void publish(const std::string& what, const Share& share, const std::string& folder);
  std::vector<NamedTensor> take_snapshot(const std::vector<NamedTensor>& tensors, Stream* s);

  std::unique_ptr<OneRankWorld> one_rank_world_;
  Control& ranks_;
  std::string dir_;
  int64_t keep_;
  bool async_save_;
  int64_t shard_bytes_;
  std::unique_ptr<CheckpointLock> lock_;  // rank 0's
  std::unique_ptr<std::byte[]> snapshot_;
  int64_t snapshot_capacity_ = 0;
  HostBuffer piece_;  // buffer for tensors of a GPU, if not async
  // A save in flight: share_ is what this rank writes; publication_, on rank 0, is what
  // follows once all have written.
  std::string unfinished_;  // its folder; empty: no save is in flight
  Share share_;
  Publication publication_;
  PartsProgress progress_;
};

}  // namespace moebius
