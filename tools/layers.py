#!/usr/bin/env python3
"""Proves that the includes of src/ follow the layers of DESIGN.md, section 2. Prints each rule found broken."""

import re
import sys

from sources import CPP, is_test, read, report, root_from_arguments, sources

LAYERS = [
    ("core",),
    ("device",),
    ("io", "comm", "config"),
    ("tokenizer", "jinja", "hub", "ops"),
    ("data", "memory", "precision", "checkpoint"),
    ("model",),
    ("parallel",),
    ("engine",),
    ("weights",),
    ("train",),
    ("infer", "bench", "plan", "report"),
    ("cli",),
]
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}

# Beginnings of third-party headers, and the modules that may know the library. None: all.
THIRD_PARTY = {
    "fmt/": None,
    "nlohmann/": ("config", "io", "jinja", "hub", "data", "checkpoint", "weights", "train", "infer", "plan", "cli"),
    "toml++/": ("config", "io", "cli"),
    "CLI/": ("cli",),
    "oneapi/": ("ops", "cli"),
    "dnnl": ("ops", "cli"),
    "zstd.h": ("data", "cli"),
    "xxhash.h": ("io", "cli"),
    "omp.h": ("core", "ops"),
    "fnmatch.h": ("model",),
    "mpi.h": ("comm",),
    "nccl.h": ("comm",),
    "cuda": ("device", "ops", "comm"),
    "nvtx3/": ("device",),
    "cooperative_groups": ("ops",),
    "cublas": ("ops",),
    "cudnn": ("ops",),
    "pcre2.h": ("tokenizer",),
    "utf8proc.h": ("io", "tokenizer", "jinja"),
    "simdjson.h": ("report",),
    "httplib.h": ("report",),
    "openssl/": ("comm", "report"),
}
TEST_ONLY = ("gtest/", "gmock/", "rapidcheck")
BENCH_ONLY = ("benchmark/",)
# Headers of C++ have neither folder nor suffix. Those of C, POSIX and the compiler are listed here.
SYSTEM = re.compile(r"[a-z0-9_]+$|(sys|linux|arpa|netinet|net)/[a-z0-9_/.]+\.h$"
                    r"|(unistd|stdlib|fcntl|dlfcn|sched|signal|pthread|poll|dirent|errno|cpuid|immintrin|getopt|spawn|netdb|ifaddrs|glob|malloc)\.h$")
# The folders in which an op has its backends. Its public functions are declared above them.
BACKEND = re.compile(r"ops/[a-z0-9_]+/(cpu|cuda|sm80|sm90|cudnn)/")
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')


def includes(text):
    """Yields (line number, quote or angle, header) of each include."""
    for number, line in enumerate(text.splitlines(), 1):
        found = INCLUDE.match(line)
        if found:
            yield number, found.group(1), found.group(2)


def check_backend(path, header):
    if BACKEND.match(header) and path.parts[:2] != ("src", "ops"):
        return f'"{header}" is private to src/ops: include a header of the op\'s own folder'
    return None


def check_project(root, path, header):
    module, target = path.parts[1], header.split("/")[0]
    if complaint := check_backend(path, header):
        return complaint
    if target not in LEVEL:
        return f'"{header}" must be its full path from src/, beginning with a folder of the layers'
    if not (root / "src" / header).is_file():
        return f'"{header}" is not a file below src/'
    if header.endswith(("_ref.h", "testing.h")) and not is_test(path):
        return f'"{header}" is for tests: only tests may include it'
    if target == module or LEVEL[target] < LEVEL[module]:
        return None
    relation = "a sibling of" if LEVEL[target] == LEVEL[module] else "above"
    return f'"{header}": {target} (layer {LEVEL[target]}) is {relation} {module} (layer {LEVEL[module]}); ' \
           "a file may include its own folder and lower layers only"


def check_system(path, header):
    if header.startswith(BENCH_ONLY):
        return f"<{header}> is for bench/ only"
    if header.startswith(TEST_ONLY):
        return None if is_test(path) else f"<{header}> is for tests only"
    for beginning, modules in THIRD_PARTY.items():
        if header.startswith(beginning):
            allowed = modules is None or path.parts[1] in modules
            return None if allowed else f"<{header}> is for {', '.join(modules)} only"
    if SYSTEM.match(header):
        return None
    return f"<{header}> is of no library that the project knows; name it in THIRD_PARTY of tools/layers.py"


def check_file(root, path, text):
    """Yields complaints about one file. Outside of src/ only the backends are private."""
    if path.parts[0] != "src":
        for number, _, header in includes(text):
            if complaint := check_backend(path, header):
                yield f"{path}:{number}: {complaint}"
        return
    if len(path.parts) < 3 or path.parts[1] not in LEVEL:
        yield f"{path}: is in no folder of the layers ({', '.join(LEVEL)})"
        return
    for number, quote, header in includes(text):
        complaint = check_project(root, path, header) if quote == '"' else check_system(path, header)
        if complaint:
            yield f"{path}:{number}: {complaint}"


def main():
    root = root_from_arguments()
    files = sources(root, CPP)
    complaints = [complaint for path in files for complaint in check_file(root, path, read(root, path))]
    return report("layers", complaints, f"{len(files)} files keep to the layers")


if __name__ == "__main__":
    sys.exit(main())
