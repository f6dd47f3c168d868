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
    if [ -f "$file" ]; then cp "$file" "$out/"; else echo "no $file"; fi
}

named() {
    # The same for a command whose file does not name its source.
    measure "$@"
    file=$results/$1
    shift
    if [ -f "$file" ]; then python -m benchmarks.saved "$file" "$*"; fi
}

name=nvidia-h200
measure $name-fp8-error.json python -m benchmarks.kernels.fp8_error --save $results/$name-fp8-error.json
measure $name-serving.json python -m benchmarks.kernels.serving --save $results/$name-serving.json
named $name-decode.json flashtune bench --grid decode --save $results/$name-decode.json
measure $name-first-use.json python -m benchmarks.host.first_use --save $results/$name-first-use.json
measure $name-random-problems.json \
    python -m tests.gpu.random.random_problems 2000 --save $results/$name-random-problems.json
measure $name-random-gradients.json \
    python -m tests.gpu.random.random_gradients 580 --seed 1 --kernels 60 --save $results/$name-random-gradients.json
named $name-sanitizer.json.gz \
    python -m scripts.sanitize --seconds 270 --out $results/$name-sanitizer.json.gz
cp $results/sources.json "$out/"
ls -l "$out"
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
