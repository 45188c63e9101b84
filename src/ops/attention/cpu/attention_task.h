// Attention of the CPU in tasks, which other ops also run.
#pragma once

#include <cstdint>

#include "ops/attention/attention.h"

namespace moebius::cpu {

// A task is a tile of queries of one head of one sequence: task = (sequence * heads + head) * tiles + tile.
int64_t num_attention_tasks(const AttentionFwd& a);
// Tasks do not depend on each other. worker: the number of the thread, which has a part of a.scratch.
void run_attention_task(const AttentionFwd& a, int64_t task, int worker);

}  // namespace moebius::cpu
