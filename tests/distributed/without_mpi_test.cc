// Tests of a build without MPI.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/transport/mpi.h"

namespace moebius {
namespace {

TEST(WithoutMpi, ErrorNamesThePackageToInstall) {
  EXPECT_EQ(mpi_version(), "");
  try {
    run_mpi({}, [](Transport&) {});
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    EXPECT_THAT(e.what(), testing::HasSubstr("mpi: this program was built without MPI; install it (Debian: "
                                             "libopenmpi-dev openmpi-bin) and build again"));
  }
}

}  // namespace
}  // namespace moebius
