// Calibration: fits the achieved shares of a machine's rates to measured runs.
//
// A row is a run with its measured rate. The fit minimises
//   sum over rows of ln(predicted / measured)^2 + kPrior sum over shares of ln(share / before)^2
// so a share that no row determines keeps the value that was measured with kernels. There is one value for each share,
// system and family of machines; rows have no values of their own.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "plan/predict.h"

namespace moebius {

struct FitRow {
  std::string name, source, recipe;
  std::string family;                  // machines of one architecture, which share their shares
  std::vector<std::string> relatives;  // those machines, this row's among them
  RunSpec run;
  std::string machine;
  int64_t ranks = 1;
  Assumptions assume;
  double measured = 0;    // model TFLOP/s a rank
  bool is_fitted = true;  // false: the row is predicted and reported, but not fitted
};

// {"families": {"hopper": ["h100", "h200"]}, "rows": [{"name", "recipe", "set", "machine", "ranks", "assume", "source",
// and one of "model_tflops_per_gpu", "tokens_per_s", "tokens_per_s_per_gpu"}]}. `folder` is where the recipes' paths
// begin. Throws Error{input} that names the row and its key, the name of two rows, a machine of two families, or
// a name in "before" that is none of these.
std::vector<FitRow> read_fit_rows(const std::string& path, const std::string& folder);
// Sets the shares that the fit starts from, so that repeating a fit gives the same result. They are the file's
// "before": {FAMILY: {"moebius.products": 0.67, "megatron.memory": ..., "layer_us": ..., "spread": ...}}.
// The name of a machine in place of a family changes only that machine: a number replaces the value of the family, and
// {"times": X} multiplies it.
// Throws Error{input} for a key that is not known, and for a share that no machine file may have.
void set_shares_before(const std::string& path, std::map<std::string, PlanMachine>& machines);

struct FittedRow {
  const FitRow* row = nullptr;
  double before = 0, after = 0;  // predicted, with the shares of the machine file and with the fitted ones
  double left_out = 0;           // predicted with shares fitted without this row; 0: not computed
  static double error(double predicted, double measured) { return predicted / measured - 1; }
};

struct FitResult {
  std::vector<FittedRow> rows;
  std::map<std::string, PlanMachine> machines;  // by name, with fitted shares and their new source
};

// machines: by the names in the rows. leave_one_out: each row is also predicted from a fit without it.
// REQUIRES: machines has all relatives of the rows.
FitResult fit(PartLibrary& parts, const std::vector<FitRow>& rows, const std::map<std::string, PlanMachine>& machines,
              bool leave_one_out);

// Returns the texts of the machine files with the fitted shares, by the name of the file. A machine that the rows
// give as a path has the name of that file.
// Throws Error{input} for a fitted share that no machine file may have, and for two machines of one file name.
std::map<std::string, std::string> machine_files(const FitResult& result);

// The median and the maximum of the absolute relative errors.
struct ErrorSummary {
  double median = 0, worst = 0;
  std::string worst_row;
};
// Summarises the rows of a system: if `fitted`, those that were fitted; otherwise the others.
ErrorSummary summary_of(const std::vector<FittedRow>& rows, PlanSystem system, double FittedRow::*predicted,
                        bool fitted = true);
// Pairs of fitted rows of one recipe, and those of them that are predicted in the order that was measured.
struct OrderSummary {
  int64_t pairs = 0, kept = 0;
  std::string broken;  // the pair in the wrong order whose measurements differ most
};
OrderSummary order_of(const std::vector<FittedRow>& rows, PlanSystem system, double FittedRow::*predicted);
std::string fit_text(const FitResult& result);

}  // namespace moebius
