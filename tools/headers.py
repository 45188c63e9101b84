#!/usr/bin/env python3
"""Checks that every header compiles by itself and has #pragma once, and that every .cc includes its
own header first.
nvcc compiles the headers of CUDA code, where there is one.

A header that a source file includes first is already compiled by the build. The others are compiled
here. The build precompiles a few headers of the standard library (CMakeLists.txt), so that it does
not show where they are missing. Their names are looked up here in each file.
Successes are remembered by the hash of the header and of all its includes, so a second run costs
nothing.
"""

import concurrent.futures
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

from layers import includes
from sources import is_test, read, report, root_from_arguments, sources

COMPILE = [os.environ.get("CXX", "g++"), "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror",
           "-Wno-missing-field-initializers", "-march=native", "-fopenmp-simd", "-Isrc", "-I.",
           # The definition that the build passes to tests (tests/CMakeLists.txt).
           '-DMOEBIUS_SOURCE_DIR=""', '-DMOEBIUS_MPIRUN=""', "-x", "c++", "-"]
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
# PTX is enough to show that a header compiles, and takes a third of the time of an object.
COMPILE_CUDA = [NVCC, "-std=c++20", "-arch=compute_90a", "--expt-relaxed-constexpr",
                "-DFMT_USE_CONSTEXPR=1", "-Isrc", "-I.", "-x", "cu", "-ptx", "-o", os.devnull]
CUDA_CODE = re.compile(r"__device__|__global__|#pragma unroll|<cuda|<cublas|<cudnn")
# The names that each precompiled header gives. fmt/core.h has fmt::format too.
PRECOMPILED = {
    ("algorithm",): r"std::(ranges::)?(all_of|any_of|none_of|for_each(_n)?|count(_if)?|(adjacent_)?find(_if)?(_not)?|search(_n)?"
                    r"|copy(_if|_n|_backward)?|move_backward|swap_ranges|transform|replace(_if)?|fill(_n)?|generate(_n)?|remove(_if)?"
                    r"|unique|reverse|rotate|shuffle|(stable_)?partition|(stable_|partial_)?sort|is_sorted|nth_element"
                    r"|(lower|upper)_bound|equal_range|binary_search|merge|includes|set_\w+|(push|pop|make|sort)_heap|(minmax|min|max)"
                    r"(_element)?|clamp|equal|lexicographical_compare|mismatch|(next|prev)_permutation)\(",
    ("filesystem",): r"std::filesystem\b",
    ("functional",): r"std::(function|plus|minus|multiplies|greater|less|equal_to|hash|ref|cref|invoke|not_fn|reference_wrapper)\b",
    ("map",): r"std::(multi)?map<",
    ("memory",): r"std::((unique|shared|weak)_ptr|make_(unique|shared)|enable_shared_from_this|\w+_pointer_cast|addressof|uninitialized_\w+)\b",
    ("string",): r"std::(string\b|to_string|sto[a-z]+\b|getline)",
    ("thread",): r"std::(thread|this_thread|jthread)\b",
    ("vector",): r"std::vector\b",
    ("fmt/format.h", "fmt/core.h"): r"fmt::(format|format_to|print)\b",
    ("fmt/format.h", "fmt/ranges.h"): r"fmt::join\b",
}
NO_CODE = re.compile(r"""//.*|'(\\.|[^'\\\n])'|"(\\.|[^"\\\n])*\"""")
CACHE = ".cache/headers.json"


def find_header(root, header):
    """Returns the project file that an include in quotes names, or None."""
    return next((folder / header for folder in (root / "src", root) if (folder / header).is_file()), None)


def closure(root, file, seen):
    """Returns `file` and all project files that it includes, directly or not."""
    if file not in seen:
        seen.add(file)
        for _, quote, header in includes(read(root, file)):
            target = find_header(root, header) if quote == '"' else None
            if target:
                closure(root, target, seen)
    return seen


def content_hash(root, path):
    digest = hashlib.sha256(" ".join(COMPILE).encode())
    for file in sorted(closure(root, root / path, set())):
        digest.update(f"{file.relative_to(root)}\0{read(root, file)}\0".encode())
    return digest.hexdigest()


def compiled_by_build(root):
    """Returns the headers that a source file includes before anything else. Tests have precompiled
    headers before that.
    """
    files = (path for path in sources(root, (".cc", ".cu")) if not is_test(path))
    firsts = (next(includes(read(root, path)), None) for path in files)
    found = (find_header(root, first[2]) for first in firsts if first and first[1] == '"')
    return {path.relative_to(root) for path in found if path}


def is_cuda(root, path):
    return any(CUDA_CODE.search(read(root, file)) for file in closure(root, root / path, set()))


def compile_alone(root, path):
    """Returns None, or the first lines of the compiler's errors."""
    command = [*COMPILE_CUDA, root / path] if is_cuda(root, path) else COMPILE
    run = subprocess.run(command, input=f'#include "{root / path}"\n', cwd=root, capture_output=True, text=True, check=False)
    return None if run.returncode == 0 else f"{path}: does not compile alone:\n" + "\n".join(run.stderr.splitlines()[:8])


def check_compile(root, headers):
    cache = root / CACHE
    known = set(json.loads(cache.read_text())) if cache.is_file() else set()
    hashes = {path: content_hash(root, path) for path in headers}
    todo = [path for path in headers if hashes[path] not in known]
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = dict(zip(todo, pool.map(lambda path: compile_alone(root, path), todo)))
    cache.parent.mkdir(exist_ok=True)
    cache.write_text(json.dumps(sorted(hashes[path] for path in headers if not results.get(path))))
    return [complaint for complaint in results.values() if complaint]


def check_pragma(root, path):
    code = [line for line in read(root, path).splitlines() if line.strip() and not line.startswith("//")]
    return None if code and code[0] == "#pragma once" else f"{path}: the first line of code must be #pragma once"


def check_own_header_first(root, path):
    own = path.with_suffix(".h")
    if not (root / own).is_file():
        return None
    wanted = own.relative_to("src").as_posix() if own.parts[0] == "src" else own.as_posix()
    first = next((header for _, _, header in includes(read(root, path))), None)
    return None if first == wanted else f'{path}: must include "{wanted}" first; got {first}'


def check_precompiled(root, path):
    """Returns a complaint for each name of a precompiled header that the file does not include, itself
    or through the project's files.
    """
    code = NO_CODE.sub("", "\n".join(line for line in read(root, path).splitlines() if not line.startswith("#")))
    used = {headers: found[0] for headers, names in PRECOMPILED.items() if (found := re.search(names, code))}
    if not used:
        return []
    included = {header for file in closure(root, root / path, set()) for _, _, header in includes(read(root, file))}
    return [f"{path}: must include <{headers[0]}> for {name}" for headers, name in used.items() if not included & set(headers)]


def main():
    root = root_from_arguments()
    headers = sources(root, (".h",))
    alone = sorted(set(headers) - compiled_by_build(root))
    unchecked = [] if NVCC else [path for path in alone if is_cuda(root, path)]
    complaints = [check_pragma(root, path) for path in headers]
    complaints += [check_own_header_first(root, path) for path in sources(root, (".cc",))]
    complaints += [complaint for path in sources(root, (".h", ".cc")) if path.parts[0] == "src" and not is_test(path)
                   for complaint in check_precompiled(root, path)]
    complaints = [complaint for complaint in complaints if complaint] + check_compile(root, [path for path in alone if path not in unchecked])
    note = f"; {len(unchecked)} of CUDA code not checked, there is no nvcc" if unchecked else ""
    return report("headers", complaints, f"{len(alone) - len(unchecked)} of {len(headers)} headers compile alone, the build shows the others{note}")


if __name__ == "__main__":
    sys.exit(main())
