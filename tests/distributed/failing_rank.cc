// failing_rank WAY [FAULT]: a program for a launcher, whose rank 1 fails in this way. Over MPI rank
// 1 may have this MOEBIUS_FAULT instead (core/fault.h). The other ranks are in an all_reduce_sum, or in a round of a
// PeerWindow where the name of the way ends in "_round".
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <thread>

#include "comm/liveness/rank_supervisor.h"
#include "comm/peer_window.h"
#include "tests/distributed/launched.h"
#include "tests/distributed/ranks.h"

namespace {

// Rank 1 stops the others while they wait for it, for longer than the timeout. It joins when they
// have run again for some time.
// That is like a job that is suspended and continued.
void suspend_others(moebius::Rank& r) {
  std::vector<float> all(r.world->size()), mine{static_cast<float>(::getpid())};  // exact: below 2^24
  r.world->all_gather(r.s, moebius::as_tensor(all), moebius::as_tensor(mine));
  if (r.rank != 1) return;
  const auto tell_others = [&](int signal, int then_sleep_ms) {
    for (const float pid : all)
      if (pid != mine[0]) ::kill(static_cast<pid_t>(pid), signal);
    std::this_thread::sleep_for(std::chrono::milliseconds(then_sleep_ms));
  };
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // until the others wait
  tell_others(SIGSTOP, 5000);
  tell_others(SIGCONT, 1000);
}

// Rank 1 dies before any rank has exchanged a message with it. The others wait for each other forever.
void die_unconnected(moebius::Rank& r) {
  if (r.rank == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));  // until the others wait
    std::raise(SIGKILL);
  }
  std::vector<float> x(7);
  r.world->recv(r.s, moebius::as_tensor(x), 2 - r.rank).wait();
}

void fail(const std::string& way, moebius::Rank& r) {
  if (way == "suspend") suspend_others(r);
  if (way == "all") MOEBIUS_FAIL(usage, "this recipe is wrong on every rank");
  if (way == "kill_idle" && r.rank != 1) std::this_thread::sleep_for(std::chrono::seconds(2));
  if (way == "stop_waiting" && r.rank == 0) std::this_thread::sleep_for(std::chrono::seconds(120));
  if (r.rank != 1) return;
  if (way == "throw") MOEBIUS_FAIL(numerics, "the loss is not a number");
  if (way == "stop") std::raise(SIGSTOP);
  if (way == "kill" || way == "kill_idle") {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));  // until the others wait
    std::raise(SIGKILL);
  }
  if (way == "stall") std::this_thread::sleep_for(std::chrono::seconds(120));
  if (way == "stop_waiting") {  // stopped when it waits, continued when another has reported but the run has not ended
    const std::string pid = std::to_string(::getpid());
    (void)!std::system(("(sleep 0.5; kill -STOP " + pid + "; sleep 3.5; kill -CONT " + pid + ") &").c_str());
  }
}

// Sets the fault of a test, over MPI and on rank 1 only.
void set_fault_on_rank_1(const char* fault) {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK"}) {
    const char* rank = std::getenv(name);
    if (rank != nullptr && std::string(rank) == "1") ::setenv("MOEBIUS_FAULT", fault, 1);
  }
}

// Returns whether the way is one of rounds, and takes that off its name.
bool take_round(std::string& way) {
  constexpr std::string_view kEnd = "_round";
  if (!way.ends_with(kEnd)) return false;
  way.resize(way.size() - kEnd.size());
  return true;
}

void fail_in_round(const std::string& way, moebius::Rank& r) {
  const int64_t bytes = moebius::PeerWindow::control_bytes(r.size);
  const moebius::PeerMemory memory(moebius::DeviceKind::cpu, bytes);
  const moebius::Tensor window{.data = memory.data(), .shape = {bytes}, .dtype = moebius::DType::u8};
  moebius::PeerWindow peers(r.s, *r.world, memory, window);
  peers.round(r.s, {.phase = "dispatch", .layer = "layer 3"});
  fail(way, r);
  peers.round(r.s, {.phase = "combine", .layer = "layer 3"});
}

}  // namespace

int main(int argc, char** argv) {
  if (moebius::started_by_mpirun())
    moebius::supervise_rank(
        "a rank", [](const std::string& text) { std::fprintf(stderr, "supervisor: %s\n", text.c_str()); }, std::_Exit);
  std::signal(SIGTERM, [](int) {});  // as in training: mpirun sends it to the others when a rank has died
  std::string way = argc > 1 ? argv[1] : "";
  const bool in_round = take_round(way);
  if (argc > 2) set_fault_on_rank_1(argv[2]);
  // A rank that throws before the run must be known before others have waited too long for it, however slow the
  // machine is.
  const bool throws_early = argc > 2 && std::string_view(argv[2]).ends_with(":throw");
  const moebius::WorldOptions options{.timeout_s = throws_early ? 30.0 : 3.0,
                                      .coordinates = [](int r) { return "dp " + std::to_string(r); }};
  try {
    moebius::run_launched(options, [&](moebius::Transport& world) {
      moebius::Rank r(world);
      if (in_round) return fail_in_round(way, r);
      if (way == "kill_unconnected") return die_unconnected(r);
      std::vector<float> x(way == "sizes" && r.rank == 1 ? 700 : 7);
      r.world->barrier();
      fail(way, r);
      r.world->all_reduce_sum(r.s, moebius::as_tensor(x));
    });
  } catch (const moebius::Error& e) {
    std::fprintf(stderr, "caught: %s\n", e.what());
    return static_cast<int>(e.kind());
  }
  return 0;
}
