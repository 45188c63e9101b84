// The world of a launcher: mpirun's, or over TCP that of start_ranks, which sets the
// variables of torchrun.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "comm/transport/mpi.h"
#include "comm/transport/tcp.h"

namespace moebius {

inline bool started_by_mpirun() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"})
    if (std::getenv(name) != nullptr) return true;
  return false;
}

inline bool started_over_tcp() { return std::getenv("MASTER_PORT") != nullptr; }

inline void report_to_stderr(const std::string& text) { std::fprintf(stderr, "report: %s\n", text.c_str()); }

inline void end_process() { std::_Exit(static_cast<int>(ErrorKind::distributed)); }

// REQUIRES: started by one of them.
inline void run_launched(const WorldOptions& world, const RankBody& body) {
  const auto number = [](const char* name) { return std::atoi(std::getenv(name)); };
  if (!started_over_tcp()) {
    const char* name = std::getenv("PMI_RANK") != nullptr ? "PMI_RANK" : "OMPI_COMM_WORLD_RANK";
    return run_mpi({.world = world,
                    .rank = std::getenv(name) != nullptr ? number(name) : 0,
                    .report = report_to_stderr,
                    .warn = report_to_stderr,
                    .end_process = end_process},
                   body);
  }
  run_tcp({.world = world,
           .rank = number("RANK"),
           .size = number("WORLD_SIZE"),
           .master = {.host = std::getenv("MASTER_ADDR"), .port = number("MASTER_PORT")},
           .secret = std::getenv("MOEBIUS_SECRET") != nullptr ? std::getenv("MOEBIUS_SECRET") : "",
           .report = report_to_stderr,
           .end_process = end_process,
           .stall_s = 2},
          body);
}

}  // namespace moebius
