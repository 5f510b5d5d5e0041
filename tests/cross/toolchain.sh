#!/usr/bin/env bash
# Prepares a toolchain in FOLDER that compiles this workspace for aarch64-apple-darwin and aarch64-unknown-linux-gnu on a
# machine with Debian for x86-64. Installs nothing; needs apt, pip and cargo. Takes half a minute and 2 GB.
#
# usage: tests/cross/toolchain.sh FOLDER    then: . FOLDER/env.sh
#
# Debian packages rustc with the sources of the standard library, from which cargo builds it for any target. zig's C and C++
# compilers have the headers of macOS's C library, and link programs for it. Nothing of Apple's is downloaded: two frameworks and
# libiconv are described by the names that the crates in Cargo.lock take from them.
set -euo pipefail
[ $# = 1 ] || { sed -n '5p' "$0" >&2; exit 2; }
mkdir -p "$1"
root=$(cd "$1" && pwd)
mkdir -p "$root"/{packages,system,zig,bin}

# rustc, its library and the sources, unpacked beside each other.
apt-get update -qq
depends() { apt-cache depends "$1" | awk -v name="$2" '$1 == "Depends:" && index($2, name) == 1 { print $2; exit }'; }
library=$(depends libstd-rust-web-dev libstd-rust-web-)
llvm=$(depends "$library" libllvm)
(cd "$root/packages" && apt-get download -qq rustc-web rust-web-src libstd-rust-web-dev "$library" "$llvm")
for package in "$root"/packages/*.deb; do dpkg -x "$package" "$root/system"; done
libraries=$root/system/usr/lib/x86_64-linux-gnu
sysroot=$(LD_LIBRARY_PATH=$libraries "$root/system/usr/bin/rustc" --print sysroot)
mkdir -p "$sysroot/lib/rustlib/src/rust"
sources=$(find "$root/system/usr" -type d -name library -path '*rust*' -print -quit)
ln -sfn "$sources" "$sysroot/lib/rustlib/src/rust/library"

python3 -m pip install -q --target "$root/zig" ziglang==0.17.1
zig=$root/zig/ziglang/zig

program() { # program NAME: makes a program of the text on stdin
  cat >"$root/bin/$1"
  chmod +x "$root/bin/$1"
}
program rustc <<END
#!/bin/sh
LD_LIBRARY_PATH=$libraries exec $root/system/usr/bin/rustc "\$@"
END
# Debian's rustc looks for it to strip programs, which are not run here.
program rust-objcopy <<<$'#!/bin/sh\nexit 0'
program macos-ar <<END
#!/bin/sh
exec $zig ar "\$@"
END
for language in cc c++; do
  # Clang's names of the target are dropped: zig has its own. It cannot check syntax without writing a file.
  program "macos-$language" <<END
#!/bin/bash
options=()
while [ \$# -gt 0 ]; do
  case "\$1" in
    -target | -arch) shift ;;
    --target=* | -mmacosx-version-min=* | -mmacos-version-min=*) ;;
    -fsyntax-only) options+=(-c -o /dev/null) ;;
    *) options+=("\$1") ;;
  esac
  shift
done
exec $zig $language -target aarch64-macos.14.0 -F$root/macos -L$root/macos "\${options[@]}"
END
done

# What macOS's linker reads in place of a library: the names that it exports. Names that a library does not have are of no
# consequence here: a program only takes those that its code calls.
describe() { # describe FILE INSTALLED: names of symbols on stdin, without their underscore
  mkdir -p "$(dirname "$root/macos/$1")"
  {
    printf -- '--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\ninstall-name: %s\n' "$2"
    printf 'exports:\n  - targets: [ arm64-macos ]\n    symbols: ['
    sort -u | sed "s/.*/ '_&'/" | paste -sd,
    printf ' ]\n...\n'
  } >"$root/macos/$1"
}
framework() { # framework NAME PREFIX CRATE...: names with the prefix in the sources of the crates
  local name=$1 prefix=$2
  shift 2
  sources "$@" | xargs grep -rhoE "\bk?$prefix[A-Za-z0-9_]+" |
    describe "$name.framework/$name.tbd" "/System/Library/Frameworks/$name.framework/Versions/A/$name"
}
sources() { # sources CRATE...: the folders of these crates
  cargo metadata --locked --format-version 1 --filter-platform aarch64-apple-darwin | python3 -c '
import json, os, sys
for package in json.load(sys.stdin)["packages"]:
    if package["name"] in sys.argv[1:]:
        print(os.path.dirname(package["manifest_path"]))' "$@"
}
framework CoreFoundation CF core-foundation-sys objc2-core-foundation
framework CoreServices FS objc2-core-services
printf '%s\n' iconv iconv_open iconv_close | describe libiconv.tbd /usr/lib/libiconv.2.dylib

cat >"$root/env.sh" <<END
# Debian's rustc is a stable one; cargo builds the standard library with unstable options.
export RUSTC=$root/bin/rustc RUSTC_BOOTSTRAP=1
export PATH=$root/bin:\$PATH
export ZIG_GLOBAL_CACHE_DIR=$root/zig-cache ZIG_LOCAL_CACHE_DIR=$root/zig-cache
export CC_aarch64_apple_darwin=$root/bin/macos-cc CXX_aarch64_apple_darwin=$root/bin/macos-c++
export AR_aarch64_apple_darwin=$root/bin/macos-ar CARGO_TARGET_AARCH64_APPLE_DARWIN_LINKER=$root/bin/macos-cc
export CROSS_HEADERS="-nostdlibinc -isystem $root/zig/ziglang/lib/include -isystem $root/zig/ziglang/lib/libc/include/any-darwin-any"
END
