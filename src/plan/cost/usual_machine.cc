#include "plan/cost/usual_machine.h"

namespace moebius {

PlanMachine usual_machine(bool is_gpu, double rank_host_bytes) {
  PlanMachine m{.name = is_gpu ? "a GPU" : "a CPU", .is_gpu = is_gpu};
  m.bf16_tflops = is_gpu ? 989 : 1;
  m.fp8_tflops = is_gpu ? 1979 : 0;
  m.memory_gb = 83.7;
  m.memory_tb_s = is_gpu ? 3.35 : 0.1;
  m.threads = is_gpu ? 0 : 16;
  m.exponentials_t_s = is_gpu ? 3.9 : 0;
  m.f32_tflops = is_gpu ? 67 : 0;
  m.multiprocessors = is_gpu ? 132 : 0;
  m.portable = is_gpu ? 0.48 : 1;
  m.kernel_us = is_gpu ? 3.7 : 1;
  m.domain_ranks = 8;
  m.inside_gb_s = is_gpu ? 450 : 20;
  m.across_gb_s = is_gpu ? 50 : 10;
  m.inside_us = 22;
  m.across_us = 40;
  m.link_gb_s = is_gpu ? 45 : 10;  // the memory of a CPU is the host
  m.host_memory_gb = is_gpu ? 2000 : 0;
  m.host_ranks = kRanksOfAHost;
  Shares& shares = m.of(PlanSystem::moebius);
  shares.fill(0.6);
  shares[static_cast<size_t>(Share::attention_backward)] = 0.4;
  shares[static_cast<size_t>(Share::memory)] = 0.8;
  if (is_gpu) shares = {0.6831, 0.5797, 0.4533, 0.9262, 0.8012, 0.822, 0.6642, 0.8};  // in the order of Share
  m.has_shares[static_cast<size_t>(PlanSystem::moebius)] = true;
  if (is_gpu && rank_host_bytes > 0) {
    m.host_memory_gb = rank_host_bytes / 1e9;
    m.host_ranks = 1;
  }
  return m;
}

}  // namespace moebius
