// The streamed update of a step, which overlaps with the first passes of the next step. A part of a pass begins when
// its own weights are updated: as a ParamResidency it waits for them in ready(). Until then their gradients are those
// of the step before.
#pragma once

#include "model/residency.h"
#include "parallel/optim/streamed_update.h"

namespace moebius {

class PendingUpdate final : public ParamResidency {
 public:
  // The references outlive it. REQUIRES: params has no other residency.
  PendingUpdate(StreamedUpdate& update, ParamTable& params) : update_(update), params_(params) {
    params.set_residency(this);
  }
  ~PendingUpdate() override { params_.set_residency(nullptr); }
  PendingUpdate(const PendingUpdate&) = delete;

  // Keeps the arguments, of which scale_1 and the gradients must stay as they are until the update has run.
  void keep(Stream& s, const OptimizerStepArgs& args) { args_ = update_.kept(s, args); }
  // Runs passes, overlapped with the update that keep() was called for. Gradients to which passes add are cleared, each
  // when the update has read it. After this the update is complete for all later work of s.
  void run(Stream& s, const std::function<void()>& passes);

  void ready(Stream& s, const ParamSpan& span) override;
  void gather(Stream&, const ParamSpan&) override {}
  void release(Stream&, const ParamSpan&) override {}
  void begin_gradient(Stream&, const ParamSpan&, bool) override {}
  void grad_ready(Stream&, const ParamSpan&) override {}

 private:
  StreamedUpdate& update_;
  ParamTable& params_;
  OptimizerStepArgs args_;
  bool runs_ = false;
  std::vector<bool> is_ready_;  // by parameter, in this run
};

}  // namespace moebius
