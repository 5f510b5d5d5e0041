#!/bin/sh
# Builds the policies in this folder with `steersman-policy build`, which reports missing tools.
#
#   policies/build.sh             the shipped policies: NAME/NAME.wasm, and SHA256SUMS
#   policies/build.sh examples    target/policies/brief-{rust,javascript,python,c}.wasm, which are not committed
set -eu

cd "$(dirname "$0")"
target=${CARGO_TARGET_DIR:-$PWD/../target}
mkdir -p "$target/policies"

# The policies that the binary embeds.
shipped='agent brake budget cache-friendly default json-agent language
    no-repeat passthrough redact router rules tool-guard'

# Built once, before the first policy is written: the binary embeds the shipped policies.
binary() {
    cargo build --quiet --bin steersman-policy
}

# Guests have a target folder of their own, so that server and guests do not wait for cargo's lock.
build() {
    "$target/debug/steersman-policy" build --target-dir "$target/policies" "$@"
}

case ${1-} in
examples)
    binary
    for language in rust javascript python c; do
        build examples/$language --out "$target/policies/brief-$language.wasm"
    done
    ;;
'')
    binary
    for name in $shipped; do
        build $name
    done
    # The sources of the committed components: a test reports when they have changed.
    sum=$(command -v sha256sum || echo "shasum -a 256") # macOS has the latter
    # shellcheck disable=SC2086
    find ../wit/policy.wit sdk/src $shipped -type f ! -path '*/target/*' ! -name '*.jsonl' ! -name '*.md' |
        LC_ALL=C sort | xargs $sum >SHA256SUMS
    ;;
*)
    sed -n '2,5s/^# \{0,1\}//p' build.sh >&2
    exit 1
    ;;
esac
