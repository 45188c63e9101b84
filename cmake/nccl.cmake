# NCCL, for ranks with a GPU each. Its header is needed to build, and its library when such ranks
# start, at the path found here or wherever the loader looks.
# The places to look are MOEBIUS_NCCL_ROOT, the CUDA toolkit, the system, and the wheels of the
# first python3 of the PATH.
# Sets MOEBIUS_HAS_NCCL, NCCL_INCLUDE_DIR and NCCL_LIBRARY.
set(MOEBIUS_NCCL_ROOT "" CACHE PATH "where to look for NCCL first")
set(MOEBIUS_NCCL_HINTS ${MOEBIUS_NCCL_ROOT} ${CUDAToolkit_LIBRARY_ROOT} /usr/local/cuda ${MOEBIUS_WHEELS}/nvidia/nccl)
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${MOEBIUS_NCCL_HINTS} PATH_SUFFIXES include)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${MOEBIUS_NCCL_HINTS} PATH_SUFFIXES lib lib64)
if(NOT NCCL_INCLUDE_DIR)
  message(STATUS "NCCL: nccl.h was not found; ranks with GPUs exchange through host memory. Debian package libnccl-dev of "
    "NVIDIA, wheel nvidia-nccl-cu13, or name its folder: -DMOEBIUS_NCCL_ROOT=FOLDER")
  return()
endif()
if(NOT NCCL_LIBRARY)
  set(NCCL_LIBRARY libnccl.so.2)
endif()
message(STATUS "NCCL: ${NCCL_INCLUDE_DIR}/nccl.h, ${NCCL_LIBRARY}")
set(MOEBIUS_HAS_NCCL TRUE)
