# NCCL, for ranks with a GPU each: its header is needed to build, its library when such ranks start (where it was found
# here, or wherever the loader looks). Looked for beside the CUDA toolkit, in the system, in MOEBIUS_NCCL_ROOT, and in the
# wheels of the python3 that is first on the path. Leaves MOEBIUS_HAS_NCCL, NCCL_INCLUDE_DIR and NCCL_LIBRARY.
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
