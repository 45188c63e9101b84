#include "config/exchange_rates.h"

namespace moebius {

ExchangeRates usual_exchange_rates(bool on_gpu) {
  const std::string file =
      "; `moebius bench machine` writes a file with the rates of this machine, and --machine names it";
  if (!on_gpu) return {10e9 * 0.6, 20e9 * 0.6, 40e-6, 22e-6, "the usual ones of CPUs" + file};
  return {50e9 * 0.8, 450e9 * 0.6642, 40e-6, 22e-6, "the usual ones of GPUs" + file};
}

}  // namespace moebius
