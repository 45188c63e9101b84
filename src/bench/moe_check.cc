#include "bench/moe_check.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace moebius {
namespace {

// The most products to spend on the gradients of the expert. At least one inner column is checked.
constexpr double kMaxProducts = 5e8;

// Some columns after those that hold logits, whose values are of another size.
std::vector<int64_t> columns_of(const MoeInputs& in) {
  const int64_t first = in.is_routed ? in.shape.E : 0;
  std::vector<int64_t> columns = sampled(in.shape.D - first, 16);
  for (int64_t& column : columns) column += first;
  return columns;
}

// Two tokens. Gradients of a token's K logits have the sum 0, and may all be near 0 by chance. Errors of bf16 are small
// beside those too. Those of a quantised layer are not, so at least eight independent gradients are checked.
std::vector<int64_t> tokens_of(const MoeInputs& in) {
  const int64_t T = in.shape.T();
  std::vector<int64_t> tokens{T / 2, T - 1};
  const int64_t more = in.is_quantised ? div_ceil(8, std::max<int64_t>(1, in.shape.K - 1)) - 2 : 0;
  for (int64_t i = 0; i < more; ++i) tokens.push_back(i * (T / 2) / more);
  return tokens;
}

}  // namespace

MoeBounds MoeBounds::of(PrecisionRecipe recipe) {
  if (recipe == PrecisionRecipe::none)
    return {kBf16Tolerance, kBf16Tolerance, kBf16Tolerance, kBf16Tolerance, kBf16Tolerance};
  const double e = quantised_error(DType::f8_e4m3), g = quantised_error(gradient_element(recipe));
  const double a = 1.44 * e, derivative = 1.25 * e;
  return {.y = 2 * std::hypot(a, e),
          .dx = 2 * std::hypot(derivative, g, g),
          .dx_of_logits = 3 * std::hypot(a, g),
          .dw1 = 2 * std::hypot(derivative, g, g),
          .dw2 = 2 * std::hypot(a, g)};
}

MoeCheck::MoeCheck(Stream& s, const MoeInputs& in) : in_(in), columns_(columns_of(in)) {
  const int64_t T = in.shape.T();
  for (const int64_t t : tokens_of(in)) tokens_.push_back(token(s, t));
  const HostRows x(s, in_.x_TD, 0, T), dy(s, in_.dy_TD, 0, T);
  choose_expert(HostRows(s, in_.topk_TK, 0, T), x);
  const double of_column = 3.0 * static_cast<double>(in.shape.D) * static_cast<double>(row_token_.size());
  std::vector<int64_t> inner = sampled(in.shape.F);
  std::reverse(inner.begin(), inner.end());
  inner.resize(std::clamp<size_t>(static_cast<size_t>(kMaxProducts / of_column), 1, inner.size()));
  for (const int64_t f : inner) expert_columns_.push_back(column(s, x, dy, f));
}

std::vector<int64_t> MoeCheck::experts_of(const HostRows& topk, int64_t t) const {
  std::vector<int64_t> experts;
  for (int64_t k = 0; k < in_.shape.K; ++k) experts.push_back(static_cast<int64_t>(topk.at(t, k)));
  return experts;
}

// Softmax over the logits of the chosen experts.
std::vector<double> MoeCheck::weights(const HostRows& x, int64_t t, const std::vector<int64_t>& experts) const {
  std::vector<double> weight(experts.size(), 1.0 / static_cast<double>(experts.size()));
  if (!in_.is_routed) return weight;
  double sum = 0, largest = -INFINITY;
  for (const int64_t e : experts) largest = std::max(largest, x.at(t, e));
  for (size_t k = 0; k < experts.size(); ++k) sum += weight[k] = std::exp(x.at(t, experts[k]) - largest);
  for (double& w : weight) w /= sum;
  return weight;
}

MoeCheck::TokenResults MoeCheck::token(Stream& s, int64_t t) const {
  const HostRows x(s, in_.x_TD, t, 1), topk(s, in_.topk_TK, t, 1);
  TokenResults result{.token = t, .experts = experts_of(topk, t)};
  for (int64_t e = 0; in_.is_routed && e < in_.shape.E; ++e) {
    const bool is_chosen = std::find(result.experts.begin(), result.experts.end(), e) != result.experts.end();
    for (const int64_t chosen : result.experts)
      MOEBIUS_CHECK(numerics, is_chosen || x.at(t, e) <= x.at(t, chosen),
                    "bench moe-layer: token {}: expected the experts of the largest logits; got expert {} and not {}; "
                    "the route is wrong",
                    t, chosen, e);
  }
  result.weight = weights(x, t, result.experts);
  result.y.resize(columns_.size());
  result.dx.resize(columns_.size());
  result.dx_of_chosen.resize(result.experts.size());
  for (int64_t k = 0; k < in_.shape.K; ++k) add_expert(s, result, k);
  double mean = 0;  // mean of dlogit, which so far holds the gradient of the weight
  for (size_t k = 0; k < result.weight.size(); ++k) mean += result.weight[k] * result.dlogit[k];
  for (size_t k = 0; k < result.weight.size(); ++k) {
    result.dlogit_size[k] *= result.weight[k];
    result.dlogit[k] = result.weight[k] * (result.dlogit[k] - mean);
  }
  return result;
}

// Adds the share of expert k, with a the gated activation and [gate; up] = W1 x:
//   y = weight W2 a
// It adds the gradients of the backward pass too.
void MoeCheck::add_expert(Stream& s, TokenResults& result, int64_t k) const {
  const int64_t t = result.token, D = in_.shape.D, F = in_.shape.F, w1_at = result.experts[k] * 2 * F,
                w2_at = result.experts[k] * D;
  const HostRows w1(s, in_.w1_e2FD, w1_at, 2 * F), w2(s, in_.w2_eDF, w2_at, D);
  const std::vector<double> x = HostRows(s, in_.x_TD, t, 1).row(t), dy = HostRows(s, in_.dy_TD, t, 1).row(t);
  std::vector<double> a(F), da(F);
  for (int64_t i = 0; i < D; ++i) w2.add_to(da, dy[i], w2_at + i);
  double dweight = 0, dweight_squares = 0;
  for (int64_t f = 0; f < F; ++f) {
    const GatedAt at(in_.shape.activation, w1.dot(w1_at + f, x), w1.dot(w1_at + F + f, x));
    a[f] = at.a;
    dweight += da[f] * at.a;
    dweight_squares += da[f] * at.a * da[f] * at.a;
    const double dgate = result.weight[k] * da[f] * at.by_gate, dup = result.weight[k] * da[f] * at.by_up;
    const auto dx = [&](int64_t i) { return dgate * w1.at(w1_at + f, i) + dup * w1.at(w1_at + F + f, i); };
    for (size_t i = 0; i < columns_.size(); ++i) result.dx[i] += dx(columns_[i]);
    for (size_t j = 0; in_.is_routed && j < result.experts.size(); ++j) result.dx_of_chosen[j] += dx(result.experts[j]);
  }
  for (size_t i = 0; i < columns_.size(); ++i) result.y[i] += result.weight[k] * w2.dot(w2_at + columns_[i], a);
  result.dlogit.push_back(dweight);
  result.dlogit_size.push_back(std::sqrt(dweight_squares));
}

void MoeCheck::choose_expert(const HostRows& topk, const HostRows& x) {
  const int64_t T = in_.shape.T();
  std::map<int64_t, int64_t> rows;
  for (int64_t t = 0; t < T; ++t) {
    for (const int64_t e : experts_of(topk, t)) ++rows[e];
  }
  const auto fewer = [](const auto& a, const auto& b) { return a.second < b.second; };
  expert_ = std::min_element(rows.begin(), rows.end(), fewer)->first;
  for (int64_t t = 0; t < T; ++t) {
    const std::vector<int64_t> experts = experts_of(topk, t);
    if (std::find(experts.begin(), experts.end(), expert_) == experts.end()) continue;
    const std::vector<double> weight = weights(x, t, experts);
    for (size_t k = 0; k < experts.size(); ++k) {
      if (experts[k] == expert_) row_token_.push_back({t, weight[k]});
    }
  }
}

MoeCheck::ColumnGradients MoeCheck::column(Stream& s, const HostRows& x, const HostRows& dy, int64_t f) const {
  const int64_t D = in_.shape.D, F = in_.shape.F, gate = expert_ * 2 * F + f, up = gate + F, n = columns_.size();
  const std::vector<double> w_gate = HostRows(s, in_.w1_e2FD, gate, 1).row(gate),
                            w_up = HostRows(s, in_.w1_e2FD, up, 1).row(up);
  const HostRows w2_DF(s, in_.w2_eDF, expert_ * D, D);
  std::vector<double> w2(D);
  for (int64_t i = 0; i < D; ++i) w2[i] = w2_DF.at(expert_ * D + i, f);
  ColumnGradients result{f, std::vector<double>(n), std::vector<double>(n), std::vector<double>(n)};
  for (const auto& [t, weight] : row_token_) {
    const GatedAt at(in_.shape.activation, x.dot(t, w_gate), x.dot(t, w_up));
    const double da = weight * dy.dot(t, w2);
    for (int64_t i = 0; i < n; ++i) {
      result.dw1_gate[i] += da * at.by_gate * x.at(t, columns_[i]);
      result.dw1_up[i] += da * at.by_up * x.at(t, columns_[i]);
      result.dw2[i] += weight * at.a * dy.at(t, columns_[i]);
    }
  }
  return result;
}

void MoeCheck::y(Stream& s, BenchLine& line, const MoeBounds& bounds, const Tensor& y_TD) const {
  BenchSample sample;
  for (const TokenResults& result : tokens_) {
    const HostRows y(s, y_TD, result.token, 1);
    for (size_t i = 0; i < columns_.size(); ++i) sample.add(y.at(result.token, columns_[i]), result.y[i]);
  }
  check_sample(line, "y", sample, bounds.y);
}

void MoeCheck::dx(Stream& s, BenchLine& line, const MoeBounds& bounds, const Tensor& dx_TD, bool with_router) const {
  BenchSample sample, of_logits;
  for (const TokenResults& result : tokens_) {
    const HostRows dx(s, dx_TD, result.token, 1);
    for (size_t i = 0; i < columns_.size(); ++i) sample.add(dx.at(result.token, columns_[i]), result.dx[i]);
    for (size_t k = 0; with_router && k < result.experts.size(); ++k)
      of_logits.add(dx.at(result.token, result.experts[k]), result.dx_of_chosen[k] + result.dlogit[k],
                    result.dlogit_size[k]);
  }
  check_sample(line, "dx", sample, bounds.dx);
  if (with_router) check_sample(line, "dx_of_logits", of_logits, bounds.dx_of_logits);
}

void MoeCheck::dw(Stream& s, BenchLine& line, const MoeBounds& bounds, const Tensor& dw1_e2FD, const Tensor& dw2_eDF,
                  int64_t calls) const {
  const int64_t D = in_.shape.D, F = in_.shape.F;
  const double n = static_cast<double>(calls);
  BenchSample dw1, dw2;
  for (const ColumnGradients& result : expert_columns_) {
    const int64_t gate = expert_ * 2 * F + result.f, up = gate + F;
    const HostRows got_gate(s, dw1_e2FD, gate, 1), got_up(s, dw1_e2FD, up, 1);
    for (size_t i = 0; i < columns_.size(); ++i) {
      const int64_t row = expert_ * D + columns_[i];
      dw1.add(got_gate.at(gate, columns_[i]), n * result.dw1_gate[i]);
      dw1.add(got_up.at(up, columns_[i]), n * result.dw1_up[i]);
      dw2.add(HostRows(s, dw2_eDF, row, 1).at(row, result.f), n * result.dw2[i]);
    }
  }
  check_sample(line, "dw1", dw1, bounds.dw1);
  check_sample(line, "dw2", dw2, bounds.dw2);
}

}  // namespace moebius
