#!/bin/sh
# Builds forebay, fetches a small real model and summarises a long document with most of its KV cache on disk.
#
#   sh examples/quickstart.sh [FILE] [KV_MEMORY]
#
# FILE       the text to summarise (default: docs/handbook.md)
# KV_MEMORY  memory for the KV cache, like 12MiB (default: about 1/13 of what the full cache of the text takes)
#
# Needs cargo, a C linker (gcc) and python3. Nothing is installed; the model (98 MB) stays in models/.
# FOREBAY_STORE names the directory for the store file, if the one of the build is on a disk that you do not mean.
set -eu

caller=$PWD
cd "$(dirname "$0")/.."

stop() {
    printf '%s\n' "quickstart: $*" >&2
    exit 2
}

[ $# -le 2 ] || stop "expected at most a file and a size: sh examples/quickstart.sh [FILE] [KV_MEMORY]"
document=${1:-docs/handbook.md}
if [ $# -ge 1 ]; then
    case $document in /*) ;; *) document=$caller/$document ;; esac
fi
[ -f "$document" ] && [ -r "$document" ] || stop "$document: no such file, or it cannot be read"

if ! command -v cargo >/dev/null 2>&1 && [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ]; then
    PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
fi
command -v cargo >/dev/null 2>&1 || stop "cargo is needed: install Rust from https://rustup.rs"
command -v cc >/dev/null 2>&1 || stop "a C linker is needed (Debian, Ubuntu: apt-get install gcc libc6-dev)"
command -v python3 >/dev/null 2>&1 || stop "python3 is needed (Debian, Ubuntu: apt-get install python3 python3-venv)"

model=$(sh examples/fetch_model.sh)

echo "quickstart: building (a few minutes the first time)" >&2
cargo build --release --locked --package forebay-examples --bin forebay-summarize
target=$(cargo metadata --format-version 1 --no-deps --locked |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
summarize=$target/release/forebay-summarize

# SmolLM2-135M keeps 30 layers x (K and V) x 3 heads x 64 values x 2 bytes = 23,040 bytes a token, and reads at most 8,192
# tokens at once. Prose has 3.5 to 4 bytes a token. Below 8 MiB the parts that do not grow with the text
# (recent tokens, first tokens, staging) leave too little for the rest.
if [ $# -ge 2 ]; then
    kv_memory=$2
else
    tokens=$(($(wc -c <"$document") * 2 / 7))
    [ "$tokens" -le 8192 ] || tokens=8192
    kv_memory=$((tokens * 23040 / 13))
    [ "$kv_memory" -ge 8388608 ] || kv_memory=8388608
fi

work=$(mktemp -d)
store=${FOREBAY_STORE:-}
if [ -z "$store" ]; then
    store=$target/quickstart-store
    mkdir -p "$store"
fi
trap 'rm -rf "$work"; [ -n "${FOREBAY_STORE:-}" ] || rmdir "$store" 2>/dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

echo "quickstart: summarising $document with --kv-memory $kv_memory, store in $store" >&2
set -- --model "$model" --kv-memory "$kv_memory" --store "$store" --max-words 120 --max-new-tokens 200
# The summary streams to the terminal and the numbers go to a file, so that both can be shown.
"$summarize" "$@" --stats "$work/stats.json" "$document"

python3 - "$work/stats.json" <<'PY'
import json, sys

with open(sys.argv[1], encoding="utf-8") as f:
    stats = json.load(f)


def mib(count):
    return f"{count / (1 << 20):.1f} MiB"


held, full = stats["kv_memory_bytes"], stats["kv_full_bytes"]
print()
print(f"prompt   {stats['prompt_tokens']} tokens read in {stats['prefill_seconds']:.1f} s")
print(f"decode   {stats['decode_tokens_per_second']:.1f} tokens a second, {stats['io_wait_seconds']:.2f} s of it waiting for the disk")
print(f"memory   {mib(held)} for the KV cache, 1/{full / held:.1f} of the {mib(full)} that a full f16 cache takes")
print(f"disk     {mib(stats['disk_bytes_written'])} written, {mib(stats['disk_bytes_read'])} read in {stats['disk_reads']} reads")
print(f"reuse    {stats['reuse_rate']:.0%} of the selected groups were still in memory")
PY
