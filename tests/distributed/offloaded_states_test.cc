// A disk that is full when states in host memory are saved: the error names it, the checkpoint before is whole, and
// training continues with the states as they were.
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/resource.h>

#include "checkpoint/list.h"
#include "checkpoint/store.h"
#include "comm/control.h"
#include "io/testing.h"
#include "tests/distributed/checkpoint_files.h"
#include "tests/equivalence/tiny.h"
#include "train/state.h"

namespace moebius {
namespace {

// While one exists, a write beyond this size of a file fails, as on a full disk.
class SmallFiles {
 public:
  explicit SmallFiles(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit small = before_;
    small.rlim_cur = bytes;
    handler_ = ::signal(SIGXFSZ, SIG_IGN);
    ::setrlimit(RLIMIT_FSIZE, &small);
  }
  ~SmallFiles() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int) = nullptr;
};

EngineSpec on_the_host(MasterFormat master, StateFormat state) {
  ModelSpec model = testing::tiny_model();
  model.hidden_size = 256;  // rows of whole blocks of 8-bit codes
  EngineSpec spec = testing::tiny_engine(model, 2, DType::bf16, 1);
  spec.optimizer->offload = true;
  spec.optimizer->master = master;
  spec.optimizer->state = state;
  return spec;
}

void train_step(Engine& engine, int64_t step) {
  testing::fill_random(engine.batch(), engine.spec().model, step, 0, 2);
  engine.step(step, 1e-2);
  engine.end_of_step();
}

TEST(OffloadedStates, SurviveADiskThatIsFull) {
  using enum MasterFormat;
  for (const auto& [master, state] : {std::pair{f32, StateFormat::f32}, std::pair{bf16_remainder, StateFormat::bf16},
                                      std::pair{bf16_stochastic, StateFormat::blocks_8bit}}) {
    const TestDir dir;
    const auto saved_after = [&, master = master, state = state](const std::string& name, bool meets_a_full_disk) {
      Engine engine(on_the_host(master, state));
      const std::unique_ptr<Transport> self = make_self_transport();
      Control control(*self);
      testing::init_params(engine);
      EXPECT_GT(engine.plan().bytes(Life::host), 0);
      train_step(engine, 1);
      save_checkpoint(engine, control, dir.path(name), 1);
      const CheckpointBytes first = contents_of(dir.path(name) + "/step-00000001");
      train_step(engine, 2);
      if (meets_a_full_disk) {
        {
          const SmallFiles full(20'000);
          expect_error(ErrorKind::io, "File too large", [&] { save_checkpoint(engine, control, dir.path(name), 2); });
        }
        EXPECT_EQ(newest_checkpoint(dir.path(name), nullptr), dir.path(name) + "/step-00000001");
        EXPECT_EQ(contents_of(dir.path(name) + "/step-00000001"), first);
      }
      train_step(engine, 3);
      save_checkpoint(engine, control, dir.path(name), 3);
      return contents_of(dir.path(name) + "/step-00000003");
    };
    EXPECT_EQ(saved_after("full", true), saved_after("plain", false));
  }
}

}  // namespace
}  // namespace moebius
