// Starts of ranks that are spread over hosts: by mpirun, as torchrun does, and by variables alone.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/transport/mpi.h"
#include "comm/transport/torch_store_testing.h"
#include "tests/faults/training_run.h"
#include "tests/hosts/network.h"

namespace moebius {

enum class Launcher { mpirun, torchrun, variables };

inline std::string name_of_launcher(const testing::TestParamInfo<Launcher>& info) {
  constexpr const char* kNames[] = {"Mpirun", "Torchrun", "Variables"};
  return kNames[static_cast<int>(info.param)];
}

// Each rank runs a program of this build with these words in this folder.
struct RanksProgram {
  std::string path;
  Words words;
  std::string dir;
};

// Ranks over hosts: as many on each, in order.
class RanksOnHosts {
 public:
  RanksOnHosts(const Network& network, int num_ranks) : network_(network), num_ranks_(num_ranks) {}

  int host_of(int rank) const { return rank * network_.num_hosts() / num_ranks_; }
  // Processes that the test started: mpirun's, or one for each rank. Their output is in err-RANK, of mpirun in err-0.
  std::vector<pid_t> start(Launcher launcher, const RanksProgram& program) {
    if (launcher == Launcher::mpirun) return {start_mpirun(program)};
    const int port = launcher == Launcher::torchrun ? start_store(program.dir) : 29500;
    std::vector<pid_t> processes;
    for (int r = 0; r < num_ranks_; ++r) {
      Surroundings around = around_of(r, host_of(r));
      around.environment = {{"RANK", std::to_string(r)},
                            {"WORLD_SIZE", std::to_string(num_ranks_)},
                            {"MASTER_ADDR", Network::name(0)},
                            {"MASTER_PORT", std::to_string(port)}};
      if (launcher == Launcher::variables)
        around.environment["MOEBIUS_SECRET"] = "0123456789abcdef";
      else
        around.environment.insert({{"TORCHELASTIC_RUN_ID", "run"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
      processes.push_back(start_program(program.path, program.dir, program.words, {}, around));
    }
    return processes;
  }
  // Returns their exit codes.
  std::vector<int> run(Launcher launcher, const RanksProgram& program) {
    const std::vector<pid_t> processes = start(launcher, program);
    std::vector<int> codes;
    for (const pid_t process : processes) codes.push_back(end_of(process));
    end_store();
    return codes;
  }
  ~RanksOnHosts() { end_store(); }

 private:
  Surroundings around_of(int rank, int host) const {
    return {.environment = {},
            .out = fmt::format("out-{}", rank),
            .err = fmt::format("err-{}", rank),
            .enter = [this, host] { network_.enter(host); }};
  }
  // By default Open MPI refuses to run as root, which containers do. If there are more ranks than cores, waiting ranks
  // must yield.
  pid_t start_mpirun(const RanksProgram& program) const {
    const std::string agent = program.dir + "/agent";
    network_.write_agent(agent);
    std::string hosts;
    for (int h = 0; h < network_.num_hosts(); ++h)
      hosts += fmt::format("{}{}:{}", h == 0 ? "" : ",", Network::name(h), num_ranks_ / network_.num_hosts());
    std::string command =
        fmt::format("exec {} -n {} -H {} --mca plm_rsh_agent {}", MOEBIUS_MPIRUN, num_ranks_, hosts, agent);
    for (const char* part : {"oob", "btl"}) command += fmt::format(" --mca {}_tcp_if_include tun0", part);
    command += " " + program.path;
    for (const std::string& word : program.words) command += " '" + word + "'";
    Surroundings around = around_of(0, 0);
    around.environment = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                          {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                          {"OMPI_MCA_mpi_yield_when_idle", "1"}};
    return start_program("/bin/sh", program.dir, {"-c", command}, {}, around);
  }
  // Serves on host 0 until end_store(). Returns its port.
  int start_store(const std::string& dir) {
    const std::string file = dir + "/port";
    store_ = start_forked({}, [&] {
      network_.enter(0);
      const TestStore store(/*loopback_only=*/false);
      write_file_atomic(file, std::to_string(store.port()));
      ::pause();
    });
    while (!std::filesystem::exists(file)) ::usleep(1000);
    return std::stoi(read_file(file));
  }
  void end_store() {
    if (store_ <= 0) return;
    ::kill(store_, SIGKILL);
    end_of(std::exchange(store_, 0));
  }

  const Network& network_;
  const int num_ranks_;
  pid_t store_ = 0;
};

}  // namespace moebius
