#include "parallel/optim/pending_update.h"

namespace moebius {

void PendingUpdate::run(Stream& s, const std::function<void()>& passes) {
  is_ready_.assign(params_.all().size(), false);
  update_.start(s, args_);
  runs_ = true;
  passes();
  ready(s, {.begin = 0, .end = params_.all().size()});
  runs_ = false;
  update_.finish(s);
}

void PendingUpdate::ready(Stream& s, const ParamSpan& span) {
  if (!runs_) return;
  std::vector<size_t> params;
  for (size_t i = span.begin; i < span.end; ++i) {
    if (is_ready_[i]) continue;
    is_ready_[i] = true;
    params.push_back(i);
  }
  update_.wait(s, params);
  for (const size_t i : params) params_.zero_added_grad(s, i);
}

}  // namespace moebius
