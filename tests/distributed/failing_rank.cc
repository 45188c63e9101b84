// A program for mpirun whose rank 1 fails in the way that is asked for; the others are in an all_reduce_sum.
#include <csignal>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>

#include "tests/distributed/ranks.h"

namespace {

void fail(const std::string& way, moebius::Rank& r) {
  if (way == "all") MOEBIUS_FAIL(usage, "this recipe is wrong on every rank");
  if (r.rank != 1) return;
  if (way == "throw") MOEBIUS_FAIL(numerics, "the loss is not a number");
  if (way == "stop") std::raise(SIGSTOP);
  if (way == "kill") std::raise(SIGKILL);
  if (way == "stall") std::this_thread::sleep_for(std::chrono::seconds(120));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string way = argc > 1 ? argv[1] : "";
  const moebius::MpiOptions options{
      .world = {.timeout_s = 1, .coordinates = [](int r) { return "dp " + std::to_string(r); }},
      .report = [](const std::string& text) { std::fprintf(stderr, "report: %s\n", text.c_str()); }};
  try {
    moebius::run_mpi(options, [&](moebius::Transport& world) {
      moebius::Rank r(world);
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
