#include "plan/cost/start_up.h"

namespace moebius {
namespace {

// A line of the table: a host of up to 15 characters, a port of up to 5, a space and the end.
constexpr double kTableLine = 22;
// The bytes of a handshake (comm/transport/handshake.h): a greeting, a challenge, an answer and the acceptance.
constexpr double kProof = 4;

// Returns the messages for the groups of more than one rank, which need an NCCL id on GPUs.
double messages_of_groups(const MeshShape& mesh, bool first) {
  double messages = 0;
  for (int i = 0; i < kNumAxes; ++i) {
    const auto n = static_cast<double>(group_size(mesh, static_cast<Axis>(i)));
    messages += first ? n - 1 : n > 1;
  }
  return messages;
}

}  // namespace

StartUp start_up(const MeshShape& mesh, const PlanMachine& m) {
  const auto n = static_cast<double>(mesh.world());
  if (n <= 1) return {};
  const bool is_one_host = n <= m.domain_ranks;
  const double latency = (is_one_host ? m.inside_us : m.across_us) * 1e-6;
  const double rate = (is_one_host ? m.inside_gb_s : m.across_gb_s) * 1e9;
  StartUp s{.connections = n - 1, .table_bytes = kTableLine * n * (n - 1)};
  s.messages_rank_0 = (kProof + 1) * (n - 1) + (m.is_gpu ? messages_of_groups(mesh, true) : 0);
  // The table of rank 0, and the proofs of the connection to it.
  s.messages_rank = 1 + kProof + (m.is_gpu ? messages_of_groups(mesh, false) : 0);
  const double proofs = kProof * (n - 1) * latency, tables = (n - 1) * latency + s.table_bytes / rate;
  const double groups = m.is_gpu ? messages_of_groups(mesh, true) * latency : 0;
  s.seconds = proofs + tables + groups;
  return s;
}

}  // namespace moebius
