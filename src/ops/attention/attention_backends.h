// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct AttentionFwd;
struct AttentionBwd;
struct AttentionMerge;
struct AttentionSinkFwd;
struct AttentionSinkBwd;
struct CachedAttentionFwd;

namespace cpu {
void attention_fwd(Stream& s, const AttentionFwd& a);
void attention_bwd(Stream& s, const AttentionBwd& a);
void attention_merge(Stream& s, const AttentionMerge& a);
void attention_sink_fwd(Stream& s, const AttentionSinkFwd& a);
void attention_sink_bwd(Stream& s, const AttentionSinkBwd& a);
void cached_attention_fwd(Stream& s, const CachedAttentionFwd& a);
int64_t scratch_bytes(const AttentionFwd& a, int num_threads);
int64_t scratch_bytes(const AttentionBwd& a, int num_threads);
int64_t scratch_bytes(const CachedAttentionFwd& a, int num_threads);
}  // namespace cpu

namespace cuda {
void attention_fwd(Stream& s, const AttentionFwd& a);
void attention_bwd(Stream& s, const AttentionBwd& a);
void attention_merge(Stream& s, const AttentionMerge& a);
void attention_sink_fwd(Stream& s, const AttentionSinkFwd& a);
void attention_sink_bwd(Stream& s, const AttentionSinkBwd& a);
void cached_attention_fwd(Stream& s, const CachedAttentionFwd& a);
int64_t scratch_bytes(const CachedAttentionFwd& a);
}  // namespace cuda

}  // namespace moebius
