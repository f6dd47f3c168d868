#!/bin/sh
# Measures what the pages have no numbers of yet, on one H200, and writes the files into $OUT.
# Run it from the root of the repository: sh scripts/measure.sh
set -u
out=${OUT:?set OUT to the folder for the results}
results=benchmarks/results
failed=""

measure() {
    # A file in benchmarks/results, and the command that writes it.
    file=$results/$1
    shift
    echo "== $*"
    "$@" || failed="$failed $file"
    keep "$file"
}

keep() {
    if [ -f "$1" ]; then cp "$1" "$out/"; else echo "no $1"; fi
}

named() {
    # The same for a command whose file does not name its source: benchmarks.saved compresses the file.
    file=$results/$1
    shift
    echo "== $*"
    "$@" || failed="$failed $file"
    if [ -f "$file" ]; then python -m benchmarks.saved "$file" "$*"; fi
    keep "${file%.gz}.gz"
}

name=nvidia-h200
measure $name-fp8-error.json.gz python -m benchmarks.kernels.fp8_error --save $results/$name-fp8-error.json.gz
measure $name-serving.json.gz python -m benchmarks.kernels.serving --save $results/$name-serving.json.gz
named $name-decode.json flashtune bench --grid decode --save $results/$name-decode.json
measure $name-first-use.json.gz python -m benchmarks.host.first_use --save $results/$name-first-use.json.gz
measure $name-random-problems.json.gz \
    python -m tests.gpu.random.random_problems 2000 --save $results/$name-random-problems.json.gz
measure $name-random-gradients.json.gz \
    python -m tests.gpu.random.random_gradients 580 --seed 1 --kernels 60 --save $results/$name-random-gradients.json.gz
named $name-sanitizer.json.gz \
    python -m scripts.sanitize --seconds 270 --out $results/$name-sanitizer.json.gz
cp $results/sources.json "$out/"
ls -l "$out"
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
