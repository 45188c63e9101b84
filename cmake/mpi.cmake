# The MPI transport. With MOEBIUS_MPI=auto it is built where MPI is found, `on` requires it, and
# `off` leaves it out.
# `openmpi` and `mpich` require that one, where both are installed (Debian has mpicxx.openmpi beside
# mpicxx.mpich). Otherwise the first mpicxx of the PATH decides.
# Sets MOEBIUS_HAS_MPI and, for the tests, MOEBIUS_MPIRUN: the command that starts ranks on this
# machine, however many cores it has.
set(MOEBIUS_MPI "auto" CACHE STRING "the MPI transport: on, off, auto (where MPI is found), openmpi or mpich")
set_property(CACHE MOEBIUS_MPI PROPERTY STRINGS auto on off openmpi mpich)
set(MOEBIUS_HAS_MPI FALSE)
if(NOT MOEBIUS_MPI MATCHES "^(auto|on|off|openmpi|mpich)$")
  message(FATAL_ERROR "MOEBIUS_MPI: expected on, off, auto, openmpi or mpich; got '${MOEBIUS_MPI}'")
endif()
if(MOEBIUS_MPI STREQUAL "off" OR (MOEBIUS_ROOMS AND NOT "comm" IN_LIST MOEBIUS_ROOMS))
  return()
endif()

set(MPI_CXX_SKIP_MPICXX TRUE)  # the C++ bindings that MPI-3 has removed
if(MOEBIUS_MPI MATCHES "^(openmpi|mpich)$")
  find_program(MPI_CXX_COMPILER NAMES mpicxx.${MOEBIUS_MPI} mpicxx)
endif()
find_package(MPI QUIET COMPONENTS CXX)
if(NOT MPI_CXX_FOUND)
  if(NOT MOEBIUS_MPI STREQUAL "auto")
    message(FATAL_ERROR "MOEBIUS_MPI=${MOEBIUS_MPI}: MPI was not found; Debian packages libopenmpi-dev and openmpi-bin, or "
      "libmpich-dev and mpich")
  endif()
  message(STATUS "MPI: not found, built without it")
  return()
endif()

# The header shows which MPI it is.
set(found "MPI")
set(mpi_kind "another")
foreach(folder ${MPI_CXX_INCLUDE_DIRS} ${MPI_CXX_HEADER_DIR})
  if(EXISTS ${folder}/mpi.h)
    file(STRINGS ${folder}/mpi.h lines REGEX "^#define +(OMPI_(MAJOR|MINOR|RELEASE)_VERSION|MPICH_VERSION) ")
    string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
    list(JOIN numbers "." version)
    if(lines MATCHES "MPICH_VERSION")
      set(mpi_kind mpich)
      set(found "MPICH ${version}")
    elseif(lines MATCHES "OMPI_")
      set(mpi_kind openmpi)
      set(found "Open MPI ${version}")
    endif()
    break()
  endif()
endforeach()
if(MOEBIUS_MPI MATCHES "^(openmpi|mpich)$" AND NOT MOEBIUS_MPI STREQUAL mpi_kind)
  message(FATAL_ERROR "MOEBIUS_MPI=${MOEBIUS_MPI}: found ${found} by ${MPI_CXX_COMPILER}; install that one, set "
    "MPI_CXX_COMPILER to its mpicxx, and configure in a build folder that knows no other")
endif()

# With the launcher of another MPI, each rank would see a world of one.
cmake_path(GET MPI_CXX_COMPILER PARENT_PATH folder)
find_program(MOEBIUS_MPIEXEC NAMES mpiexec.${mpi_kind} HINTS ${folder})
if(NOT MOEBIUS_MPIEXEC)
  set(MOEBIUS_MPIEXEC ${MPIEXEC_EXECUTABLE} CACHE FILEPATH "starts the ranks of tests" FORCE)
endif()
set(MOEBIUS_HAS_MPI TRUE)
set(MOEBIUS_MPIRUN ${MOEBIUS_MPIEXEC})
if(mpi_kind STREQUAL "openmpi")
  list(APPEND MOEBIUS_MPIRUN --oversubscribe --bind-to none)
endif()
message(STATUS "MPI: ${found} (${MPI_CXX_COMPILER}); tests start ranks with ${MOEBIUS_MPIEXEC}")
