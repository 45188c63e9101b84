#include "bench/attention_check.h"

#include <algorithm>
#include <cmath>

namespace moebius {
namespace {

// Some rows of a tensor [T, heads, width], on the host.
class Heads {
 public:
  Heads(Stream& s, const Tensor& t, int64_t begin, int64_t end)
      : heads_(t.dim(1)), rows_(s, t, begin * heads_, (end - begin) * heads_) {}
  double at(int64_t t, int64_t h, int64_t i) const { return rows_.at(t * heads_ + h, i); }
  std::vector<double> row(int64_t t, int64_t h) const { return rows_.row(t * heads_ + h); }
  double dot(int64_t t, int64_t h, const std::vector<double>& with) const { return rows_.dot(t * heads_ + h, with); }
  void add_to(std::vector<double>& sums, double factor, int64_t t, int64_t h) const {
    rows_.add_to(sums, factor, t * heads_ + h);
  }

 private:
  int64_t heads_;
  HostRows rows_;
};

void add(BenchSample& sample, const Tensor& result, Stream& s, int64_t t, int64_t h,
         const std::vector<double>& expected) {
  const std::vector<double> got = Heads(s, result, t, t + 1).row(t, h);
  for (size_t i = 0; i < expected.size(); ++i) sample.add(got[i], expected[i]);
}

Tensor as_rows(const Tensor& lse_TH) { return lse_TH.view({lse_TH.dim(0), lse_TH.dim(1), 1}); }

// The result of query head h of row t: o, and the log of the sum of exponentials.
struct Row {
  std::vector<double> o;
  double lse = 0;
};
Row attention_row(const AttentionFwd& a, const Heads& k, const Heads& v, const std::vector<double>& q, int64_t first,
                  int64_t t, int64_t g) {
  std::vector<double> score;
  for (int64_t u = first; u <= t; ++u) score.push_back(a.scale * k.dot(u, g, q));
  const double largest = *std::max_element(score.begin(), score.end());
  double sum = 0;
  for (const double x : score) sum += std::exp(x - largest);
  Row row{std::vector<double>(a.v_UGd.dim(2)), largest + std::log(sum)};
  for (int64_t u = first; u <= t; ++u) v.add_to(row.o, std::exp(score[u - first] - row.lse), u, g);
  return row;
}

// Queries [begin, end) and the inputs of their backward pass.
struct Queries {
  Queries(Stream& s, const AttentionBwd& a, int64_t begin, int64_t end)
      : q(s, a.q_THd, begin, end),
        dout(s, a.do_THd, begin, end),
        o(s, a.o_THd, begin, end),
        lse(s, as_rows(a.lse_TH), begin, end),
        scale(a.scale) {}
  Heads q, dout, o, lse;
  double scale;
};

// One query of one head.
struct Query {
  Query(const Queries& of, int64_t t, int64_t h)
      : q(of.q.row(t, h)),
        dout(of.dout.row(t, h)),
        lse(of.lse.at(t, h, 0)),
        delta(of.o.dot(t, h, dout)),
        scale(of.scale) {}
  double p(const Heads& k, int64_t u, int64_t g) const { return std::exp(scale * k.dot(u, g, q) - lse); }
  double dscore(double p, const Heads& v, int64_t u, int64_t g) const {
    return scale * p * (v.dot(u, g, dout) - delta);
  }

  std::vector<double> q, dout;
  double lse, delta, scale;  // delta = <do, o> = sum over keys of p dp
};

void check_dq(Stream& s, BenchLine& line, const AttentionBwd& a, const AttendedKeys& attended) {
  const int64_t T = a.q_THd.dim(0), H = a.q_THd.dim(1), G = a.k_TGd.dim(1);
  BenchSample dq;
  for (const int64_t t : attended.late_rows(T)) {
    const int64_t first = attended.first_key(t);
    const Heads k(s, a.k_TGd, first, t + 1), v(s, a.v_TGd, first, t + 1);
    const Queries queries(s, a, t, t + 1);
    for (const int64_t h : sampled(H)) {
      const Query query(queries, t, h);
      std::vector<double> expected(a.q_THd.dim(2));
      for (int64_t u = first, g = h / (H / G); u <= t; ++u)
        k.add_to(expected, query.dscore(query.p(k, u, g), v, u, g), u, g);
      add(dq, a.dq_THd, s, t, h, expected);
    }
  }
  check_sample(line, "dq", dq, kBf16Tolerance);
}

void check_dk_dv(Stream& s, BenchLine& line, const AttentionBwd& a, const AttendedKeys& attended) {
  const int64_t T = a.q_THd.dim(0), H = a.q_THd.dim(1), G = a.k_TGd.dim(1);
  BenchSample dk, dv;
  for (const int64_t u : attended.middle_rows(T)) {
    const Heads k(s, a.k_TGd, u, u + 1), v(s, a.v_TGd, u, u + 1);
    const Queries queries(s, a, u, attended.last_query(u) + 1);
    const int64_t g = u % G;
    std::vector<double> dk_row(a.k_TGd.dim(2)), dv_row(a.v_TGd.dim(2));
    for (int64_t t = u; t <= attended.last_query(u); ++t) {
      for (int64_t h = g * (H / G); h < (g + 1) * (H / G); ++h) {
        const Query query(queries, t, h);
        const double p = query.p(k, u, g), dscore = query.dscore(p, v, u, g);
        for (size_t i = 0; i < dk_row.size(); ++i) dk_row[i] += dscore * query.q[i];
        for (size_t i = 0; i < dv_row.size(); ++i) dv_row[i] += p * query.dout[i];
      }
    }
    add(dk, a.dk_TGd, s, u, g, dk_row);
    add(dv, a.dv_TGd, s, u, g, dv_row);
  }
  check_sample(line, "dk", dk, kBf16Tolerance);
  check_sample(line, "dv", dv, kBf16Tolerance);
}

}  // namespace

int64_t AttendedKeys::first_key(int64_t t) const {
  const int64_t start = t / document_ * document_;
  return window_ == 0 ? start : std::max(start, t + 1 - window_);
}

int64_t AttendedKeys::last_query(int64_t u) const {
  const int64_t end = u / document_ * document_ + document_ - 1;
  return window_ == 0 ? end : std::min(end, u + window_ - 1);
}

std::vector<int64_t> AttendedKeys::late_rows(int64_t T) const {
  std::vector<int64_t> rows;
  for (const int64_t document : sampled(T / document_))
    rows.push_back((document + 1) * document_ - 1 - static_cast<int64_t>(rows.size()) * document_ / 8);
  return rows;
}

std::vector<int64_t> AttendedKeys::middle_rows(int64_t T) const {
  std::vector<int64_t> rows;
  for (const int64_t document : sampled(T / document_))
    rows.push_back(document * document_ + (8 + static_cast<int64_t>(rows.size())) * document_ / 16);
  return rows;
}

void check_attention(Stream& s, BenchLine& line, const AttentionFwd& a, const BenchMask& mask) {
  const int64_t T = a.q_THd.dim(0), H = a.q_THd.dim(1), G = a.k_UGd.dim(1);
  const AttendedKeys attended(T / a.batch, mask);
  BenchSample o, lse;
  for (const int64_t t : attended.late_rows(T)) {
    const int64_t first = attended.first_key(t);
    const Heads q(s, a.q_THd, t, t + 1), k(s, a.k_UGd, first, t + 1), v(s, a.v_UGd, first, t + 1);
    for (const int64_t h : sampled(H)) {
      const Row row = attention_row(a, k, v, q.row(t, h), first, t, h / (H / G));
      add(o, a.o_THd, s, t, h, row.o);
      add(lse, as_rows(a.lse_TH), s, t, h, {row.lse});
    }
  }
  check_sample(line, "o", o, kBf16Tolerance);
  check_sample(line, "lse", lse, kF32SumTolerance);
}

void check_attention(Stream& s, BenchLine& line, const AttentionBwd& a, const BenchMask& mask) {
  const AttendedKeys attended(a.q_THd.dim(0) / a.batch, mask);
  check_dq(s, line, a, attended);
  check_dk_dv(s, line, a, attended);
}

}  // namespace moebius
