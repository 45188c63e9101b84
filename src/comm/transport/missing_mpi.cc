// Replaces comm/transport/mpi/mpi.cc where MPI was not found.
#include "comm/transport/mpi.h"

namespace moebius {

std::string mpi_version() { return ""; }

void run_mpi(const MpiOptions&, const RankBody&) {
  MOEBIUS_FAIL(usage,
               "mpi: this program was built without MPI; install it (Debian: libopenmpi-dev openmpi-bin) and build "
               "again, or start one process");
}

}  // namespace moebius
