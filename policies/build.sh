#!/bin/sh
# Builds policies written in Rust to components.
#
#   policies/build.sh                     default/default.wasm and passthrough/passthrough.wasm
#   policies/build.sh FOLDER...           FOLDER/NAME.wasm of each crate
#   policies/build.sh --into OUT ...      the same, with the components in OUT
#   policies/build.sh --check             says which Wasm toolchain is here; exit 1 when none is
#
# One of two toolchains is needed; the first is taken where both are here:
#   rustup target add wasm32-unknown-unknown
#   apt-get install rustc-web rust-web-src lld-22     Debian's, which builds the standard library
set -eu

here=$(cd "$(dirname "$0")" && pwd)
target=wasm32-unknown-unknown

# Debian's compiler, if it has the sources of its standard library.
debian_rustc() {
    rustc=/usr/bin/rustc
    [ -x $rustc ] && [ -f "$($rustc --print sysroot)/lib/rustlib/src/rust/library/Cargo.toml" ] &&
        echo $rustc
}

linker() {
    for lld in /usr/bin/lld-[0-9]* "$(rustc --print sysroot)"/lib/rustlib/*/bin/rust-lld; do
        [ -x "$lld" ] && echo "$lld" && return
    done
    return 1
}

toolchain() {
    if [ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ]; then
        echo "rustup"
    elif debian_rustc >/dev/null && linker >/dev/null; then
        echo "debian"
    else
        echo "no Wasm toolchain: run 'rustup target add $target', or on Debian" \
            "'apt-get install rustc-web rust-web-src lld-22'" >&2
        return 1
    fi
}

# Compiles the crate in the current folder to a core module, release profile.
compile() {
    # Paths of this machine stand in panic messages otherwise, and the bytes would differ.
    flags="--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo --remap-path-prefix=$here=/policies"
    locked=$([ -f Cargo.lock ] && echo --locked || true)
    case $(toolchain) in
    rustup) RUSTFLAGS=$flags cargo build --quiet $locked --release --target $target ;;
    debian)
        RUSTC=$(debian_rustc) RUSTC_BOOTSTRAP=1 \
            RUSTFLAGS="$flags -Clinker=$(linker) -Clinker-flavor=wasm-ld" \
            cargo build --quiet $locked --release --target $target -Zbuild-std=std,panic_abort
        ;;
    esac
}

into=
case ${1-} in
--check) toolchain && exit 0 || exit 1 ;;
--into) into=$(mkdir -p "$2" && cd "$2" && pwd) && shift 2 ;;
esac
toolchain >/dev/null
all=
[ $# -gt 0 ] || {
    all=yes
    set -- "$here/default" "$here/passthrough"
}

# Guests are built apart from the server, so that neither waits for the other's lock.
guests=${CARGO_TARGET_DIR:-$here/../target}/policies
for folder in "$@"; do
    folder=$(cd "$folder" && pwd)
    name=$(sed -n 's/^name *= *"\(.*\)"/\1/p' "$folder/Cargo.toml" | head -n 1)
    (cd "$folder" && CARGO_TARGET_DIR=$guests compile)
    module=$guests/$target/release/$(echo "$name" | tr - _).wasm
    cargo run --quiet --manifest-path "$here/sdk/Cargo.toml" --example componentize -- \
        "$module" "${into:-$folder}/$name.wasm"
done

# What the committed components were built from: a test says when they are out of date.
if [ -n "$all" ] && [ -z "$into" ]; then
    cd "$here"
    sum=$(command -v sha256sum || echo "shasum -a 256") # macOS has the latter
    find ../wit sdk/src default passthrough -type f ! -path '*/target/*' |
        LC_ALL=C sort | xargs $sum >SHA256SUMS
fi
