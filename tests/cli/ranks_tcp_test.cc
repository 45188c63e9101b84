// Commands whose ranks are processes over TCP. One of the ranks never comes.
#include <gmock/gmock.h>

#include "comm/transport/reserved_port_testing.h"
#include "tests/cli/program.h"

namespace moebius {
namespace {

constexpr const char* kModel = MOEBIUS_SOURCE_DIR "/tests/golden/data/qwen3_moe_v5";

class CliOverTcp : public testing::TestWithParam<std::vector<std::string>> {
 protected:
  // Starts rank 0 of two, and no other.
  Ran run_first(std::vector<std::string> more) {
    std::vector<std::string> words = GetParam();
    words.insert(words.end(), more.begin(), more.end());
    const ReservedPort port;
    const std::vector<std::pair<const char*, std::string>> variables{{"RANK", "0"},
                                                                     {"WORLD_SIZE", "2"},
                                                                     {"MASTER_ADDR", "127.0.0.1"},
                                                                     {"MASTER_PORT", std::to_string(port.number())}};
    for (const auto& [name, value] : variables) ::setenv(name, value.c_str(), 1);
    Ran ran = run_moebius(dir_, words);
    for (const auto& [name, value] : variables) ::unsetenv(name);
    return ran;
  }
  TestDir dir_;
};

TEST_P(CliOverTcp, AMissingRankIsNamedWithItsCoordinatesInTime) {
  expect_refused(run_first({"--set", "parallel.tp=2", "--timeout", "0.5"}), 6,
                 "error: tcp: rank 0 (tp 0, cp 0, dp 0, pp 0, etp 0, ep 0, edp 0) has waited for 0.5 s for the others "
                 "to come; missing: rank 1 (tp 1, cp 0, dp 0, pp 0, etp 0, ep 0, edp 1)");
}

// Errors of the layout are reported once all ranks have joined. Until then messages name ranks by
// number only.
TEST_P(CliOverTcp, ErrorNamesRanksByNumberIfTheLayoutIsInvalid) {
  expect_refused(run_first({"--set", "parallel.tp=4", "--timeout", "0.5"}), 6, "missing: rank 1;");
}

TEST_P(CliOverTcp, RefusesAnInvalidTimeout) {
  for (const char* wrong : {"0", "-1", "inf", "1e300"})
    expect_refused(run_first({"--timeout", wrong}), 2,
                   "error: --timeout: expected seconds above 0, at most 604800 (a week); got ");
}

INSTANTIATE_TEST_SUITE_P(Commands, CliOverTcp,
                         testing::Values(std::vector<std::string>{"eval", kModel, "--data", "none"},
                                         std::vector<std::string>{"generate", kModel, "--tokenizer", "bytes",
                                                                  "--prompt", "!"}),
                         [](const auto& info) { return info.param[0]; });

}  // namespace
}  // namespace moebius
