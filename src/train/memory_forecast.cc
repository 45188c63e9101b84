#include "train/memory_forecast.h"

#include <unistd.h>

#include <algorithm>
#include <vector>

#include "ops/gemm/gemm.h"

namespace moebius {
namespace {

// Sums over the ranks that are threads of this rank's process. All ranks of the world call it together.
struct OfProcess {
  int64_t sum(int64_t mine) const {
    char host[256] = {};
    ::gethostname(host, sizeof host - 1);
    const std::string process = fmt::format("{} {} ", ::getpid(), host);
    int64_t total = 0;
    for (const std::string& said : control.gather(process + std::to_string(mine)))
      if (said.starts_with(process)) total += std::stoll(said.substr(process.size()));
    return total;
  }
  Control& control;
};

// Computes two small products, of a forward pass and of a weight gradient. The BLAS library's pages, about 3 MiB,
// are loaded at its first product. So they are part of the program's memory when that is read.
void load_products(Stream s, DType compute) {
  constexpr int64_t kSize = 64;
  std::vector<float> a(kSize * kSize), b(kSize * kSize), c(kSize * kSize);  // large enough for each dtype
  const auto matrix = [](std::vector<float>& of, DType dtype) { return Tensor{of.data(), {kSize, kSize}, dtype}; };
  gemm(s, {.c_MN = matrix(c, compute), .a = matrix(a, compute), .b = matrix(b, compute), .trans_b = true});
  gemm(s, {.c_MN = matrix(c, DType::f32),
           .a = matrix(a, compute),
           .b = matrix(b, compute),
           .trans_a = true,
           .accumulate = true});
}

// Outside the plan: packed blocks of matrix products, 2.3 MiB a thread, and buffers of
// files and logs.
int64_t library_bytes(int threads) {
  return (int64_t{1} << 20) + std::min(threads, num_available_cpus()) * (int64_t{23} << 20) / 10;
}

}  // namespace

void MemoryForecast::predict(CheckpointStore& store, bool async_save) {
  const bool on_gpu = engine_.spec().device == DeviceKind::cuda;
  const HostMemory host = host_memory(engine_, async_save);
  if (on_gpu) control_.together([&] { store.hold_piece(); });
  const HostMemory here = of_this_machine(control_, host);
  control_.together([&] {
    const int64_t available = available_memory_bytes();
    check_snapshot(here, engine_.plan(), available);
    check_spill(here, engine_.plan(), available);
  });
  on_gpu ? predict_gpu(host) : predict_process(host);
}

void MemoryForecast::predict_gpu(const HostMemory& host) {
  const DeviceMemory gpu = engine_.shared_device_memory();
  predicted_bytes_ = gpu.total_bytes();
  log_.info("memory: {}; {}", gpu.text(), host.text());
}

// At this point the process has loaded the program and the indices of the datasets; the plan's pages are allocated at
// their first use. Ranks that are threads of the process are measured together.
void MemoryForecast::predict_process(const HostMemory& host) {
  load_products(engine_.stream(), engine_.spec().precision.compute);
  const int64_t held = current_rss_bytes();
  const OfProcess of{control_};
  const int64_t num_ranks = of.sum(1), plan = of.sum(engine_.plan().total_bytes());
  const int64_t program = held + of.sum(library_bytes(engine_.spec().threads)), snapshot = of.sum(host.snapshot_bytes);
  predicted_bytes_ = program + plan + snapshot;
  log_.info("memory: predicted peak {} (plan {}, program and data indices {}, checkpoint snapshot {}){}",
            bytes_text(predicted_bytes_), bytes_text(plan), bytes_text(program), bytes_text(snapshot),
            num_ranks == 1 ? "" : fmt::format(", of the {} ranks of this process", num_ranks));
}

void MemoryForecast::compare() {
  engine_.sample_peak_memory();
  const int64_t measured = engine_.peak_bytes();
  log_.info("memory: predicted peak {}, measured {}, {:+.1f} %", bytes_text(predicted_bytes_), bytes_text(measured),
            100.0 * (static_cast<double>(measured) / static_cast<double>(predicted_bytes_) - 1));
}

}  // namespace moebius
