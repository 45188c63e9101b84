#include "infer/parity.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <deque>
#include <map>
#include <numeric>
#include <optional>
#include <vector>

#include "checkpoint/tensor_slice.h"
#include "engine/engine.h"
#include "hub/fused_experts.h"
#include "hub/hf_names.h"
#include "hub/peft.h"
#include "io/safetensors.h"
#include "model/lora/adapter_params.h"
#include "train/metrics.h"
#include "weights/adapter.h"
#include "weights/load.h"

namespace moebius {
namespace {

double sum_of(const Tensor& weight_T) {
  const float* weight = weight_T.ptr<float>();
  return std::accumulate(weight, weight + weight_T.numel(), 0.0);
}

void fill_batch(MicroBatch& batch, const ParityTokens& t, double mtp_coeff) {
  const int64_t T = t.batch * t.seq;
  int32_t segment = -1;
  for (int64_t i = 0; i < T; ++i) {
    const int64_t at = i % t.seq;
    if (t.doc_start[i] == at) ++segment;
    batch.token_T.ptr<int32_t>()[i] = t.token[i];
    for (int64_t k = 0; k <= std::ssize(batch.mtp_targets); ++k) {
      const bool has_target = at + k + 1 < t.seq, in_document = has_target && t.doc_start[i] == t.doc_start[i + k];
      batch.targets(k).target_T.ptr<int32_t>()[i] = has_target ? t.token[i + k + 1] : 0;
      batch.targets(k).weight_T.ptr<float>()[i] = in_document ? 1.0f : 0.0f;
    }
    batch.pos_T.ptr<int32_t>()[i] = static_cast<int32_t>(at) - t.doc_start[i];
    batch.doc_start_T.ptr<int32_t>()[i] = t.doc_start[i];
    batch.segment_T.ptr<int32_t>()[i] = segment;
  }
  batch.scalars.set_loss_scale(0, 1.0 / static_cast<double>(t.batch * (t.seq - 1)));
  const auto depths = std::ssize(batch.mtp_targets);
  for (int64_t k = 1; k <= depths; ++k) {
    const double scale = 1.0 / std::max(1.0, sum_of(batch.targets(k).weight_T));
    batch.scalars.set_loss_scale(k, scale, mtp_coeff / static_cast<double>(depths));
  }
  batch.scalars.total_tokens = static_cast<double>(T);
  batch.training = false;
}

EngineSpec engine_spec(const ModelSpec& model, const ParitySpec& spec, const ParityTokens& t) {
  return {.model = model,
          .precision = {.compute = spec.compute},
          .use = ModelUse::gradients,  // with gradients, every layer keeps its route
          .shape = {.batch = t.batch,
                    .seq = t.seq,
                    .max_segments = t.batch * t.seq,
                    .num_mtp = spec.mtp_coeff > 0 ? model.num_mtp_layers : 0},
          .device = spec.device,
          .kernels = spec.kernels,
          .threads = spec.threads};
}

// Adapters and the form that their folder has.
struct AdapterOf {
  LoraSpec lora;
  bool has_fused_experts = false;  // then gradients have that form, too
};

std::string file_name_of(const ModelSpec& model, const std::string& canonical) {
  for (const char* side : {kLoraA, kLoraB}) {
    if (canonical.ends_with(side)) return hf_module(hf_family(model.family), adapted_matrix(canonical)) + side;
  }
  return model.family == "moebius" ? canonical : hf_name(hf_family(model.family), canonical);
}

void check_mtp(const ParitySpec& spec, const ModelSpec& model) {
  if (spec.mtp_coeff == 0) return;
  MOEBIUS_CHECK(usage, spec.mtp_coeff > 0 && std::isfinite(spec.mtp_coeff),
                "forward: --mtp: expected a coefficient above 0; got {}", spec.mtp_coeff);
  MOEBIUS_CHECK(usage, spec.gradients,
                "forward: --mtp: expected --grads too, because multi-token prediction is part of training only; "
                "got none; add it");
  MOEBIUS_CHECK(usage, model.num_mtp_layers > 0,
                "forward: --mtp: expected a model with multi-token "
                "prediction (num_nextn_predict_layers); got {}; remove it",
                spec.model);
}

AdapterOf adapter_of(const ParitySpec& spec, const ModelSpec& model) {
  if (spec.adapter.path.empty()) return {};
  const std::unique_ptr<AdapterReader> adapters = open_adapter(spec.adapter.path, model);
  LoraSpec lora = adapters->lora();
  lora.targets = adapters->matrices();
  return {.lora = lora, .has_fused_experts = adapters->has_fused_experts()};
}

std::optional<FusedPlace> fused_place_of(const ModelSpec& m, const ParamPart& part) {
  if (m.family == "moebius") return std::nullopt;
  return fused_place(hf_family(m.family), part.name, dims_of(part.shape), m.num_experts);
}

// The tensors to write, in host memory. Tensors of a device are copied, and fused tensors
// are assembled here.
class Outputs {
 public:
  Outputs(Engine& engine, const ParityTokens& t, bool fused_adapters)
      : engine_(engine), t_(t), fused_adapters_(fused_adapters), s_(engine.stream()) {}

  void add_logits(const std::string& name, int64_t depth) {
    const int64_t T = t_.batch * t_.seq, V = engine_.spec().model.vocab_size;
    std::vector<float>& logits = numbers_.emplace_back(T * V);
    engine_.read_logits(logits.data(), 0, T, depth);
    tensors_.push_back({{name, DType::f32, {t_.batch, t_.seq, V}}, logits.data()});
  }
  void add_scalar(const std::string& name, double value) {
    tensors_.push_back({{name, DType::f32, {1}}, numbers_.emplace_back(1, static_cast<float>(value)).data()});
  }
  void add_routes() {
    for (const Model::MoeLayer& moe : engine_.model().moe_layers()) {
      const Tensor& topk_TK = moe.saved->router.route.topk_TK;
      tensors_.push_back(
          {{fmt::format("router.{}.topk", moe.layer), DType::i32, dims_of(topk_TK.shape)}, on_host(topk_TK)});
    }
  }
  // Adds one tensor for each name in a checkpoint.
  void add_gradients() {
    for (const Param& p : engine_.model().params().all()) {
      if (!p.has_grad) continue;
      for (const ParamPart& part : p.spec.parts) add_gradient(part, on_host(part_of(p.dw, part)));
    }
  }
  const std::vector<SafetensorsTensor>& tensors() const { return tensors_; }

 private:
  const void* on_host(const Tensor& t) {
    if (t.device == DeviceKind::cpu) return t.data;
    std::vector<std::byte>& bytes = copies_.emplace_back(t.num_bytes());
    copy_to_host(s_, bytes.data(), t.data, t.num_bytes());
    return bytes.data();
  }
  void add_gradient(const ParamPart& part, const void* gradient) {
    const ModelSpec& model = engine_.spec().model;
    const auto place = fused_adapters_ ? adapter_place_of(model, part) : fused_place_of(model, part);
    if (!place) {
      tensors_.push_back({{"grad." + file_name_of(model, part.name), DType::f32, dims_of(part.shape)}, gradient});
      return;
    }
    const auto [at, is_first] = fused_.try_emplace(place->name, nullptr);
    if (is_first) {
      int64_t numel = 1;
      for (const int64_t dim : place->shape) numel *= dim;
      at->second = copies_.emplace_back(numel * size_of(DType::f32)).data();
      tensors_.push_back({{"grad." + place->name, DType::f32, place->shape}, at->second});
    }
    put_into_fused(at->second, gradient, *place, 0, size_of(DType::f32));
  }

  std::optional<FusedPlace> adapter_place_of(const ModelSpec& model, const ParamPart& part) const {
    ExpertAdapters experts = expert_adapters_of(model, engine_.spec().lora.rank);
    const std::string prefix = part.name.substr(0, part.name.find("mlp."));
    const auto is_down = [&](const std::string& target) {
      return target.starts_with(prefix + "mlp.experts.") && target.ends_with(".down_proj");
    };
    const std::vector<std::string>& targets = engine_.spec().lora.targets;
    experts.has_down = std::any_of(targets.begin(), targets.end(), is_down);
    return expert_adapter_place(experts, part.name);
  }

  Engine& engine_;
  const ParityTokens& t_;
  bool fused_adapters_;
  Stream s_;
  std::vector<SafetensorsTensor> tensors_;
  std::deque<std::vector<float>> numbers_;
  std::deque<std::vector<std::byte>> copies_;
  std::map<std::string, std::byte*> fused_;
};

}  // namespace

ParityResult write_parity(const ParitySpec& spec) {
  const ModelSpec model = read_model_spec(spec.model);
  check_mtp(spec, model);
  const ParityTokens t = read_parity_tokens(spec.tokens, model);
  check_weights(spec.model, model, spec.adapter);
  EngineSpec with_adapter = engine_spec(model, spec, t);
  const AdapterOf adapter = adapter_of(spec, model);
  with_adapter.lora = adapter.lora;
  Engine engine(with_adapter);
  Stream s = engine.stream();
  const std::vector<NotFinite> not_finite = load_weights(s, engine.model(), spec.model);
  if (with_adapter.lora.is_on()) load_adapter(s, engine.model(), with_adapter.lora, spec.adapter.path);
  fill_batch(engine.batch(), t, spec.mtp_coeff);
  const int64_t depths = engine.model().num_mtp_depths();
  spec.gradients ? engine.forward_backward() : engine.forward();
  engine.read_metrics();

  Outputs out(engine, t, adapter.has_fused_experts);
  out.add_logits("logits", 0);
  out.add_scalar("loss", engine.loss());
  for (int64_t k = 1; k <= depths; ++k) out.add_logits(fmt::format("mtp.{}.logits", k - 1), k);
  if (depths > 0) out.add_scalar("mtp_loss", engine.mtp_loss());
  out.add_routes();
  if (spec.gradients) out.add_gradients();
  write_safetensors(spec.out, out.tensors());
  return {.loss = engine.loss(),
          .batch = t.batch,
          .seq = t.seq,
          .not_finite = not_finite,
          .fallback_kernels = engine.fallback_kernels_text()};
}

}  // namespace moebius
