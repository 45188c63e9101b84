// Exports the metrics of a run for other programs.
#pragma once

#include <string>

#include "report/run_folder.h"

namespace moebius {

// Writes a table of all training and evaluation records as CSV (RFC 4180): kind, step, and a column for each number of
// a record. The numbers read back to the same doubles; null is written as an empty field. Returns the number of rows.
// REQUIRES: the run was polled. Throws Error{io} if the file cannot be written; it appears when it is complete.
int64_t write_csv(const RunFolder& run, const std::string& path);

// Returns the newest values in the text format of Prometheus 0.0.4: gauges with the run's name as a label.
std::string prometheus_text(const std::string& run_name, const RunData& run);

}  // namespace moebius
