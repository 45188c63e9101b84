// Quantised operands of the expert ops, with their values, for tests.
#pragma once

#include <optional>

#include "ops/experts/experts_testing.h"
#include "ops/quantize/quantize_testing.h"

namespace moebius::testing {

// rows: also of the left side of a weight gradient; weights: also of its right side.
struct QuantisedFormat {
  const char* name;
  DType element;
  ScaleLayout rows, weights;
  std::optional<DType> gradients = {};  // elements of gradients, if they are others
};

// A quantised operand, and its values as a plain tensor of what the product names.
struct QuantisedWithValues {
  QuantisedArray q;
  Array plain;
};

// Quantises the tensors of a problem on a stream.
class QuantisedOperands {
 public:
  QuantisedOperands(Stream& s, ExpertProblem& p, const QuantisedFormat& format) : s_(s), p_(p), format_(format) {}

  QuantisedWithValues rows_of(Array& x) { return rows_of(x, format_.element); }
  QuantisedWithValues gradients_of(Array& x) { return rows_of(x, format_.gradients.value_or(format_.element)); }
  QuantisedWithValues rows_of(Array& x, DType element) {
    QuantisedWithValues b{{x.tensor().shape, element, format_.rows}, {}};
    quantize(s_, {.q = b.q.operand(), .x_RC = x.tensor()});
    b.plain = Array::of(x.tensor().shape, DType::f32, b.q.values(s_));
    return b;
  }

  QuantisedWithValues weights_of(Array& w) {
    QuantisedWithValues b{{w.tensor().shape, format_.element, format_.weights}, {}};
    quantize(s_, {.q = b.q.operand(), .x_RC = w.tensor()});
    b.plain = Array::of(w.tensor().shape, DType::f32, b.q.values(s_));
    return b;
  }

  QuantisedWithValues transposed_weights_of(Array& w) {
    const Shape of = w.tensor().shape, turned{of[0], of[2], of[1]};
    QuantisedWithValues b{{turned, format_.element, format_.weights, true}, {}};
    quantize(s_, {.q = b.q.operand(), .x_RC = w.tensor()});
    const Values values = b.q.values(s_);
    Values plain;
    const int64_t size = of[1] * of[2];
    for (int64_t e = 0; e < of[0]; ++e) {
      const Values back = transposed({values.begin() + e * size, values.begin() + (e + 1) * size}, of[2], of[1]);
      plain.insert(plain.end(), back.begin(), back.end());
    }
    b.plain = Array::of(of, DType::f32, plain);
    return b;
  }

  // Return the rows sorted by expert, transposed; the plain tensor has the rows that the weight gradient sums.
  QuantisedWithValues left_of(Array& x, bool gathered) {
    return columns_of(x, gathered, format_.rows, format_.gradients.value_or(format_.element));
  }
  QuantisedWithValues right_of(Array& x, bool gathered) {
    return columns_of(x, gathered, format_.weights, format_.element);
  }

 private:
  QuantisedWithValues columns_of(Array& x, bool gathered, ScaleLayout layout, DType element) {
    const int64_t C = x.tensor().dim(1), padded = padded_rows(p_.R, p_.E());
    QuantisedWithValues b{{{C, padded}, element, layout, true}, {}};
    quantize(s_, {.q = b.q.operand(),
                  .x_RC = x.tensor(),
                  .offsets_e1 = p_.offsets.tensor(),
                  .token_R = gathered ? p_.token.tensor() : Tensor{}});
    const Values values = b.q.values(s_);
    Values plain(static_cast<size_t>(p_.R * C));
    p_.shape.for_each_row([&](int64_t e, int64_t r) {
      for (int64_t i = 0; i < C; ++i)
        plain[r * C + i] = values[i * padded + group_begin(p_.shape.offsets[e], e) + r - p_.shape.offsets[e]];
    });
    b.plain = Array::of({p_.R, C}, DType::f32, plain);
    return b;
  }

  Stream& s_;
  ExpertProblem& p_;
  QuantisedFormat format_;
};

}  // namespace moebius::testing
