# The CUDA backend: MOEBIUS_CUDA=auto builds it where nvcc is found, on insists, off leaves it out. Leaves MOEBIUS_HAS_CUDA.
# Its sources are named *_cuda*.cc and *_cuda*.cu; missing_cuda*.cc stand in for them where it is left out.
set(MOEBIUS_CUDA "auto" CACHE STRING "the CUDA backend: on, off, or auto (where nvcc is found)")
set_property(CACHE MOEBIUS_CUDA PROPERTY STRINGS auto on off)
set(MOEBIUS_HAS_CUDA FALSE)
if(NOT MOEBIUS_CUDA MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "MOEBIUS_CUDA: expected on, off or auto; got '${MOEBIUS_CUDA}'")
endif()
if(MOEBIUS_CUDA STREQUAL "off" OR MOEBIUS_SANITIZE OR MOEBIUS_ROOMS)
  return()
endif()

find_program(MOEBIUS_NVCC nvcc HINTS /usr/local/cuda/bin $ENV{CUDA_HOME}/bin)
if(NOT MOEBIUS_NVCC)
  if(MOEBIUS_CUDA STREQUAL "on")
    message(FATAL_ERROR "MOEBIUS_CUDA=on: nvcc was not found; install the CUDA toolkit (13.0 or later) or set CUDA_HOME")
  endif()
  message(STATUS "CUDA: no nvcc found, built for the CPU alone")
  return()
endif()
set(CMAKE_CUDA_COMPILER ${MOEBIUS_NVCC})
if(MOEBIUS_CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${MOEBIUS_CCACHE})
endif()
# The kernels are written with Hopper's own instructions, which no other architecture has.
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)
find_package(CUDAToolkit 13.0 REQUIRED)
# CMake 3.25.1 does not know CUDA_STANDARD 20; fmt 9 must be told that nvcc knows constexpr.
set(MOEBIUS_CUDA_FLAGS -std=c++20 -gencode=arch=compute_90a,code=sm_90a -lineinfo --expt-relaxed-constexpr
  -DFMT_USE_CONSTEXPR=1 -Werror=all-warnings)
set(MOEBIUS_HAS_CUDA TRUE)
include(cmake/cudnn.cmake OPTIONAL)
