#!/usr/bin/env bash
# Trains on several ranks over TCP, without MPI.
# Run this on every node of the job, with the same arguments.
#
#   NODES=2 MASTER=node0:29500 ./launch_torchrun.sh RANKS_OF_A_NODE RECIPE [--set KEY=VALUE]...
#
# MASTER is the name and a free port of one of the nodes.
# One node needs neither NODES nor MASTER.
# DRY=1 prints the command and runs nothing.
# torchrun is the launcher of PyTorch; Moebius itself needs no Python.
set -euo pipefail
(($# >= 2)) || { echo "usage: $0 RANKS_OF_A_NODE RECIPE [--set KEY=VALUE]..." >&2; exit 2; }
ranks=$1
shift
meet=(--standalone)
[[ ${NODES:-1} == 1 ]] || meet=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "${MASTER:?the node and port to meet at}"
  --rdzv-id "${JOB:-moebius}")
command=(torchrun "${meet[@]}" --nproc-per-node "$ranks" --no-python "${MOEBIUS:-moebius}" train "$@")
printf '%s\n' "${command[*]}"
[[ ${DRY:-0} == 1 ]] || exec "${command[@]}"
