#include "device/gpus_found.h"

#include <gtest/gtest.h>

#include <initializer_list>

namespace moebius {
namespace {

const GpuFound kH200{.name = "NVIDIA H200", .uuid = "GPU-h", .capability_major = 9, .capability_minor = 0};
const GpuFound kT4{.name = "Tesla T4", .uuid = "GPU-t", .capability_major = 7, .capability_minor = 5};
const GpuFound kB200{.name = "NVIDIA B200", .uuid = "GPU-b", .capability_major = 10, .capability_minor = 0};
const GpuFound kRtx5090{.name = "NVIDIA RTX 5090", .uuid = "GPU-r", .capability_major = 12, .capability_minor = 0};
const GpuFound kRtx4090{.name = "NVIDIA RTX 4090", .uuid = "GPU-l", .capability_major = 8, .capability_minor = 9};
const GpuFound kThor{.name = "NVIDIA Thor", .uuid = "GPU-j", .capability_major = 11, .capability_minor = 0};
const GpuFound kSmall{.name = "NVIDIA Small",
                      .uuid = "GPU-s",
                      .capability_major = 8,
                      .capability_minor = 8,
                      .shared_bytes_per_block = 64 << 10};
const GpuFound kA100{.name = "NVIDIA A100", .uuid = "GPU-a", .capability_major = 8, .capability_minor = 0};

struct Case {
  GpusFound found;
  int index;                  // of the GPU that is asked for
  std::string why, versions;  // expected; why is empty where the GPU can be used
};

// Expects why_not_usable and cuda_versions_text of each case.
void expect_reports(std::initializer_list<Case> cases) {
  for (const Case& c : cases) {
    EXPECT_EQ(why_not_usable(c.found, c.index), c.why);
    EXPECT_EQ(cuda_versions_text(c.found), c.versions);
  }
}

TEST(GpusFound, ReportABuildWithoutCuda) { EXPECT_EQ(cuda_versions_text({}), "not part of this build"); }

TEST(GpusFound, ReportAMissingDriverOrGpu) {
  expect_reports({
      {{.built_with = 13000, .error = "CUDA driver version is insufficient for CUDA runtime version"},
       0,
       "no NVIDIA driver is installed; install one for CUDA 13.0 or later (a container has the machine's driver when it "
       "is started with GPUs)",
       "built with 13.0, no driver"},
      {{.built_with = 13020, .driver = 12040, .error = "CUDA driver version is insufficient for CUDA runtime version"},
       0,
       "the NVIDIA driver is for CUDA 12.4, but this build needs 13.0 or later; update the driver",
       "built with 13.2, driver for 12.4: too old"},
      {{.built_with = 13000, .driver = 13010, .error = "no CUDA-capable device is detected"},
       0,
       "no GPU is visible (no CUDA-capable device is detected); unset CUDA_VISIBLE_DEVICES, or set it to a GPU that "
       "nvidia-smi -L lists",
       "built with 13.0, driver for 13.1"},
      {{.built_with = 13000, .driver = 13000, .visible = {kH200}},
       2,
       "expected a GPU with index 2; got 1 visible; set CUDA_VISIBLE_DEVICES to the GPUs to use, of those that "
       "nvidia-smi -L lists",
       "built with 13.0, driver for 13.0"},
  });
}

TEST(GpusFound, ReportGpusWithoutKernels) {
  expect_reports({
      {{.built_with = 13000, .driver = 13000, .visible = {kT4}},
       0,
       "GPU 0 is Tesla T4 (compute capability 7.5), and this build has kernels for 8.0 and later; they run on none of "
       "the visible GPUs (1), but CUDA_VISIBLE_DEVICES may hide others",
       "built with 13.0, driver for 13.0"},
      {{.built_with = 13000, .driver = 13000, .visible = {kH200, kT4}},
       1,
       "GPU 1 is Tesla T4 (compute capability 7.5), and this build has kernels for 8.0 and later; set "
       "CUDA_VISIBLE_DEVICES=GPU-h, on which they run",
       "built with 13.0, driver for 13.0"},
      {{.built_with = 13000, .lowest_capability = 86, .driver = 13000, .visible = {kA100, kB200}},
       0,
       "GPU 0 is NVIDIA A100 (compute capability 8.0), and this build has kernels for 8.6 and later; set "
       "CUDA_VISIBLE_DEVICES=GPU-b, on which they run",
       "built with 13.0, driver for 13.0"},
      {{.built_with = 13000, .lowest_capability = 90, .driver = 13000, .visible = {kB200}},
       0,
       "GPU 0 is NVIDIA B200 (compute capability 10.0), and this build has kernels for 9.0 (Hopper) only; "
       "-DMOEBIUS_CUDA_ARCHITECTURES=\"80;90a\" builds them for 8.0 and later; they run on none of the visible GPUs "
       "(1), but CUDA_VISIBLE_DEVICES may hide others",
       "built with 13.0, driver for 13.0"},
      {{.built_with = 13000, .driver = 13000, .visible = {kA100, kB200}}, 1, "", "built with 13.0, driver for 13.0"},
      {{.built_with = 13000, .driver = 13000, .visible = {kT4, kH200, kA100}},
       0,
       "GPU 0 is Tesla T4 (compute capability 7.5), and this build has kernels for 8.0 and later; set "
       "CUDA_VISIBLE_DEVICES=GPU-h,GPU-a, on which they run",
       "built with 13.0, driver for 13.0"},
      {{.built_with = 13000, .driver = 14000, .visible = {kA100, kH200}}, 1, "", "built with 13.0, driver for 14.0"},
  });
}

TEST(GpusFound, ReportTooLittleSharedMemory) {
  expect_reports({
      {{.built_with = 13000, .driver = 13000, .visible = {kSmall}},
       0,
       "GPU 0 is NVIDIA Small (compute capability 8.8), where a block may have 65536 bytes of shared memory, and the "
       "kernels need 101376; none of the visible GPUs (1) has them, but CUDA_VISIBLE_DEVICES may hide others",
       "built with 13.0, driver for 13.0"},
      {{.built_with = 13000, .driver = 13000, .visible = {kSmall, kT4, kH200, kA100}},
       0,
       "GPU 0 is NVIDIA Small (compute capability 8.8), where a block may have 65536 bytes of shared memory, and the "
       "kernels need 101376; set CUDA_VISIBLE_DEVICES=GPU-h,GPU-a, which have them",
       "built with 13.0, driver for 13.0"},
  });
}

TEST(GpusFound, ReportADriverThatIsTooOldForThePtx) {
  expect_reports({
      // A program of a newer minor version runs on an older driver of the same major one.
      {{.built_with = 13020, .driver = 13000, .visible = {kH200}}, 0, "", "built with 13.2, driver for 13.0"},
      // But PTX needs a driver that knows it.
      {{.built_with = 13020, .driver = 13000, .visible = {kRtx4090, kRtx5090}},
       1,
       "GPU 1 is NVIDIA RTX 5090 (compute capability 12.0), for which this build has no native code, and the driver for "
       "CUDA 13.0 is too old for its PTX; update the driver to one for CUDA 13.2 or later, or build with "
       "-DMOEBIUS_CUDA_ARCHITECTURES=\"80;90a;120\"",
       "built with 13.2, driver for 13.0"},
      {{.built_with = 13020, .native = {90, 120}, .driver = 13000, .visible = {kRtx4090}},
       0,
       "GPU 0 is NVIDIA RTX 4090 (compute capability 8.9), for which this build has no native code, and the driver for "
       "CUDA 13.0 is too old for its PTX; update the driver to one for CUDA 13.2 or later, or build with "
       "-DMOEBIUS_CUDA_ARCHITECTURES=\"80;90a;120\"",
       "built with 13.2, driver for 13.0"},
      {{.built_with = 13020, .driver = 13000, .visible = {kThor}},
       0,
       "GPU 0 is NVIDIA Thor (compute capability 11.0), for which this build has no native code, and the driver for "
       "CUDA 13.0 is too old for its PTX; update the driver to one for CUDA 13.2 or later",
       "built with 13.2, driver for 13.0"},
      {{.built_with = 13020, .driver = 13000, .visible = {kRtx4090}}, 0, "", "built with 13.2, driver for 13.0"},
      {{.built_with = 13020, .native = {80, 90, 120}, .driver = 13000, .visible = {kRtx5090}},
       0,
       "",
       "built with 13.2, driver for 13.0"},
  });
}

TEST(GpusFound, SayWhyAKernelDoesNotLoad) {
  GpusFound found{.built_with = 13000, .driver = 13000, .visible = {kB200}};
  const auto why = [&](const std::string& error) { return why_not_loaded(found, 0, error); };
  const std::string b200 = "GPU 0 is NVIDIA B200 (compute capability 10.0), ",
                    build = ", or build with -DMOEBIUS_CUDA_ARCHITECTURES=\"80;90a;100\"";
  EXPECT_EQ(why("cudaErrorNoKernelImageForDevice"),
            b200 + "for which this build has no kernels that load; build again from clean sources" + build);
  for (const char* error : {"cudaErrorInvalidPtx", "cudaErrorUnsupportedPtxVersion"})
    EXPECT_EQ(why(error), b200 +
                              "and the driver for CUDA 13.0 does not compile this build's PTX of CUDA 13.0; it should, "
                              "so install it again, or build again from clean sources" +
                              build);
  EXPECT_EQ(why("cudaErrorJitCompilerNotFound"),
            b200 +
                "and the driver's compiler of PTX (libnvidia-ptxjitcompiler) is missing; install the whole driver (a "
                "container gets it with NVIDIA_DRIVER_CAPABILITIES=compute,utility)" +
                build);
  EXPECT_EQ(why("cudaErrorJitCompilationDisabled"),
            b200 + "for which PTX must be compiled, and that is disabled; unset CUDA_DISABLE_PTX_JIT" + build);
  EXPECT_EQ(why("cudaErrorMemoryAllocation"), "");
  found.built_with = 13020;
  EXPECT_EQ(why("cudaErrorUnsupportedPtxVersion"),
            b200 +
                "and the driver for CUDA 13.0 does not compile this build's PTX of CUDA 13.2; update the driver to one "
                "for CUDA 13.2 or later" +
                build);
}

TEST(GpusFound, GpusOfOneKindAreListedOnce) {
  EXPECT_EQ(distinct_gpus({.visible = {kH200, kH200, kA100, kH200, kT4}}), (std::vector<int>{0, 2, 4}));
}

TEST(GpusFound, MemoryIsCountedForTheKindsThatRanksUse) {
  const auto kinds = [](std::vector<GpuFound> visible, int64_t num_ranks) {
    const GpuKinds k = gpu_kinds({.visible = std::move(visible)}, num_ranks);
    return std::string(k.hopper ? "Hopper" : "") + (k.others ? "others" : "");
  };
  EXPECT_EQ(kinds({}, 1), "Hopper") << "no GPU is known";
  EXPECT_EQ(kinds({kH200, kH200}, 8), "Hopper");
  EXPECT_EQ(kinds({kA100, kRtx4090}, 2), "others");
  EXPECT_EQ(kinds({kB200}, 0), "others");
  EXPECT_EQ(kinds({kA100, kH200}, 2), "Hopperothers");
  EXPECT_EQ(kinds({kH200, kA100}, 8), "Hopperothers");
  EXPECT_EQ(kinds({kA100, kH200}, 1), "others") << "one rank uses the first";
  EXPECT_EQ(kinds({kH200, kA100}, 1), "Hopper");
}

TEST(GpusFound, SayWhetherPtxIsCompiled) {
  EXPECT_FALSE(compiles_ptx({.visible = {kH200, kA100, kRtx4090}}));
  EXPECT_TRUE(compiles_ptx({.visible = {kH200, kB200}}));
  EXPECT_FALSE(compiles_ptx({.native = {80, 90, 100}, .visible = {kB200}}));
  EXPECT_FALSE(compiles_ptx({}));
}

TEST(GpusFound, SayWhichKernelsRun) {
  const GpusFound found{.built_with = 13000, .driver = 13000, .visible = {kH200, kA100, kRtx4090, kB200}};
  const auto text = [&](int index, KernelChoice choice) { return kernels_text(found, index, choice); };
  EXPECT_EQ(
      text(0, KernelChoice::automatic),
      "NVIDIA H200 (compute capability 9.0): Hopper's own kernels where the shape allows them, else portable ones, "
      "and cuDNN's attention where it is faster; native code for 9.0");
  EXPECT_EQ(text(0, KernelChoice::portable),
            "NVIDIA H200 (compute capability 9.0): portable kernels only, without cuDNN's attention; native code for "
            "9.0");
  EXPECT_EQ(text(1, KernelChoice::automatic),
            "NVIDIA A100 (compute capability 8.0): portable kernels, and cuDNN's attention where this build and the "
            "shape allow it; native code for 8.0");
  EXPECT_EQ(text(2, KernelChoice::portable),
            "NVIDIA RTX 4090 (compute capability 8.9): portable kernels only, without cuDNN's attention; native code "
            "for 8.0");
  EXPECT_EQ(text(3, KernelChoice::automatic),
            "NVIDIA B200 (compute capability 10.0): portable kernels, and cuDNN's attention where this build and the "
            "shape allow it; PTX of 8.0, which the driver compiles when a program first runs");
}

}  // namespace
}  // namespace moebius
