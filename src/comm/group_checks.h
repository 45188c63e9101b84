// Checks of the arguments of Group's calls, shared by all transports. Each throws Error{usage} with the call, the group
// and the tensors.
#pragma once

#include <initializer_list>

#include "comm/group.h"

namespace moebius {

void check_sum(const Group& group, const char* op, const Tensor& x);  // the dtype must be one that sums take
void check_times_size(const Group& group, const char* op, const char* large_name, const Tensor& large,
                      const char* small_name, const Tensor& small);
void check_rows(const Group& group, const AllToAllV& a);
void check_member(const Group& group, const char* op, int rank);
void check_send(const Group& group, int to);  // to and from: ranks of the group other than the caller
void check_recv(const Group& group, int from);
void check_on_device(const Group& group, const char* op, const Stream& s, std::initializer_list<Tensor> tensors);

}  // namespace moebius
