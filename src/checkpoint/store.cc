#include "checkpoint/store.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "checkpoint/parts.h"
#include "checkpoint/prune.h"
#include "checkpoint/write.h"
#include "comm/control.h"
#include "core/error.h"
#include "core/fault.h"
#include "core/start_thread.h"
#include "io/files.h"

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
    MOEBIUS_ASSERT(!t.slice || (is_legal(*t.slice) && t.slice->numel() == t.tensor.numel()));
  }
}

std::string file_name(const std::string& path) { return std::filesystem::path(path).filename().string(); }

std::vector<NamedTensor> without_replicas(std::vector<NamedTensor> tensors) {
  std::erase_if(tensors, [](const NamedTensor& t) { return t.is_replica; });
  return tensors;
}

std::string describe(int64_t step, const std::vector<NamedTensor>& tensors, const std::string& dir) {
  int64_t bytes = 0;
  for (const NamedTensor& t : tensors) bytes += t.saved_bytes();
  return fmt::format("save of step {}, {} tensors of {} bytes, to {}", step, tensors.size(), bytes, dir);
}

// Runs body, and turns a lack of memory into an error.
template <class Body>
auto with_memory_advice(const Body& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    MOEBIUS_FAIL(usage,
                 "out of memory of the host; free some, or raise its limits (ulimit -v, those of the container); if "
                 "checkpoint.async is true, false saves without a copy");
  }
}

// Runs body, and puts the name of the save before the text of its error.
template <class Body>
auto with_save_name(const std::string& what, const Body& body) {
  try {
    return with_memory_advice(body);
  } catch (const Error& e) {
    throw Error(e.kind(),
                fmt::format("checkpoint: {}: {}; the checkpoints before it are as they were", what, e.what()));
  }
}

enum State : int64_t { done, busy, failed };

template <class T>
State state_of(const std::shared_future<T>& future) {
  if (!future.valid()) return done;
  if (future.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return busy;
  try {
    future.get();
    return done;
  } catch (const std::exception&) {
    return failed;
  }
}

}  // namespace

struct CheckpointStore::OneRankWorld {
  std::unique_ptr<Transport> transport = make_self_transport();
  Control ranks{*transport};
};

CheckpointStore::CheckpointStore(Control& ranks, std::string dir, int64_t keep, bool async_save, int64_t shard_bytes)
    : ranks_(ranks), dir_(std::move(dir)), keep_(keep), async_save_(async_save), shard_bytes_(shard_bytes) {
  open();
}

CheckpointStore::CheckpointStore(std::string dir, int64_t keep, bool async_save, int64_t shard_bytes)
    : CheckpointStore(std::make_unique<OneRankWorld>(), std::move(dir), keep, async_save, shard_bytes) {}

CheckpointStore::CheckpointStore(std::unique_ptr<OneRankWorld> alone, std::string dir, int64_t keep, bool async_save,
                                 int64_t shard_bytes)
    : one_rank_world_(std::move(alone)),
      ranks_(one_rank_world_->ranks),
      dir_(std::move(dir)),
      keep_(keep),
      async_save_(async_save),
      shard_bytes_(shard_bytes) {
  open();
}

void CheckpointStore::open() {
  MOEBIUS_CHECK(
      usage, keep_ >= 0 && shard_bytes_ > 0,
      "checkpoint: expected keep >= 0 and shards above 0 bytes; got keep {} and {} bytes; set checkpoint.keep", keep_,
      shard_bytes_);
  std::string signature;
  ranks_.on_root([&] {
    make_dirs(dir_);
    lock_ = std::make_unique<CheckpointLock>(dir_);
    remove_unfinished(dir_);  // leftovers of a run that died may fill the disk
    if (ranks_.size() > 1) signature = lock_->sign();
  });
  if (ranks_.size() > 1) check_shared(ranks_.from_root(signature));
}

// Without this check, a rank that sees another folder would only fail at its first save, and would find no checkpoint.
void CheckpointStore::check_shared(const std::string& signature) {
  ranks_.together([&] {
    const std::string got = why_not_signed(dir_, signature);
    MOEBIUS_CHECK(usage, got.empty(),
                  "checkpoint: expected {}/lock to be that of rank 0; got {}; run.dir must be one folder, under the "
                  "same name, on a file system that all ranks share",
                  dir_, got);
  });
}

CheckpointStore::~CheckpointStore() {
  progress_.aborted = ranks_.size() > 1;  // parts that other ranks have not written yet may never arrive
  if (!async_save_) return;
  if (share_.valid()) share_.wait();
  if (publication_.valid()) publication_.wait();
}

// Returns a folder for the next save, the same for every rank.
std::string CheckpointStore::make_folder(int64_t step, const std::string& what) {
  const std::string folder = dir_ + "/" + ranks_.from_root(unfinished_name(step));
  ranks_.on_root([&] {
    with_save_name(what, [&] {
      remove_unfinished(dir_);
      make_dirs(folder);
    });
  });
  return folder;
}

void CheckpointStore::hold_piece() {
  if (!async_save_ && !piece_.data()) piece_ = HostBuffer(DeviceKind::cuda, kPieceBytes);
}

void CheckpointStore::save(int64_t step, const std::vector<NamedTensor>& tensors, const nlohmann::json& meta,
                           Stream* s) {
  MOEBIUS_CHECK(usage, step >= 0, "checkpoint: expected a step >= 0; got {}; count steps from 0", step);
  check_tensors(tensors, s);
  const auto between_steps = ranks_.between_steps();
  wait();
  std::vector<NamedTensor> content = without_replicas(tensors);
  const bool on_gpu = s && s->device() == DeviceKind::cuda;
  const std::string what = describe(step, content, dir_);
  if (async_save_) content = with_save_name(what, [&] { return take_snapshot(content, s); });
  if (on_gpu) hold_piece();
  unfinished_ = make_folder(step, what);
  progress_.all_written = progress_.aborted = false;
  const auto policy = async_save_ ? std::launch::async : std::launch::deferred;
  const CheckpointWriter writer{.rank = ranks_.rank(),
                                .num_ranks = ranks_.size(),
                                .shard_bytes = shard_bytes_,
                                .device = on_gpu && !async_save_ ? s : nullptr,
                                .piece = static_cast<std::byte*>(piece_.data())};
  auto write = [what, folder = unfinished_, step, content = std::move(content), meta, writer] {
    return with_save_name(what, [&] {
      fault_point("checkpoint.after_mkdir");
      auto share = std::make_shared<const CheckpointManifest>(
          write_share(folder, {.step = step, .tensors = content, .meta = meta}, writer));
      if (writer.rank > 0) write_part(folder, *share, writer.rank);
      return share;
    });
  };
  share_ = start_thread([&] { return std::async(policy, std::move(write)); });
  if (ranks_.is_root())
    publication_ = start_thread([&] {
      return std::async(policy, [this, what, share = share_, folder = unfinished_] { publish(what, share, folder); });
    });
  if (!async_save_) wait();
}

// Publishes the checkpoint. Rank 0 runs it after it has written its share.
void CheckpointStore::publish(const std::string& what, const Share& share, const std::string& folder) {
  std::vector<CheckpointManifest> shares{*share.get()};
  const int64_t step = shares[0].step;
  with_save_name(what, [&] {
    for (CheckpointManifest& part : collect_parts(folder, ranks_.size(), progress_)) shares.push_back(std::move(part));
    const CheckpointManifest manifest = merge_manifests(std::move(shares));
    check_complete(manifest, folder);
    publish_checkpoint(dir_, folder, manifest);
  });
  with_memory_advice([&] {
    fault_point("checkpoint.before_prune");
    remove_unfinished(dir_);  // the replaced checkpoint
    prune_after_save(dir_, step, keep_);
  });
}

void CheckpointStore::wait() {
  if (unfinished_.empty()) return;
  const auto between_steps = ranks_.between_steps();
  const std::string folder = std::exchange(unfinished_, "");
  const Share share = std::exchange(share_, {});
  const Publication publication = std::exchange(publication_, {});
  try {
    ranks_.together([&] { share.get(); });
    progress_.all_written = true;
    ranks_.on_root([&] { publication.get(); });
  } catch (...) {
    progress_.aborted = true;
    if (async_save_ && publication.valid()) publication.wait();
    std::error_code ignored;  // the first error is the one to report
    if (ranks_.is_root()) std::filesystem::remove_all(folder, ignored);
    throw;
  }
}

void CheckpointStore::check() {
  if (unfinished_.empty()) return;
  const State mine = std::max(state_of(share_), state_of(publication_));
  if (ranks_.max(mine) != busy) wait();
}

std::string CheckpointStore::set_aside(const std::vector<std::string>& files) {
  wait();
  std::string old;
  ranks_.on_root([&] {
    const std::vector<StepFolder> folders = step_folders(dir_);
    if (folders.empty()) return;
    old = free_old_folder(dir_);
    make_dirs(old);
    for (const std::string& file : files)
      if (std::filesystem::exists(file)) write_file_atomic(old + "/" + file_name(file), read_file(file));
    for (auto it = folders.rbegin(); it != folders.rend(); ++it) {
      rename_folder(it->path, old + "/" + file_name(it->path));
      fault_point("checkpoint.mid_set_aside");
    }
    sync_dir(old);
    sync_dir(dir_);
  });
  return ranks_.from_root(old);
}

int64_t CheckpointStore::snapshot_bytes_of(const std::vector<NamedTensor>& tensors) {
  int64_t bytes = 0;
  for (const NamedTensor& t : tensors) bytes += t.is_replica ? 0 : aligned(t.saved_bytes());
  return bytes;
}

std::vector<NamedTensor> CheckpointStore::take_snapshot(const std::vector<NamedTensor>& tensors, Stream* s) {
  const int64_t bytes = snapshot_bytes_of(tensors);
  if (bytes > snapshot_capacity_) {
    snapshot_.reset();  // so that both copies never exist at once
    snapshot_capacity_ = 0;
    snapshot_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    snapshot_capacity_ = bytes;
  }
  std::vector<NamedTensor> copies = tensors;
  std::byte* at = snapshot_.get();
  const auto copy_to = [&](std::byte* to, Tensor& t) {
    if (s)
      copy_to_host(*s, to, t.data, t.num_bytes(), CopyWait::async);
    else if (t.num_bytes() > 0)
      std::memcpy(to, t.data, t.num_bytes());
    t.data = to;
    t.device = DeviceKind::cpu;
  };
  for (NamedTensor& t : copies) {
    copy_to(at, t.tensor);
    if (t.remainder) copy_to(at + t.tensor.num_bytes(), *t.remainder);
    at += aligned(t.saved_bytes());
  }
  if (s) synchronize(*s);
  return copies;
}

std::vector<CheckpointInfo> CheckpointStore::list() {
  nlohmann::json listed = nlohmann::json::array();
  ranks_.on_root([&] {
    for (const CheckpointInfo& info : list_checkpoints(dir_))
      listed.push_back({info.folder, info.step, info.bytes, info.problem});
  });
  std::vector<CheckpointInfo> infos;
  for (const nlohmann::json& j : nlohmann::json::parse(ranks_.from_root(listed.dump())))
    infos.push_back({j[0].get<std::string>(), j[1].get<int64_t>(), j[2].get<int64_t>(), j[3].get<std::string>()});
  return infos;
}

}  // namespace moebius
