// Checkpoints of an engine's training state, written and read as a run does it, and their contents.
#pragma once

#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/reader.h"
#include "checkpoint/store.h"
#include "comm/control.h"
#include "io/testing.h"
#include "train/state.h"

namespace moebius {

using CheckpointBytes = std::map<std::string, std::vector<std::byte>>;

// Returns every global tensor of a checkpoint.
inline CheckpointBytes contents_of(const std::string& folder) {
  const CheckpointReader reader(folder);
  CheckpointBytes contents;
  for (const auto& [name, tensor] : reader.tensors()) {
    std::vector<std::byte>& bytes = contents[name];
    bytes.resize(tensor.num_bytes());
    reader.read({.name = name,
                 .tensor = {.data = bytes.data(), .shape = {numel_of(tensor.shape)}, .dtype = tensor.dtype},
                 .slice = whole_slice(tensor.shape)});
  }
  return contents;
}

// Even steps are saved in the background.
inline void save_checkpoint(Engine& engine, Control& control, const std::string& dir, int64_t step) {
  Stream s = engine.stream();
  CheckpointStore store(control, dir, 0, /*async_save=*/step % 2 == 0);
  store.save(step, training_state(engine), {{"step", step}}, &s);
  store.wait();
}

inline void load_checkpoint(Engine& engine, Control& control, const std::string& folder) {
  Stream s = engine.stream();
  CheckpointReader(folder, control.is_root()).read_all(control, training_state(engine), &s);
  engine.model().params().sync(s);
  engine.gather_weights(s);
}

// Completes the last update, saves a checkpoint of an engine on one rank to dir/name, and returns its contents.
inline CheckpointBytes state_of(Engine& engine, const TestDir& dir, const char* name) {
  const std::unique_ptr<Transport> self = make_self_transport();
  Control control(*self);
  engine.finish_update();
  save_checkpoint(engine, control, dir.path(name), 1);
  return contents_of(dir.path(name) + "/step-00000001");
}

}  // namespace moebius
