// Checkpoints: global named tensors in safetensors shards, and a manifest that is written last and makes them count.
//
// RUN/checkpoints/step-00000100/{manifest.json, shard-00000.safetensors, ...}. A step folder appears whole, by one
// rename after everything in it is on the device. Whatever a crash leaves behind is named "step-*.tmp-*", is never
// taken for a checkpoint and goes when a run opens the folder, or with the next save. old-1, old-2, ... hold what
// runs that started over found there.
// Every rank of a run writes the slices that it holds, and the manifest says which slices of the global tensors lie
// where: a checkpoint loads on any layout, each rank reading what it needs. Every byte is under a hash: damage is an
// error at load, never a number.
#pragma once

#include <atomic>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/tensor_slice.h"
#include "device/device.h"

namespace moebius {

struct NamedTensor {
  std::string name;                       // global: the same on every layout
  Tensor tensor;                          // the elements of the slice
  std::optional<TensorSlice> slice = {};  // what this rank holds of the global tensor; none: all of it
  bool is_replica = false;                // another rank saves the same
};

// Where a slice of a tensor lies.
struct CheckpointPiece {
  std::string file;
  int64_t offset = 0;  // from the start of the file
  int64_t bytes = 0;
  TensorSlice slice;
  // XXH3-128 of every kHashedBytes of it (SafetensorsWriter) and of the rest; one alone is of all of it.
  std::vector<std::string> xxh3;  // 32 hex digits each
};

struct CheckpointTensor {
  DType dtype = DType::f32;
  std::vector<int64_t> shape;           // global
  std::vector<CheckpointPiece> pieces;  // each element is in one of them
  int64_t num_bytes() const;            // of the global tensor
};

class CheckpointLock;
class Control;
struct CheckpointManifest;

struct CheckpointInfo {
  std::string folder;
  int64_t step = 0;
  int64_t bytes = 0;    // of its files; 0 when damaged
  std::string problem;  // why it cannot be used; empty when complete
};

// How far the other ranks are, for who waits for what they write.
struct PartsProgress {
  std::atomic<bool> all_written{false};  // every rank has said so: what is not seen soon will not be
  std::atomic<bool> given_up{false};     // a rank has failed
};

// The checkpoints of one run, on every rank of it: each call is made by all ranks together, and throws on all of them
// when it fails on one. One run at a time may have a folder open, in this process or another; all ranks see the folder.
class CheckpointStore {
 public:
  static constexpr int64_t kShardBytes = int64_t{4} << 30;
  static constexpr int64_t kPieceBytes = int64_t{16} << 20;  // written at once, and of a GPU copied at once

  // Creates the folder, and removes what a crash left in it. Error{usage} when another run has it open, or when a rank
  // sees another folder than rank 0. keep: newest checkpoints kept, 0 for all.
  CheckpointStore(std::string dir, int64_t keep, bool async_save, int64_t shard_bytes = kShardBytes);
  // The same on every rank; `ranks` outlives the store.
  CheckpointStore(Control& ranks, std::string dir, int64_t keep, bool async_save, int64_t shard_bytes = kShardBytes);
  ~CheckpointStore();  // waits for what this rank is writing; errors are lost, so call wait() first

  // For a run on a GPU: what the pieces of its saves go through is held from here on, and no save can lack it.
  void hold_piece();
  // Makes step-`step`, replacing one that is there; then removes what `keep` leaves out, and any of a later step, which
  // is of a history that this run did not go on with. Each rank writes its slices, but replicas; rank 0 waits for all
  // of them, then makes the checkpoint count. async: copies the tensors, then writes on threads of its own; a save in
  // flight is waited for first. Error{io} when the disk refuses: the checkpoints before are untouched, nothing
  // half-written stays. The error of an asynchronous save is thrown by the next save(), which then does nothing else,
  // or by wait().
  // Tensors of a GPU are copied to the host on the stream s of their device: all of them first when async, else a piece
  // at a time.
  void save(int64_t step, const std::vector<NamedTensor>& tensors, const nlohmann::json& meta, Stream* s = nullptr);
  void wait();
  void check();  // throws the error of an asynchronous save that has failed; does not wait for one that runs

  // Moves every checkpoint, newest first, to a new folder DIR/old-N, with copies of the files `beside` that there are:
  // nothing takes them for checkpoints of this run any more, and nothing removes them. Returns the folder, on every
  // rank; empty when there was no checkpoint. For a run that starts over: its history must not mix with theirs,
  // wherever it dies. Error{io}.
  std::string set_aside(const std::vector<std::string>& beside = {});

  std::vector<CheckpointInfo> list();  // as list_checkpoints(dir), as rank 0 sees it
  // As newest_checkpoint(dir, rejected).
  std::optional<std::string> newest_complete(std::vector<std::string>* rejected);

  int64_t pinned_bytes() const { return piece_.num_bytes(); }    // that are held for pieces
  int64_t snapshot_bytes() const { return snapshot_capacity_; }  // host memory held for copies; 0 unless async
  // What an asynchronous save of these will hold.
  static int64_t snapshot_bytes_of(const std::vector<NamedTensor>& tensors);

 private:
  struct Alone;  // a world of one rank
  CheckpointStore(std::unique_ptr<Alone> alone, std::string dir, int64_t keep, bool async_save, int64_t shard_bytes);
  void open();
  void check_shared(const std::string& signature);
  using Share = std::shared_future<std::shared_ptr<const CheckpointManifest>>;
  using Publication = std::shared_future<void>;
  std::string make_folder(int64_t step, const std::string& what);
  void publish(const std::string& what, const Share& share, const std::string& folder);
  std::vector<NamedTensor> take_snapshot(const std::vector<NamedTensor>& tensors, Stream* s);

  std::unique_ptr<Alone> alone_;
  Control& ranks_;
  std::string dir_;
  int64_t keep_;
  bool async_save_;
  int64_t shard_bytes_;
  std::unique_ptr<CheckpointLock> lock_;  // rank 0's
  std::unique_ptr<std::byte[]> snapshot_;
  int64_t snapshot_capacity_ = 0;
  HostBuffer piece_;  // of a GPU's tensors, when not async
  // A save in flight: what this rank writes, and on rank 0 all that follows once every rank has written.
  std::string unfinished_;  // its folder; empty: there is none
  Share share_;
  Publication publication_;
  PartsProgress progress_;
};

// Reads one step folder. Open, it has checked the manifest, the sizes of the files and their headers.
class CheckpointReader {
 public:
  // Error{input} when the manifest is missing, damaged or of another version, or a file is missing or damaged.
  // check_files false leaves the files to read(): for ranks beside the one that has checked them.
  explicit CheckpointReader(const std::string& folder, bool check_files = true);

  int64_t step() const;
  int64_t num_ranks() const;           // that saved it
  const nlohmann::json& meta() const;  // what was given to save()
  const std::map<std::string, CheckpointTensor>& tensors() const;
  int64_t num_files() const;
  int64_t num_bytes() const;  // of the files

  // Fills into.tensor, which must have the dtype and the number of elements of its slice: reads the parts of the files
  // that hold it, and checks their hashes. Error{input} when there is no such tensor, when it is another, or when its
  // bytes are not those that were saved; what into.tensor holds then is undefined.
  // A tensor of a GPU is filled on the stream s of its device.
  void read(const NamedTensor& into, Stream* s = nullptr) const;
  void read(const std::string& name, const Tensor& into, Stream* s = nullptr) const;  // all of it, shapes equal
  void verify(const std::string& name) const;                                         // every byte, into nothing

  // All of the checkpoint into exactly these: checks every name, shape and dtype before the first byte is read.
  // Error{input} listing what is missing, unexpected or different (the first 20 of each, and how many).
  void read_all(const std::vector<NamedTensor>& into, Stream* s = nullptr) const;
  // The same on every rank together, each with what it needs: unexpected is what no rank asks for. An error is thrown
  // on all of them.
  void read_all(Control& ranks, const std::vector<NamedTensor>& into, Stream* s = nullptr) const;

 private:
  const CheckpointTensor& at(const std::string& name) const;
  void check_names(const std::vector<NamedTensor>& into, const std::set<std::string>& asked) const;
  void copy_slice(const std::string& name, const TensorSlice& slice, std::byte* dst) const;

  std::string folder_;
  std::shared_ptr<const CheckpointManifest> manifest_;
};

// The step folders of `dir` by rising step, their manifests and file sizes checked; none when there is no such folder.
std::vector<CheckpointInfo> list_checkpoints(const std::string& dir);

// The folder of the newest complete checkpoint. `rejected`, unless null, gets a line for each newer one passed over,
// with the reason.
std::optional<std::string> newest_checkpoint(const std::string& dir, std::vector<std::string>* rejected);

struct VerifyReport {
  int64_t step = -1;
  int64_t num_tensors = 0, num_files = 0, bytes = 0;
  std::vector<std::string> problems;  // a line each
  bool ok() const { return problems.empty(); }
};

// Reads every byte against its hash. Damage is in the report, never thrown.
VerifyReport verify_checkpoint(const std::string& folder);

// Removes every checkpoint older than the newest `keep` ones that verify, and returns their folders; none when fewer
// verify. Error{usage} unless keep >= 1, or when a run has the folder open.
std::vector<std::string> prune_checkpoints(const std::string& dir, int64_t keep);

}  // namespace moebius
