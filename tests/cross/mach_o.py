#!/usr/bin/env python3
"""Checks a program for macOS that was linked elsewhere, as far as that can be done without a Mac: the oldest system that it
starts on, the libraries that it loads and where it looks for them, its signature, and that MLX exports each symbol that it
takes from there.

usage: tests/cross/mach_o.py PROGRAM [LIBMLX]

Needs lief, which reads the format.
"""

import sys
from pathlib import Path

import lief

#: The oldest system that MLX's wheel for all of them supports.
OLDEST = [14, 0, 0]
#: What macOS has, and MLX.
LIBRARIES = {
    "/System/Library/Frameworks/CoreFoundation.framework/Versions/A/CoreFoundation",
    "/System/Library/Frameworks/CoreServices.framework/Versions/A/CoreServices",
    "/usr/lib/libSystem.B.dylib",
    "/usr/lib/libc++.1.dylib",
    "/usr/lib/libiconv.2.dylib",
    "@rpath/libmlx.dylib",
}


def parse(file: str) -> lief.MachO.Binary:
    """The program or library in `file`, which has one architecture."""
    found = lief.MachO.parse(file)
    if found is None or found.size != 1:
        sys.exit(f"{file} is not a Mach-O file with one architecture")
    return found.at(0)


def faults(program: lief.MachO.Binary, mlx: lief.MachO.Binary | None) -> list[str]:
    """What is wrong with `program`."""
    found = []
    if program.header.cpu_type != lief.MachO.Header.CPU_TYPE.ARM64:
        found.append(f"it is for {program.header.cpu_type.name}")
    oldest = program.build_version.minos
    if oldest != OLDEST:
        found.append(f"it starts on macOS {oldest} and later, and not on {OLDEST}")
    if not program.has_code_signature:
        found.append("it has no signature, without which Apple Silicon starts nothing")
    libraries = {library.name for library in program.libraries}
    found += [f"it loads {name}" for name in sorted(libraries - LIBRARIES)]
    paths = [path.path for path in program.rpaths]
    needs_mlx = "@rpath/libmlx.dylib" in libraries
    beside = ("@executable_path/", "@loader_path/")
    if needs_mlx and not any(path.startswith(beside) for path in paths):
        found.append(f"it looks for MLX in {paths}, and not beside itself")
    if mlx:
        exported = {symbol.name for symbol in mlx.exported_symbols}
        taken = taken_from(program, "@rpath/libmlx.dylib")
        if not taken:
            found.append("it takes no symbol from MLX")
        found += [f"MLX does not export {name}" for name in sorted(taken - exported)]
    elif needs_mlx:
        found.append("it loads MLX, whose library is not given")
    return found


def taken_from(program: lief.MachO.Binary, library: str) -> set[str]:
    """Names of the symbols that `program` takes from `library`."""
    bound = (binding for binding in program.bindings if binding.has_library and binding.has_symbol)
    return {binding.symbol.name for binding in bound if binding.library.name == library}


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    program = parse(sys.argv[1])
    mlx = parse(sys.argv[2]) if len(sys.argv) == 3 else None
    found = faults(program, mlx)
    if found:
        sys.exit("\n".join(f"{sys.argv[1]}: {fault}" for fault in found))
    size = Path(sys.argv[1]).stat().st_size / 1e6
    taken = len(taken_from(program, "@rpath/libmlx.dylib"))
    print(f"{sys.argv[1]}: {size:.0f} MB, {len(list(program.libraries))} libraries, {taken} symbols of MLX")


if __name__ == "__main__":
    main()
