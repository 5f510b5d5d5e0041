#!/bin/sh
# Builds the policies of this folder with `steersman policy build`, which says what it needs.
#
#   policies/build.sh             those that ship: NAME/NAME.wasm, and SHA256SUMS
#   policies/build.sh examples    target/policies/brief-{rust,javascript,python}.wasm, which are not committed
set -eu

cd "$(dirname "$0")"
target=${CARGO_TARGET_DIR:-$PWD/../target}
mkdir -p "$target/policies"

# Once, and before the first policy is written: the program embeds those that ship.
program() {
    cargo build --quiet --bin steersman
}

# Guests are compiled apart from the server, so that neither waits for the other's lock.
build() {
    "$target/debug/steersman" policy build --target-dir "$target/policies" "$@"
}

case ${1-} in
examples)
    program
    for language in rust javascript python; do
        build examples/$language --out "$target/policies/brief-$language.wasm"
    done
    ;;
'')
    program
    for name in agent default passthrough rules; do
        build $name
    done
    # What the committed components were built from: a test says when they are out of date.
    sum=$(command -v sha256sum || echo "shasum -a 256") # macOS has the latter
    find ../wit/policy.wit sdk/src agent default passthrough rules -type f ! -path '*/target/*' ! -name '*.jsonl' |
        LC_ALL=C sort | xargs $sum >SHA256SUMS
    ;;
*)
    sed -n 's/^# \{0,1\}//p' build.sh | sed -n 1,5p >&2
    exit 1
    ;;
esac
