#include "train/checkpoint.h"

#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"
#include "core/fault.h"
#include "train/checkpoint_folder.h"
#include "train/checkpoint_prune.h"
#include "train/checkpoint_write.h"

namespace moebius {
namespace {

constexpr int64_t kAlignBytes = 64;

int64_t aligned(int64_t bytes) { return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes; }

void check_tensors(const std::vector<NamedTensor>& tensors, const Stream* s) {
  const DeviceKind place = s ? s->device() : DeviceKind::cpu;
  std::set<std::string> names;
  for (const NamedTensor& t : tensors) {
    MOEBIUS_CHECK(usage, names.insert(t.name).second && t.tensor.device == place,
                  "checkpoint: expected tensors in {} memory, each name once; got \"{}\", {} on {}; rename or copy it",
                  place == DeviceKind::cpu ? "CPU" : name_of(place), t.name, to_string(t.tensor),
                  name_of(t.tensor.device));
  }
}

}  // namespace

CheckpointStore::CheckpointStore(std::string dir, int64_t keep, bool async_save, int64_t shard_bytes)
    : dir_(std::move(dir)), keep_(keep), async_save_(async_save), shard_bytes_(shard_bytes) {
  MOEBIUS_CHECK(
      usage, keep >= 0 && shard_bytes > 0,
      "checkpoint: expected keep >= 0 and shards above 0 bytes; got keep {} and {} bytes; set checkpoint.keep", keep,
      shard_bytes);
  make_dirs(dir_);
  lock_ = std::make_unique<CheckpointLock>(dir_);
}

CheckpointStore::~CheckpointStore() {
  if (in_flight_.valid()) in_flight_.wait();
}

void CheckpointStore::save(int64_t step, const std::vector<NamedTensor>& tensors, const nlohmann::json& meta,
                           Stream* s) {
  MOEBIUS_CHECK(usage, step >= 0, "checkpoint: expected a step >= 0; got {}; count steps from 0", step);
  check_tensors(tensors, s);
  wait();
  const auto write = [this, step](const std::vector<NamedTensor>& content, const nlohmann::json& content_meta) {
    remove_unfinished(dir_);  // what a run that died left behind may fill the disk
    write_checkpoint(dir_, {.step = step, .tensors = content, .meta = content_meta}, shard_bytes_);
    fault_point("checkpoint.before_prune");
    remove_unfinished(dir_);  // the one that was replaced
    prune_after_save(dir_, step, keep_);
  };
  const bool on_device = s && s->device() != DeviceKind::cpu;
  if (!async_save_) return write(on_device ? take_snapshot(tensors, s) : tensors, meta);
  in_flight_ = std::async(std::launch::async, write, take_snapshot(tensors, s), meta);
}

void CheckpointStore::wait() {
  if (in_flight_.valid()) in_flight_.get();
}

void CheckpointStore::check() {
  if (in_flight_.valid() && in_flight_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) in_flight_.get();
}

void CheckpointStore::set_aside() {
  wait();
  const std::vector<StepFolder> folders = step_folders(dir_);
  for (auto it = folders.rbegin(); it != folders.rend(); ++it) {
    rename_folder(it->path, dir_ + "/" + unfinished_name(it->step));
    fault_point("checkpoint.mid_set_aside");
  }
}

std::vector<NamedTensor> CheckpointStore::take_snapshot(const std::vector<NamedTensor>& tensors, Stream* s) {
  int64_t bytes = 0;
  for (const NamedTensor& t : tensors) bytes += aligned(t.tensor.num_bytes());
  if (bytes > snapshot_capacity_) {
    snapshot_.reset();  // never both
    snapshot_capacity_ = 0;
    snapshot_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    snapshot_capacity_ = bytes;
  }
  std::vector<NamedTensor> copies = tensors;
  std::byte* at = snapshot_.get();
  for (NamedTensor& t : copies) {
    const int64_t size = t.tensor.num_bytes();
    if (s)
      copy_to_host(*s, at, t.tensor.data, size, CopyWait::async);
    else if (size > 0)
      std::memcpy(at, t.tensor.data, size);
    t.tensor.data = at;
    t.tensor.device = DeviceKind::cpu;
    at += aligned(size);
  }
  if (s) synchronize(*s);
  return copies;
}

std::optional<std::string> CheckpointStore::newest_complete(std::vector<std::string>* rejected) const {
  return newest_checkpoint(dir_, rejected);
}

}  // namespace moebius
