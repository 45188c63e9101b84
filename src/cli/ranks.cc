#include "cli/ranks.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <vector>

#include "comm/transport/mpi.h"
#include "comm/transport/tcp.h"
#include "comm/transport/threads.h"
#include "io/files.h"
#include "io/hash.h"

namespace moebius {
namespace {

constexpr double kLongestTimeoutS = 7 * 24 * 3600;  // so that every wait ends

void print_error(const std::string& text) { Log(stderr, false).line("error: " + text); }
void print_warning(const std::string& text) { Log(stderr, false).line("warning: " + text); }
void end_process() { std::_Exit(static_cast<int>(ErrorKind::distributed)); }

// srun without a common PMI starts processes, each of which finds a world of one.
void check_world(const Launch& launch, const Transport& world) {
  if (world.size() == launch.num_ranks) return;
  const std::string text = fmt::format(
      "launch: {} says that {} processes were started, and MPI ({}) finds a world of {}; start them with the mpirun of "
      "that MPI, or choose the PMI of srun (srun --mpi=pmix or --mpi=pmi2)",
      launch.evidence, launch.num_ranks, mpi_version(), world.size());
  throw Error(ErrorKind::usage, launch.rank == 0 ? text : "");
}

TcpOptions tcp_options(const Launch& launch, const WorldOptions& world) {
  return {.world = world,
          .rank = launch.rank,
          .size = launch.num_ranks,
          .master = {.host = launch.master_addr, .port = launch.master_port},
          .has_store = launch.has_store,
          .host = launch.host,
          .run = launch.run,
          .secret = launch.secret,
          .report = print_error,
          .warn = print_warning,
          .end_process = end_process};
}

MpiOptions mpi_options(const Launch& launch, const WorldOptions& world) {
  return {
      .world = world, .rank = launch.rank, .report = print_error, .warn = print_warning, .end_process = end_process};
}

}  // namespace

WorldOptions world_options(std::optional<double> timeout_s, const std::function<MeshShape()>& shape_of) {
  MOEBIUS_CHECK(usage, !timeout_s || (*timeout_s > 0 && *timeout_s <= kLongestTimeoutS),
                "--timeout: expected seconds above 0, at most {} (a week); got {}", kLongestTimeoutS, *timeout_s);
  WorldOptions options{.timeout_s = timeout_s};
  try {
    options.coordinates = [shape = shape_of()](int r) { return to_string(place_of(shape, r)); };
  } catch (const Error&) {
    options.coordinates = nullptr;
  }
  return options;
}

void run_ranks(const Launch& launch, const WorldOptions& options, const RankBody& body) {
  switch (launch.kind) {
    case Launch::Kind::single: {
      const std::unique_ptr<Transport> self = make_self_transport();
      return body(*self);
    }
    case Launch::Kind::threads:
      return run_threads(launch.num_ranks, options, body);
    case Launch::Kind::tcp:
      return run_tcp(tcp_options(launch, options), body);
    case Launch::Kind::mpi:
      run_mpi(mpi_options(launch, options), [&](Transport& world) {
        check_world(launch, world);
        body(world);
      });
  }
}

std::string launch_text(const Launch& launch) {
  switch (launch.kind) {
    case Launch::Kind::single:
      return "one rank";
    case Launch::Kind::threads:
      return fmt::format("{} ranks, threads of this process", launch.num_ranks);
    case Launch::Kind::tcp:
      return fmt::format("{} ranks over TCP ({})", launch.num_ranks, launch.evidence);
    default:
      return fmt::format("{} ranks of MPI ({}, {})", launch.num_ranks, launch.evidence, mpi_version());
  }
}

void warn_of_not_finite(Log& log, Control& control, const std::string& path, const std::vector<NotFinite>& found) {
  const std::vector<std::string> said = control.gather(not_finite_warning(path, found));
  for (const std::string& warning : std::set<std::string>(said.begin(), said.end()))
    if (control.is_root() && !warning.empty()) log.warn("{}", warning);
}

namespace {

// The CPUs that a process may use, and the machine that they are of.
struct ProcessCpus {
  cpu_set_t cpus;
  std::string host;

  // The form in which ranks exchange it: the bytes of the set, then the host.
  std::string to_message() const { return std::string(reinterpret_cast<const char*>(&cpus), sizeof cpus) + host; }
  static ProcessCpus from_message(const std::string& message) {
    ProcessCpus process{.cpus = {}, .host = message.substr(sizeof(cpu_set_t))};
    std::memcpy(&process.cpus, message.data(), sizeof process.cpus);
    return process;
  }
  bool shares_with(const ProcessCpus& other) const {
    cpu_set_t both;
    CPU_AND(&both, &cpus, &other.cpus);
    return host == other.host && CPU_COUNT(&both) > 0;
  }
};

// Returns the XXH3-128 of the program's own file. The file is read in pieces, since it is larger than all the memory
// that a small run needs.
std::string program_hash() {
  const File program = File::open_read("/proc/self/exe");
  std::vector<char> piece(1 << 16);
  Hasher hasher;
  for (int64_t at = 0, n = 0; (n = program.read_some(piece.data(), std::ssize(piece), at)) > 0; at += n)
    hasher.update(piece.data(), n);
  return to_hex(hasher.digest());
}

}  // namespace

int cpu_share(Control& control) {
  ProcessCpus own{};
  if (sched_getaffinity(0, sizeof own.cpus, &own.cpus) != 0) return 1;
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  own.host = host;
  int sharing = 0;  // ranks, with this one
  for (const std::string& message : control.gather(own.to_message()))
    if (own.shares_with(ProcessCpus::from_message(message))) ++sharing;
  return std::max(1, CPU_COUNT(&own.cpus) / std::max(1, sharing));
}

void check_same_program(Control& control, const std::string& command) {
  if (control.size() == 1) return;
  check_agree(control, {"the command and the program's file (XXH3)", command + " of " + program_hash()});
}

}  // namespace moebius
