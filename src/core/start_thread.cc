#include "core/start_thread.h"

#include "core/error.h"

namespace moebius {

void fail_to_start_thread(const std::system_error& why) {
  MOEBIUS_FAIL(usage,
               "the system starts no more threads ({}); raise its limits of processes and of memory (ulimit -u, "
               "ulimit -v, those of the container), or set a smaller run.threads and checkpoint.async = false",
               why.what());
}

}  // namespace moebius
