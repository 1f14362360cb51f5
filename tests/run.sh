#!/bin/sh
# Every check of the project, in one command: what a person runs is what CI runs.
#
#   sh tests/run.sh
#
# Needs cargo, a C linker and python3; fetches the test model (98 MB, once) into models/, with CI set a second one (491 MB). The last line of the output is
# "N passed, N failed": the sums over all test binaries, where a failed check (format, lints, scripts, links, model)
# counts as one more failure. Exit code 0 only if nothing failed.
#
# FOREBAY_MODEL_SMOLLM2  a copy of the model to use instead of fetching one
# FOREBAY_MODEL_QWEN     the same of the second model; without it and without CI its tests run only if models/ holds it
# CI                     when set, a model that cannot be fetched is a failure; otherwise its tests are left out
set -u

# The tests run in their package's directory, so a path that is relative to the caller's would lead elsewhere.
case ${FOREBAY_MODEL_SMOLLM2:-/} in /*) ;; *) FOREBAY_MODEL_SMOLLM2=$PWD/$FOREBAY_MODEL_SMOLLM2 ;; esac
case ${FOREBAY_MODEL_QWEN:-/} in /*) ;; *) FOREBAY_MODEL_QWEN=$PWD/$FOREBAY_MODEL_QWEN ;; esac
cd "$(dirname "$0")/.." || exit 1

say() { printf '\n== %s\n' "$*"; }

checks_failed=0
fail() {
    printf 'FAILED: %s\n' "$*"
    checks_failed=$((checks_failed + 1))
}

# --- tools -----------------------------------------------------------------------------------------------------------

# A missing tool is installed where that can be done without asking: as root on a Debian-like system, as in a CI container.
need() { # need COMMAND PACKAGE...
    command -v "$1" >/dev/null 2>&1 && return 0
    tool=$1
    shift
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "installing $* for $tool"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@"
        command -v "$tool" >/dev/null 2>&1 && return 0
    fi
    echo "$tool is needed (Debian, Ubuntu: apt-get install $*)"
    return 1
}

if ! command -v cargo >/dev/null 2>&1 && [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ]; then
    PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
fi
command -v cargo >/dev/null 2>&1 || {
    echo "cargo is needed: install Rust from https://rustup.rs (rust-version in Cargo.toml says which)"
    exit 2
}
need cc gcc libc6-dev || exit 2
need python3 python3 python3-venv || exit 2
for component in rustfmt:fmt clippy:clippy; do
    cargo "${component#*:}" --version >/dev/null 2>&1 || {
        command -v rustup >/dev/null 2>&1 && rustup component add "${component%:*}"
    }
done

log=$(mktemp -d) || exit 1
trap 'rm -rf "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# --- model -----------------------------------------------------------------------------------------------------------

say model
if [ -z "${FOREBAY_MODEL_SMOLLM2:-}" ]; then
    if model=$(sh examples/fetch_model.sh); then
        FOREBAY_MODEL_SMOLLM2=$model
        export FOREBAY_MODEL_SMOLLM2
    elif [ -n "${CI:-}" ]; then
        fail "the test model cannot be fetched"
    else
        echo "SKIPPED: the tests that need the model, because it cannot be fetched here"
    fi
elif [ ! -r "$FOREBAY_MODEL_SMOLLM2" ]; then
    fail "FOREBAY_MODEL_SMOLLM2: $FOREBAY_MODEL_SMOLLM2: no such file, or it cannot be read"
else
    export FOREBAY_MODEL_SMOLLM2
fi
echo "model: ${FOREBAY_MODEL_SMOLLM2:-none}"
if [ -n "${FOREBAY_MODEL_QWEN:-}" ]; then
    [ -r "$FOREBAY_MODEL_QWEN" ] || fail "FOREBAY_MODEL_QWEN: $FOREBAY_MODEL_QWEN: no such file, or it cannot be read"
    export FOREBAY_MODEL_QWEN
elif [ -n "${CI:-}" ]; then
    sh examples/fetch_model.sh qwen-0.5b || echo "SKIPPED: the tests of the second model, because it cannot be fetched here"
fi

# --- checks that need no build ---------------------------------------------------------------------------------------

say "scripts"
for script in examples/*.sh tests/*.sh .ci/run; do
    shell=sh
    case $(head -n 1 "$script") in *bash*) shell=bash ;; esac
    "$shell" -n "$script" || fail "$script: not valid for $shell"
done

say "links in the documentation"
python3 tests/check_links.py || fail "a link in the documentation leads nowhere"

say "format"
cargo fmt --all --check || fail "cargo fmt --check"

# --- lints and tests -------------------------------------------------------------------------------------------------

say "lints"
cargo clippy --workspace --all-targets --profile checked --locked -- -D warnings || fail "cargo clippy"

# The tests of the programs start the binaries, which cargo test does not build for a package of its own.
cargo build --workspace --bins --profile checked --locked || fail "cargo build"

say "tests"
# A plain sh has no pipefail: the exit code travels through a file.
{
    CARGO_TERM_COLOR=never cargo test --workspace --profile checked --locked --no-fail-fast 2>&1
    echo $? >"$log/rc"
} | tee "$log/tests"
rc=$(cat "$log/rc")

counts=$(awk '/^test result: / { for (i = 2; i <= NF; i++) { if ($i ~ /^passed/) p += $(i - 1); if ($i ~ /^failed/) f += $(i - 1) } }
    END { printf "%d %d", p, f }' "$log/tests")
passed=${counts% *}
failed=${counts#* }
if [ "$rc" -ne 0 ] && [ "$failed" -eq 0 ]; then
    fail "cargo test ended with $rc before its tests could report (a build error, or a test binary that crashed)"
fi
if [ "$rc" -eq 0 ] && [ "$passed" -eq 0 ]; then
    fail "not one test ran"
fi

failed=$((failed + checks_failed))
printf '\n%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
