// A world whose ranks are threads of one process: for tests and for debugging parallel runs on one machine. Messages
// are copied from tensor to tensor, by whichever of the two ranks comes second.
#pragma once

#include "comm/transport/transport.h"

namespace moebius {

// Runs body on num_ranks threads, each a rank, and returns when all have ended. When one throws, ends without joining a
// collective that others are in, or lets them wait for longer than the timeout, the others get Error{distributed} from
// the collective that they are in or enter next. Then throws the first error: for an exception of body that one, with
// the rank's name in front where it is an Error; without where every rank threw the same by itself.
// A thread cannot be ended from outside: one that never communicates again holds up the return of this function.
void run_threads(int num_ranks, const WorldOptions& options, const RankBody& body);

}  // namespace moebius
