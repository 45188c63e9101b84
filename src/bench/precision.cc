#include "bench/precision.h"

#include <algorithm>
#include <memory>

#include "bench/moe_layer.h"
#include "bench/timing.h"
#include "device/gpu_limits.h"
#include "model/catalog.h"
#include "model/gpu_products.h"
#include "model/layers/linear.h"
#include "model/layers/precision_of.h"
#include "model/moe/chunked_experts.h"
#include "model/moe/routed_experts.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

int64_t rows_of_micro_batch(const RunSpec& run) { return run.train.micro_batch * run.train.seq_len; }
int64_t chunk_of_experts(const RunSpec& run) { return expert_chunk(rows_of_micro_batch(run), run.lora); }

// A layer with its own memory plan. Subclasses declare their tensors, and then call bind().
class TimedLayer {
 public:
  TimedLayer(const RunSpec& run, const PrecisionSpec& precision, const BatchShape& shape)
      : run_(run), precision_(precision), shape_(shape) {
    batch_.training = true;
    declare_micro_batch(plan_, shape_, batch_);
  }
  TimedLayer(const TimedLayer&) = delete;
  virtual ~TimedLayer() = default;

  // The times of a micro-batch that begins a step, or of a later one.
  PassTimes time(BenchDevice& device, bool first_of_step) {
    batch_.first_of_step = first_of_step;
    make_copies(device.stream());
    PassTimes t{.forward_ms = time(device, &TimedLayer::forward)};  // which leaves what backward reads
    const TimedRuns timed = device.time_in_turns({[&] { run_pass(device.stream(), &TimedLayer::backward_input); },  //
                                                  [&] { run_pass(device.stream(), &TimedLayer::backward); }});
    t.backward_input_ms = median(timed.ms[0]);
    t.backward_weight_ms = median_of_rest(timed.ms[0], timed.ms[1]);
    return t;
  }
  double time_input(BenchDevice& device) {
    make_copies(device.stream());
    run_pass(device.stream(), &TimedLayer::forward);  // which leaves what backward reads
    return time(device, &TimedLayer::backward_input);
  }
  double time_weights(BenchDevice& device) {
    BenchLine line;
    device.time(line, [&] { make_copies(device.stream()); });
    return line.median_ms;
  }

 protected:
  virtual void forward(Step& step) = 0;
  virtual void backward_input(Step& step) = 0;
  virtual void backward(Step& step) = 0;  // both backward passes

  LayerContext context() {
    return {.params = params_,
            .plan = plan_,
            .model = run_.model,
            .balance = run_.moe,
            .mesh = mesh_,
            .rope_table_Pd = no_rope_table_,
            .precision = precision_,
            .dtype = run_.precision.compute,
            .shape = shape_,
            .seed = run_.seed};
  }
  Tensor& declare(Tensor& t, Shape shape) {
    plan_.declare(t, "activation", shape, run_.precision.compute, Life::saved);
    return t;
  }
  int64_t rows() const { return shape_.tokens(); }
  MemoryPlan& plan() { return plan_; }

  // Measures the step stack in a dry run of all passes, allocates, and draws the weights.
  void bind(BenchDevice& device, const std::vector<const Tensor*>& inputs) {
    target_ = device.stream().device();
    Stream dry(DeviceKind::null, device.pool(), nullptr, target_);
    for (const Pass pass : {&TimedLayer::forward, &TimedLayer::backward_input, &TimedLayer::backward})
      run_pass(dry, pass);
    plan_.bind(target_, high_water_);
    params_.init(device.stream(), run_.seed);
    for (const Tensor* t : inputs) fill_normal(device.stream(), {.x = *t, .rng = Rng(1, RngSite::bench)});
  }

 private:
  using Pass = void (TimedLayer::*)(Step&);

  void make_copies(Stream& s) {
    if (!params_.has_copies()) return;
    params_.make_copies(s);
    params_.hold_copies();
  }
  void run_pass(Stream& s, Pass pass) {
    StepStack null_stack(DeviceKind::null, nullptr, 0);
    StepStack& stack = s.device() == DeviceKind::null ? null_stack : plan_.stack();
    StackScope scope(stack);
    Step step{s, stack, batch_};
    (this->*pass)(step);
    high_water_ = std::max(high_water_, stack.high_water());
  }
  double time(BenchDevice& device, Pass pass) {
    BenchLine line;
    device.time(line, [&] { run_pass(device.stream(), pass); });
    return line.median_ms;
  }

  const RunSpec& run_;
  const PrecisionSpec& precision_;
  const Tensor no_rope_table_;
  DeviceKind target_ = DeviceKind::cpu;
  MemoryPlan plan_;
  ParamTable params_{plan_, ModelUse::training};
  Mesh mesh_{MeshShape{}};
  BatchShape shape_;
  MicroBatch batch_;
  int64_t high_water_ = 0;
};

class TimedProjection final : public TimedLayer {
 public:
  TimedProjection(const RunSpec& run, const PrecisionSpec& precision, BenchDevice& device, ParamSpec spec)
      : TimedLayer(run, precision, {.batch = run.train.micro_batch, .seq = run.train.seq_len}),
        linear_(context(), spec) {
    declare(x_, {rows(), spec.shape[1]});
    declare(y_, {rows(), spec.shape[0]});
    bind(device, {&x_, &y_});
  }

 private:
  void forward(Step& step) override { linear_.forward(step, y_, x_); }
  void backward_input(Step& step) override { linear_.backward_input(step, x_, y_); }
  void backward(Step& step) override {
    backward_input(step);
    linear_.backward_weight(step, y_, x_);
  }

  Linear linear_;
  Tensor x_, y_;  // a gradient has the memory of its activation
};

// The routed experts of a layer, with an even route. They compute one chunk of a micro-batch: all chunks are as large.
class TimedExperts final : public TimedLayer {
 public:
  TimedExperts(const RunSpec& run, const PrecisionSpec& precision, BenchDevice& device, const std::string& prefix)
      : TimedLayer(run, precision, {.batch = 1, .seq = chunk_of_experts(run)}),
        shape_{.batch = 1,
               .seq = chunk_of_experts(run),
               .D = run.model.hidden_size,
               .E = run.model.num_experts,
               .K = run.model.top_k},
        experts_(make_routed_experts(context(), prefix)),
        saved_(experts_->declare_saved(plan(), prefix)) {
    for (Tensor* t : {&x_TD_, &y_TD_, &dx_TD_, &dy_TD_}) declare(*t, {rows(), shape_.D});
    plan().declare(dweight_TK_, "weights' gradient", {rows(), shape_.K}, DType::f32, Life::saved);
    declare_route(plan(), shape_, route_);
    bind(device, {&x_TD_, &dy_TD_});
    upload_route(device.stream(), shape_, bench_route(shape_, {}), route_);
  }

 private:
  void forward(Step& step) override { experts_->forward(step, y_TD_, x_TD_, route_, *saved_); }
  void backward_input(Step& step) override { experts_->backward_input(step, dx_TD_, dweight_TK_, dy_TD_, *saved_); }
  void backward(Step& step) override {
    experts_->backward(step, dx_TD_, dweight_TK_, dy_TD_, *saved_, RoutedExperts::ConcurrentWork());
  }

  BenchShape shape_;
  std::unique_ptr<RoutedExperts> experts_;
  std::unique_ptr<RoutedExperts::Saved> saved_;
  Route route_;
  Tensor x_TD_, y_TD_, dx_TD_, dy_TD_, dweight_TK_;
};

// A projection, or the experts of a layer, that is timed.
struct Timed {
  ParamSpec spec;
  std::string name;  // name of the first one with this shape
  int64_t count = 1;
  bool is_kept = false;
};

// Returns the products that recipes quantise, each shape once. Experts are listed by their first matrix.
std::vector<Timed> timed_products(const RunSpec& run) {
  std::vector<Timed> all;
  const ModelCatalog catalog(run.model, run.num_mtp() > 0);
  for (const ModelCatalog::Entry& entry : catalog.params()) {
    const ParamSpec& spec = entry.spec;
    if (!has_quantised_product(spec, spec.parts.front())) continue;
    if (spec.kind == ParamKind::experts && !spec.name.ends_with(".experts.gate_up_proj")) continue;
    const bool kept = keeps_product(run.precision, spec);
    const auto same = std::find_if(all.begin(), all.end(), [&](const Timed& t) {
      return t.spec.kind == spec.kind && t.spec.shape == spec.shape && t.is_kept == kept;
    });
    if (same == all.end())
      all.push_back({.spec = spec, .name = spec.name, .is_kept = kept});
    else
      ++same->count;
  }
  return all;
}

std::unique_ptr<TimedLayer> make_timed(const RunSpec& run, const PrecisionSpec& precision, BenchDevice& device,
                                       const Timed& what) {
  if (what.spec.kind == ParamKind::experts) {
    const std::string prefix = what.name.substr(0, what.name.rfind(".experts."));
    return std::make_unique<TimedExperts>(run, precision, device, prefix);
  }
  ParamSpec spec = what.spec;
  spec.dtype = run.precision.compute;
  return std::make_unique<TimedProjection>(run, precision, device, spec);
}

// The mean over the micro-batches of a step. `layer` computes one chunk; a micro-batch has `chunks`, and each counts.
PassTimes time_step(TimedLayer& layer, BenchDevice& device, int64_t micro_batches, int64_t chunks) {
  PassTimes t = layer.time(device, /*first_of_step=*/true);
  if (micro_batches * chunks == 1) return t;
  const PassTimes later = layer.time(device, /*first_of_step=*/false);
  const auto n = static_cast<double>(micro_batches), all = static_cast<double>(micro_batches * chunks);
  const auto mean = [&](double of_first, double of_later) { return (of_first + (all - 1) * of_later) / n; };
  return {.forward_ms = mean(t.forward_ms, later.forward_ms),
          .backward_input_ms = mean(t.backward_input_ms, later.backward_input_ms),
          .backward_weight_ms = mean(t.backward_weight_ms, later.backward_weight_ms)};
}

// Returns the rows of a product in a micro-batch; for experts, the even share of one.
int64_t rows_of(const RunSpec& run, const Timed& what) {
  const int64_t T = rows_of_micro_batch(run);
  return what.spec.kind == ParamKind::experts ? T * run.model.top_k / run.model.num_experts : T;
}

// Counts all that quantises operands of weight gradients as a part of backward_weight. The sum of both stays the same.
void move_to_backward_weight(PassTimes& t, double input_ms_without) {
  const double both_ms = t.backward_input_ms + t.backward_weight_ms;
  t.backward_input_ms = std::min(input_ms_without, both_ms);
  t.backward_weight_ms = both_ms - t.backward_input_ms;
}

PrecisionLine time_line(const RunSpec& run, BenchDevice& device, const Timed& what, int64_t micro_batches) {
  PrecisionLine line{.name = what.name,
                     .shape = to_string(what.spec.shape),
                     .rows = rows_of(run, what),
                     .count = what.count,
                     .is_kept = what.is_kept};
  const int64_t chunks = what.spec.kind == ParamKind::experts ? rows_of_micro_batch(run) / chunk_of_experts(run) : 1;
  const PrecisionSpec plain{.compute = run.precision.compute};
  line.plain = time_step(*make_timed(run, plain, device, what), device, micro_batches, chunks);
  if (what.is_kept) return line;
  {
    const std::unique_ptr<TimedLayer> quantised = make_timed(run, run.precision, device, what);
    line.quantised = time_step(*quantised, device, micro_batches, chunks);
    line.weights_ms = quantised->time_weights(device);
  }
  if (run.precision.weight_gradients == WeightGradientPrecision::compute) return line;
  PrecisionSpec input_alone = run.precision;
  input_alone.weight_gradients = WeightGradientPrecision::compute;
  const double input_ms = make_timed(run, input_alone, device, what)->time_input(device);
  move_to_backward_weight(line.quantised, static_cast<double>(chunks) * input_ms);
  return line;
}

}  // namespace

double median_of_rest(const std::vector<double>& part_ms, const std::vector<double>& whole_ms) {
  std::vector<double> rest_ms;
  for (size_t run = 0; run < whole_ms.size(); ++run) rest_ms.push_back(whole_ms[run] - part_ms[run]);
  return std::max(0.0, median(std::move(rest_ms)));
}

double PrecisionBench::ratio() const {
  double plain = 0, quantised = 0;
  for (const PrecisionLine& line : lines) {
    if (line.is_kept) continue;
    plain += static_cast<double>(line.count) * line.plain.total_ms();
    quantised += static_cast<double>(line.count) * line.ratio(micro_batches) * line.plain.total_ms();
  }
  return quantised / plain;
}

PrecisionBench bench_precision(const RunSpec& asked, int64_t runs) {
  RunSpec run = asked;
  MOEBIUS_CHECK(usage, run.precision.recipe != PrecisionRecipe::none,
                "bench precision: expected a recipe that quantises; got precision.recipe = \"none\"; add for example "
                "--set precision.recipe=fp8_block");
  MOEBIUS_CHECK(
      usage, run.train.micro_batch > 0 && run.train.global_batch % run.train.micro_batch == 0,
      "bench precision: expected a recipe with train.global_batch a multiple of train.micro_batch; got {} and "
      "{}",
      run.train.global_batch, run.train.micro_batch);
  check_keep(ModelCatalog(run.model, run.model.num_mtp_layers > 0), run.precision.keep);
  check_quantised_products(run.model, run.precision, run.lora, run.device);
  const std::vector<Timed> products = timed_products(run);
  MOEBIUS_CHECK(usage, !std::ranges::all_of(products, &Timed::is_kept),
                "bench precision: expected products to quantise; precision.keep names every product; remove patterns");
  BenchDevice device(run.device, static_cast<int>(run.threads), runs, run.kernels);
  if (run.device == DeviceKind::cuda) run.precision.has_f8_kernels = uses_hopper_kernels(device.stream());
  PrecisionBench bench{.recipe = run.precision.recipe,
                       .rows = rows_of_micro_batch(run),
                       .micro_batches = run.train.global_batch / run.train.micro_batch};
  for (const Timed& what : products) bench.lines.push_back(time_line(run, device, what, bench.micro_batches));
  return bench;
}

}  // namespace moebius
