#!/bin/sh
# Runs the aarch64 code on this x86-64 machine: installs a cross toolchain (Debian), builds statically, and runs the kernel tests in
# an emulator, with and without the dot-product instructions. Needs root for the installation only.
set -eu
cd "$(dirname "$0")/.."

packages="gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static"
missing=
for package in $packages; do
    dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
done
# A toolchain with the aarch64 standard library is used if there is one; else Debian's, which has it as a package.
if rustup target list --installed 2>/dev/null | grep -qx aarch64-unknown-linux-gnu; then
    cargo=cargo
else
    cargo=/usr/bin/cargo
    RUSTC=/usr/bin/rustc
    export RUSTC
    for package in rustc-web cargo-web libstd-rust-web-dev:arm64; do
        dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
    done
fi
if [ -n "$missing" ]; then
    dpkg --add-architecture arm64
    apt-get update
    # shellcheck disable=SC2086 # a list of packages
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing
fi

CARGO_TARGET_DIR=${FOREBAY_AARCH64_TARGET_DIR:-$PWD/target/aarch64}
CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS="-C target-feature=+crt-static"
CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=qemu-aarch64-static
export CARGO_TARGET_DIR CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER

# The Cortex-A76 has the dot-product instructions, the Cortex-A72 has not. Fewer random cases than on hardware: emulation is slow.
for cpu in cortex-a76 cortex-a72; do
    echo "kernel tests on an emulated $cpu"
    QEMU_CPU=$cpu PROPTEST_CASES=${PROPTEST_CASES:-24} \
        "$cargo" test --profile checked --target aarch64-unknown-linux-gnu -p forebay-kernels --lib --tests
done

# End to end: the real model generates through the tiers. The emulator has no io_uring, so the store must fall back to pread by itself.
if [ -z "${FOREBAY_MODEL_SMOLLM2:-}" ]; then
    FOREBAY_MODEL_SMOLLM2=$(sh examples/fetch_model.sh)
fi
"$cargo" build --profile checked --target aarch64-unknown-linux-gnu -p forebay-examples --bin forebay-generate
store=$(mktemp -d)
trap 'rm -rf "$store"' EXIT
echo "one generation on an emulated cortex-a76"
QEMU_CPU=cortex-a76 qemu-aarch64-static "$CARGO_TARGET_DIR/aarch64-unknown-linux-gnu/checked/forebay-generate" \
    --model "$FOREBAY_MODEL_SMOLLM2" --store "$store" --threads 2 --max-new-tokens 12 --json \
    --set group=4,sketch_pool=1,selected_groups=3,reuse_groups=2,window=8,sinks=4 \
    --prompt "The history of the small reservoir that stands above a turbine begins with the mills of the valley, whose wheels" |
    python3 -c '
import json, sys
report = json.load(sys.stdin)
assert report["tokens"] == 12 and report["text"].strip(), report
assert report["io_backend"] == "pread", report["io_backend"]
assert report["disk_reads"] > 0, "nothing was read back from the store"
print(report["text"].strip())
'
