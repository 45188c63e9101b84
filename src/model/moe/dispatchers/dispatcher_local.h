// Every expert is on this rank: nothing is moved, and rows are read through the index.
#pragma once

#include "model/moe/dispatcher.h"

namespace moebius {

class LocalDispatcher final : public Dispatcher {
 public:
  explicit LocalDispatcher(const DispatcherSpec& spec) : K_(spec.top_k) {}
  int64_t max_rows(int64_t T) const override { return T * K_; }
  int64_t source_rows(int64_t T) const override { return T; }
  std::unique_ptr<DispatchHandle> declare_saved(MemoryPlan&, const std::string&) const override {
    return std::make_unique<DispatchHandle>();
  }
  void announce(Step&, const Route& route, DispatchHandle& handle) const override { handle.route = route; }
  Dispatched dispatch(Step& step, Tensor x_TD, DispatchHandle& handle) const override;
  void dispatch_index(Step& step, Tensor all_N, Tensor index_T, DispatchHandle& handle) const override;
  void combine(Step& step, Tensor y_TD, Tensor y_RD, DispatchHandle& handle) const override;
  Dispatched combine_bwd(Step& step, Tensor dy_TD, DispatchHandle& handle) const override;
  void dispatch_bwd(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dx_RD, Tensor dweight_R,
                    DispatchHandle& handle) const override;

 private:
  int64_t K_;
};

}  // namespace moebius
