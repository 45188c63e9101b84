#include "model/mlp.h"

#include "ops/activation/activation.h"

namespace moebius {

Mlp::Mlp(ParamTable& params, const std::string& prefix, int64_t width, int64_t hidden, DType dtype, float init_std)
    : F_(hidden),
      dtype_(dtype),
      gate_up_(params, {.name = prefix + ".gate_up_proj.weight",
                        .shape = {2 * hidden, width},
                        .dtype = dtype,
                        .parts = {{prefix + ".gate_proj.weight", {hidden, width}, 0},
                                  {prefix + ".up_proj.weight", {hidden, width}, hidden * width}},
                        .init_std = init_std}),
      down_(params,
            {.name = prefix + ".down_proj.weight", .shape = {width, hidden}, .dtype = dtype, .init_std = init_std}) {}

void Mlp::declare_saved(MemoryPlan& plan, const std::string& prefix, int64_t tokens, Saved& saved,
                        bool RecomputeSpec::*what) const {
  saved.h_T2F.declare(plan, prefix + ".h", {tokens, 2 * F_}, dtype_, what);
}

void Mlp::forward(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved) const {
  saved.x_TD = x_TD;
  StackScope scope(step.stack);
  saved.h_T2F.open(step.stack);
  gate_up_.forward(step, saved.h_T2F.rows(0, x_TD.dim(0)), x_TD);
  output(step, y_TD, saved);
}

void Mlp::output(Step& step, Tensor y_TD, const Saved& saved) const {
  const int64_t T = y_TD.dim(0);
  StackScope scope(step.stack);
  const Tensor a_TF = step.take({T, F_}, dtype_);
  swiglu_fwd(step.stream, {.a_TF = a_TF, .h_T2F = saved.h_T2F.rows(0, T)});
  down_.forward(step, y_TD, a_TF);
}

void Mlp::remake(Step& step, Tensor x_TD, Saved& saved) const {
  saved.x_TD = x_TD;
  saved.h_T2F.remake(step.stack, [&] { gate_up_.forward(step, saved.h_T2F, x_TD); });
}

void Mlp::backward_input(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved, bool accumulate_dx) const {
  const int64_t T = dy_TD.dim(0);
  saved.dy_TD = dy_TD;
  saved.dh_T2F = step.take({T, 2 * F_}, dtype_);
  saved.a_TF = step.take({T, F_}, dtype_);
  StackScope scope(step.stack);
  const Tensor da_TF = step.take({T, F_}, dtype_);
  down_.backward_input(step, da_TF, dy_TD);
  swiglu_bwd(step.stream,
             {.dh_T2F = saved.dh_T2F, .a_TF = saved.a_TF, .da_TF = da_TF, .h_T2F = saved.h_T2F.rows(0, T)});
  gate_up_.backward_input(step, dx_TD, saved.dh_T2F, accumulate_dx);
}

void Mlp::backward_weight(Step& step, const Saved& saved) const {
  down_.backward_weight(step, saved.dy_TD, saved.a_TF);
  gate_up_.backward_weight(step, saved.dh_T2F, saved.x_TD);
}

}  // namespace moebius
