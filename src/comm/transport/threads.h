// A world whose ranks are threads of one process, for tests and for debugging parallel runs on one
// machine. Messages are copied from tensor to tensor by the second of the two ranks to arrive.
#pragma once

#include "comm/transport/transport.h"

namespace moebius {

// Runs body on num_ranks threads, each of them a rank, and returns when all have ended.
// A rank fails when it throws, when it ends without joining a collective that others are in, or
// when others wait for it for longer than the timeout.
// The others then get Error{distributed} from the collective that they are in or enter
// next. At the end this function throws the first error.
// An exception of body is thrown as it is; an Error gets the rank's name in front, unless every
// rank threw the same by itself.
// A thread cannot be ended from outside:
// one that never communicates again blocks the return of this function.
void run_threads(int num_ranks, const WorldOptions& options, const RankBody& body);

}  // namespace moebius
