// The quantisation of the operands of the three products of a linear layer y = x W^T, by the recipe of the run.
//
//   recipe      x, forward   W            dy           x and dy of dW
//   fp8_block   row_blocks   square       row_blocks   square and row_blocks of the transposes   E4M3
//   fp8_tensor  per_tensor   per_tensor   per_tensor   per_tensor      E4M3, dy E5M2
//   mxfp8       mx_blocks    mx_blocks    mx_blocks    mx_blocks of the transpose           E4M3
//   nvfp4       nv_blocks    16 x 16      nv_blocks, rounded stochastically;
//                                         x and dy of dW after the Hadamard transform      E2M1
//
// Layers get operands from here where they call an op, and never check their dtype. With recipe none
// every operand is the tensor itself. Sources: DeepSeek-V3 (arXiv 2412.19437), TransformerEngine's
// recipes Float8BlockScaling, Float8CurrentScaling with power_2_scale and MXFP8BlockScaling, and
// NVFP4 (arXiv 2509.25149). x of dW has square blocks here alone (docs/design/quantised-products.md).
//
// Hopper GPUs have products for fp8_block and fp8_tensor. The other recipes are emulated on GPUs, and so is fp8_tensor
// on other GPUs and for products that their kernels do not take (GpuProducts). CPUs emulate nvfp4 alone. An operand is
// then quantised, and returned as a plain tensor of the dtype of x that has the quantised values. In bf16 these are
// exact, but for those of nvfp4, whose f32 scale of the tensor makes them numbers that are rounded. Copies of w stay
// quantised. Rows of nvfp4, and of mxfp8 without log.precision, are rounded in one pass (ops/quantize/nv_rows.h and
// mx_rows.h), which stores neither bytes nor scales.
#pragma once

#include <utility>

#include "comm/group.h"
#include "config/policy_spec.h"
#include "core/arena.h"
#include "core/quantized.h"
#include "device/device.h"
#include "ops/quantize/nv_rows.h"

namespace moebius {

// The parts of a step that quantisation needs.
struct QuantizeContext {
  Stream& stream;
  StepStack& stack;  // gets the quantised copies
  Tensor draw_2;     // i64 [step, first row]; read by nvfp4's gradients alone
  // counts: log.precision counts the operands of this pass. counts_forward: also x of y = x W^T; false in backward
  // passes, which may quantise it once more.
  bool counts = true, counts_forward = true;
};

// Rows of x and dy that are sorted by expert, as in Quantize (ops/quantize/quantize.h). Empty: no experts.
struct RowGroups {
  Tensor offsets_e1, token_R;
  // With ScaleRanks: where the largest magnitude is looked for, if that is not in the rows alone; may be empty. They
  // are rows of the micro-batch of this rank.
  Tensor measured = {};
  // Statistics count the rows of `measured` instead: other ranks may have the rows too, and some places have none.
  bool counts_measured = false;
  Tensor measured_index_T = {};  // nvfp4: their tokens, like index_N; may be empty
  // nvfp4: the tokens of rows, as in NvRows (ops/quantize/nv_rows.h); may be empty. is_mixed: the rows of an expert may
  // be of several micro-batches, and are not sorted by token; then index_N is set.
  Tensor index_N = {}, source_R = {};
  bool is_mixed = false;
};

// The experts of this rank: the first one, and the number of all experts. Stochastic rounding draws by global index.
struct ExpertRange {
  int64_t first = 0, all = 1;
};

// The ranks that share a tensor whose scale covers all of it (fp8_tensor and nvfp4). They exchange its largest
// magnitude, so that all of them have the scale of the whole. Null: the rank has all of it.
struct ScaleRanks {
  Group* rows = nullptr;     // the ranks that have rows or columns of x and dy
  Group* weights = nullptr;  // the ranks that have parts of w
};

// The statistics of quantisation, and the operands that this rank counts: an operand that several ranks quantise is
// counted by one of them.
struct OperandCounts {
  const Tensor* sums_5 = nullptr;  // the sums of Quantize::stats_5; null: nothing is counted
  bool x = true, w = true, dy = true, x_for_dw = true, dy_for_dw = true;
};

// nvfp4: the places of rows and columns among those of all ranks.
struct WholePlaces {
  int64_t num_batches = 1, batch_tokens = 1;  // rows of experts are of so many micro-batches, of so many tokens each
  WholeColumns dy_columns = {};
};

// Returns whether the recipe has scales that cover a whole tensor.
bool scales_whole_tensors(PrecisionRecipe recipe);

// Returns the multiple of rows or columns at which ranks may split a tensor without splitting a block: 128, 32 or 16,
// and 1 with recipe none and with fp8_tensor, which has no blocks.
int64_t split_multiple(PrecisionRecipe recipe);

// A GPU computes the products of a parameter with fp8_tensor in one of two ways. fp8_block has only kernels, which
// refuse some shapes, and other recipes are always emulated.
enum class GpuProducts { emulated, f8_kernels };

// Returns whether products are emulated on the device of a stream. `products`: of fp8_tensor.
bool is_emulated(PrecisionRecipe recipe, DeviceKind target, GpuProducts products);

// Returns whether the kernels of Hopper multiply FP8 operands with scales of whole tensors by weights of this shape, in
// all three products: [out, in], or one such matrix for each expert.
bool has_f8_products(const Shape& w);

class ProductPrecision {
 public:
  ProductPrecision() = default;  // plain operands
  // seed, key: of the draws of stochastic rounding; each parameter has its own key. counts: its sums must outlive this.
  // ranks: without a scale of a whole tensor they exchange nothing.
  ProductPrecision(PrecisionRecipe recipe, uint64_t seed, uint32_t key, ExpertRange experts = {},
                   WeightGradientPrecision weight_gradients = WeightGradientPrecision::recipe,
                   const OperandCounts& counts = {}, GpuProducts gpu = GpuProducts::emulated, ScaleRanks ranks = {},
                   const WholePlaces& places = {})
      : recipe_(recipe),
        seed_(seed),
        key_(key),
        experts_(experts),
        weight_gradients_(weight_gradients),
        counts_(counts),
        gpu_(gpu),
        ranks_(scales_whole_tensors(recipe) ? ranks : ScaleRanks{}),
        places_(places) {}

  // y = x W^T. x is [T, in]; w is [out, in], or one such matrix for each expert.
  Operand x(const QuantizeContext& c, Tensor x_TC, const RowGroups& rows = {}) const;
  // w() and w_for_dx() quantise at each use, which is not counted.
  Operand w(const QuantizeContext& c, Tensor w) const;
  // dx = dy W. A quantised w is transposed.
  Operand dy(const QuantizeContext& c, Tensor dy_TC, const RowGroups& rows = {}) const;
  Operand w_for_dx(const QuantizeContext& c, Tensor w) const;
  //   dW = dy^T x
  // Quantised operands are transposed, and the rows of experts are gathered by token, also where products are emulated.
  // With WeightGradientPrecision::compute operands are the tensors themselves.
  Operand x_for_dw(const QuantizeContext& c, Tensor x_TC, const RowGroups& rows = {}) const;
  Operand dy_for_dw(const QuantizeContext& c, Tensor dy_TC, const RowGroups& rows = {}) const;
  // Returns both, {dy, x}. With ScaleRanks one message has the largest magnitudes of both. REQUIRES: rows of experts
  // are the same tokens in both.
  std::pair<Operand, Operand> for_dw(const QuantizeContext& c, Tensor dy_TC, const RowGroups& dy_rows, Tensor x_TC,
                                     const RowGroups& x_rows) const;

  // Returns the operands that w() and w_for_dx() return for weights of this shape, without memory. quantise_weights()
  // fills the memory of one, and counts w. REQUIRES: !is_plain().
  Operand w_form(const Shape& w) const { return weights_form(w, false); }
  Operand w_for_dx_form(const Shape& w) const { return weights_form(w, true); }
  // magnitude_We: of all ranks, from exchange_weights(); empty if the rank has all of w.
  void quantise_weights(Stream& s, const Operand& q, const Tensor& w, const Tensor& magnitude_We = {}) const;
  // Returns how many ranks have parts of w and need exchange_weights(): 1 if that is this rank alone.
  int64_t num_weight_ranks() const { return ranks_.weights ? ranks_.weights->size() : 1; }
  // all [W, e] = the largest magnitudes of w [e, out, in] or [out, in] (e = 1) on each of these ranks, i32
  void exchange_weights(Stream& s, const Tensor& all_We, const Tensor& own_e, const Tensor& w) const;
  // Returns the operand for the products of the stream's device: q, or where they are emulated its values in dtype.
  Operand for_products(const QuantizeContext& c, const Operand& q, DType dtype) const;
  bool has_plain_dw() const { return is_plain() || weight_gradients_ == WeightGradientPrecision::compute; }
  bool is_plain() const { return recipe_ == PrecisionRecipe::none; }
  // Returns whether the products of a stream multiply the quantised values in the dtype of x.
  bool emulates(const Stream& s) const { return rounds_rows() || is_emulated(recipe_, s.target(), gpu_); }
  // Returns whether rows are rounded by their tokens (RowGroups::index_N).
  bool rounds_rows() const { return recipe_ == PrecisionRecipe::nvfp4; }

 private:
  struct Format;
  struct Formats;
  static const Formats& formats_of(PrecisionRecipe recipe);
  // The largest magnitudes of all ranks, and the column of those of one tensor. Empty all_WB: quantising
  // measures the operand.
  struct Magnitudes {
    Tensor all_WB;
    int64_t first = 0;
  };
  // How rows are quantised. transposed: the operand is one of dW. draws: elements are rounded stochastically. sums_5:
  // the statistics to which they add; empty: none.
  struct Rounding {
    const Format& format;
    bool transposed = false, draws = false;
    Tensor sums_5 = {};
  };
  Rounding of_x(const QuantizeContext& c) const;
  Rounding of_dy(const QuantizeContext& c) const;
  Rounding of_x_for_dw(const QuantizeContext& c) const;
  Rounding of_dy_for_dw(const QuantizeContext& c) const;
  Tensor sums(bool counts) const { return counts && counts_.sums_5 ? *counts_.sums_5 : Tensor{}; }
  Operand quantised(const QuantizeContext& c, const Tensor& x, const RowGroups& rows, const Rounding& how) const {
    return quantised(c, x, rows, how, Magnitudes{});
  }
  Operand quantised(const QuantizeContext& c, const Tensor& x, const RowGroups& rows, const Rounding& how,
                    Magnitudes known) const;
  void count_measured(const QuantizeContext& c, const RowGroups& rows, const Rounding& how,
                      const Magnitudes& known) const;
  // own_1 = the largest magnitude of the rows of x that are here
  void measure(Stream& s, const Tensor& own_1, const Tensor& x, const RowGroups& rows, const Rounding& how) const;
  Tensor exchange(const QuantizeContext& c, Group& ranks, const Tensor& own_B) const;  // [W, B], on the step stack
  // nvfp4 (product_precision_rows.cc). RowOrder: the rows of experts, sorted by token; empty: they are sorted.
  struct RowOrder {
    Tensor order_R, offsets_of_batches;
  };
  RowOrder order_of(const QuantizeContext& c, const RowGroups& rows) const;
  int64_t num_batches(const RowGroups& rows) const { return rows.index_N.empty() ? 1 : places_.num_batches; }
  NvRows nv_rows(const Tensor& x, const RowGroups& rows, bool of_dw, const RowOrder& order) const;
  void measure_rows(const QuantizeContext& c, const Tensor& own_M, const Tensor& x, const RowGroups& rows, bool of_dw,
                    const RowOrder& order) const;
  void round_rows(const QuantizeContext& c, const Tensor& y_RC, const Tensor& x, const RowGroups& rows,
                  const Rounding& how, const RowOrder& order, Magnitudes known) const;
  Tensor rounded(const QuantizeContext& c, const Tensor& x, const RowGroups& rows, const Rounding& how) const;
  std::pair<Operand, Operand> rounded_for_dw(const QuantizeContext& c, const Tensor& dy_TC, const RowGroups& dy_rows,
                                             const Tensor& x_TC, const RowGroups& x_rows) const;
  Operand weights_form(const Shape& w, bool transposed) const;
  void quantise_weights(Stream& s, const Operand& q, const Tensor& w, const Tensor& magnitude_We,
                        const Tensor& sums_5) const;
  Operand quantised_weights(const QuantizeContext& c, const Tensor& w, bool transposed) const;

  PrecisionRecipe recipe_ = PrecisionRecipe::none;
  uint64_t seed_ = 0;
  uint32_t key_ = 0;
  ExpertRange experts_;
  WeightGradientPrecision weight_gradients_ = WeightGradientPrecision::recipe;
  OperandCounts counts_;
  GpuProducts gpu_ = GpuProducts::emulated;
  ScaleRanks ranks_;
  WholePlaces places_;
};

}  // namespace moebius
