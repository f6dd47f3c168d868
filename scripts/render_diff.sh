#!/usr/bin/env bash
# Prints how the kernels of tests/support/golden_kernels.py differ from those of a revision.
#   scripts/render_diff.sh REVISION PYTHON
set -euo pipefail

folder=$(mktemp -d)
trap 'git worktree remove --force "$folder/tree" 2>/dev/null; rm -rf "$folder"' EXIT
git worktree add --quiet --detach "$folder/tree" "$1"
mkdir "$folder/before" "$folder/after"
# Python imports from the present folder first.
python=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
(cd "$folder/tree" && PYTHONPATH=$folder/tree "$python" -m tests.support.golden_kernels "$folder/before")
PYTHONPATH=$PWD "$python" -m tests.support.golden_kernels "$folder/after"
(cd "$folder" && git --no-pager diff --no-index before after) || [ $? = 1 ]
