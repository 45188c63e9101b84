#!/bin/sh
# Trains the model of short.toml on needles in 64 tokens, extends its context to 256 tokens with long.toml and with
# long_theta.toml, and prints the losses of all three. Runs in the root of the repository.
#
# usage: examples/needle/run.sh DIR [SEED] [OPTION...]
# DIR is a folder that does not exist yet. SEED is run.seed, 0 if it is left out. Each OPTION goes to the three
# `moebius train`, such as --set run.device=cuda. The variable MOEBIUS names the program; without it, build/moebius.
set -eu
[ $# -gt 0 ] || { sed -n 's/^# usage/usage/p' "$0" >&2; exit 2; }
[ ! -e "$1" ] || { echo "$1 exists; name a new folder" >&2; exit 2; }
dir=$1 seed=${2:-0}
shift; [ $# -eq 0 ] || shift
moebius=${MOEBIUS:-build/moebius}
data=$dir/data
mkdir -p "$data"

make_data() {  # NAME SHORTEST LENGTH DOCUMENTS SEED
  python3 examples/needle/needle.py --shortest "$2" --length "$3" --documents "$4" --seed "$5" --out "$data/$1.jsonl"
  "$moebius" data build --input "$data/$1.jsonl" --tokenizer bytes --out "$data/$1" --force
}
make_data train_short 3 60 80000 1
make_data valid_short 60 60 512 2
make_data train_long 8 250 8000 3
make_data valid_long 250 250 512 4

evaluate() {  # WHAT MODEL DATA TOKENS
  printf '%s, needles in %s sequences: ' "$1" "$3"
  "$moebius" eval "$2" --data "$data/valid_$3" --seq-len "$4" --dtype f32 --json
}
"$moebius" train examples/needle/short.toml --set run.dir="$dir/short" --set run.seed="$seed" \
  --set "data.train=[\"$data/train_short\"]" --set "data.valid=[\"$data/valid_short\"]" "$@"
"$moebius" export "$dir/short" "$dir/short_hf"
evaluate "trained on 64 tokens" "$dir/short" short 64
for recipe in long long_theta; do
  "$moebius" train "examples/needle/$recipe.toml" --set run.dir="$dir/$recipe" --set run.seed="$seed" \
    --set model.hf="$dir/short_hf" --set model.init_from="$dir/short_hf" \
    --set "data.train=[\"$data/train_long\", {prefix = \"$data/train_short\", weight = 0.25}]" \
    --set "data.valid=[\"$data/valid_short\", \"$data/valid_long\"]" "$@"
  for length in short long; do evaluate "$recipe" "$dir/$recipe" $length 256; done
done
