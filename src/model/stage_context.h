// What the parts of a stage are built with. The references outlive them.
#pragma once

#include <cstdint>
#include <string>

#include "comm/mesh.h"
#include "config/model_spec.h"
#include "config/train_spec.h"
#include "model/params.h"
#include "model/step.h"

namespace moebius {

struct StageContext {
  ParamTable& params;
  MemoryPlan& plan;
  const ModelSpec& model;
  const BalanceSpec& balance;
  const Mesh& mesh;
  const Tensor& rope_table_Pd;
  const Tensor& loss_sum_1;      // f64: what the stage with the loss adds to
  const Tensor& mtp_loss_sum_D;  // the same of each depth of multi-token prediction; only with shape.num_mtp
  DType dtype = DType::f32;
  BatchShape shape;
  uint64_t seed = 0;
  std::string dispatcher = "auto";  // of the MoE layers
  bool fusion = true;               // of the dense layers (model/layers/mlp.h)
};

}  // namespace moebius
