#include "train/parity.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <vector>

#include "io/hf_names.h"
#include "io/safetensors.h"
#include "train/engine.h"
#include "train/tensor_slice.h"
#include "train/weights.h"

namespace moebius {
namespace {

void fill_batch(MicroBatch& batch, const ParityTokens& t) {
  const int64_t T = t.batch * t.seq;
  int32_t segment = -1;
  for (int64_t i = 0; i < T; ++i) {
    const int64_t at = i % t.seq;
    const bool has_target = at + 1 < t.seq;
    if (t.doc_start[i] == at) ++segment;
    batch.token_T.ptr<int32_t>()[i] = t.token[i];
    batch.target_T.ptr<int32_t>()[i] = has_target ? t.token[i + 1] : 0;
    batch.weight_T.ptr<float>()[i] = has_target ? 1.0f : 0.0f;
    batch.pos_T.ptr<int32_t>()[i] = static_cast<int32_t>(at) - t.doc_start[i];
    batch.doc_start_T.ptr<int32_t>()[i] = t.doc_start[i];
    batch.segment_T.ptr<int32_t>()[i] = segment;
  }
  batch.loss_scale = 1.0 / static_cast<double>(t.batch * (t.seq - 1));
  batch.total_tokens = static_cast<double>(T);
  batch.training = false;
}

EngineSpec engine_spec(const ModelSpec& model, const ParitySpec& spec, const ParityTokens& t) {
  return {.model = model,
          .precision = {.compute = spec.compute},
          .use = ModelUse::gradients,  // every layer keeps its route
          .shape = {.batch = t.batch, .seq = t.seq, .max_segments = t.batch * t.seq},
          .device = spec.device,
          .threads = spec.threads};
}

std::string file_name_of(const ModelSpec& model, const std::string& canonical) {
  return model.family == "moebius" ? canonical : hf_name(hf_family(model.family), canonical);
}

// Tensors in host memory, copied there when they are not.
class HostCopies {
 public:
  explicit HostCopies(Stream& s) : s_(s) {}
  const void* of(const Tensor& t) {
    if (t.device == DeviceKind::cpu) return t.data;
    std::vector<std::byte>& bytes = copies_.emplace_back(t.num_bytes());
    copy_to_host(s_, bytes.data(), t.data, t.num_bytes());
    return bytes.data();
  }

 private:
  Stream& s_;
  std::deque<std::vector<std::byte>> copies_;
};

void add_gradients(std::vector<SafetensorsTensor>& tensors, const Model& model, HostCopies& copies) {
  for (const Param& p : model.params().all()) {
    if (!p.has_grad) continue;
    for (const ParamPart& part : p.spec.parts) {
      tensors.push_back({{"grad." + file_name_of(model.spec(), part.name), DType::f32, dims_of(part.shape)},
                         copies.of(part_of(p.dw, part))});
    }
  }
}

}  // namespace

ParityResult write_parity(const ParitySpec& spec) {
  const ModelSpec model = read_model_spec(spec.model);
  const ParityTokens t = read_parity_tokens(spec.tokens, model);
  Engine engine(engine_spec(model, spec, t));
  Stream s = engine.stream();
  const std::vector<NotFinite> not_finite = load_weights(s, engine.model(), spec.model);
  fill_batch(engine.batch(), t);
  engine.run([&](Step& step) {
    engine.model().forward_hidden(step, t.batch * t.seq);
    engine.model().forward_loss(step, spec.gradients);
    if (spec.gradients) engine.model().backward(step);
  });

  const int64_t T = t.batch * t.seq, V = model.vocab_size;
  std::vector<float> logits(T * V);
  engine.read_logits(logits.data(), 0, T);
  engine.read_metrics();
  const double loss = *engine.on_host(engine.model().loss_sum()).ptr<double>() * engine.batch().loss_scale;
  const float loss_f32 = static_cast<float>(loss);
  HostCopies copies(s);
  std::vector<SafetensorsTensor> tensors{{{"logits", DType::f32, {t.batch, t.seq, V}}, logits.data()},
                                         {{"loss", DType::f32, {1}}, &loss_f32}};
  for (const Model::MoeLayer& moe : engine.model().moe_layers()) {
    const Tensor& topk_TK = moe.saved->router.route.topk_TK;
    tensors.push_back(
        {{fmt::format("router.{}.topk", moe.layer), DType::i32, dims_of(topk_TK.shape)}, copies.of(topk_TK)});
  }
  if (spec.gradients) add_gradients(tensors, engine.model(), copies);
  write_safetensors(spec.out, tensors);
  return {.loss = loss, .batch = t.batch, .seq = t.seq, .not_finite = not_finite};
}

}  // namespace moebius
